//! Threads that are started and confined before their work is available. Compiling a system call
//! filter, first in the thread and then in the kernel, takes most of the time of starting a thread.
//!
//! A *spare* is a VMM process that the daemon starts in advance for the next guest.

use crate::error::VmmError;
use crate::seccomp;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Stack size of each thread, in bytes.
const STACK_BYTES: usize = 256 * 1024;

type Work = Box<dyn FnOnce(Result<(), VmmError>) + Send>;

/// Confined thread that waits for its work. The thread exits if this value is dropped first.
pub struct ConfinedThread {
    work: Sender<Work>,
    handle: JoinHandle<()>,
}

impl ConfinedThread {
    /// Starts a thread for vCPU `id`.
    pub fn for_vcpu(id: usize) -> Result<Self, VmmError> {
        Self::start(format!("vcpu{id}"), seccomp::confine_vcpu)
    }

    /// Starts a thread for the disks.
    pub fn for_disks() -> Result<Self, VmmError> {
        Self::start("disks".to_owned(), seccomp::confine_disks)
    }

    /// Starts a thread that confines itself, and then waits for its work.
    fn start(name: String, confine: fn() -> Result<(), VmmError>) -> Result<Self, VmmError> {
        let (sender, inbox) = channel::<Work>();
        let main = move || {
            // Confine the thread before waiting, so that the filter is compiled in advance.
            let confined = confine();
            // `recv` fails if the sender was dropped. No work will arrive then, and the thread
            // exits.
            if let Ok(work) = inbox.recv() {
                work(confined);
            }
        };
        let thread = Builder::new().name(name).stack_size(STACK_BYTES);
        let handle = thread
            .spawn(main)
            .map_err(|e| VmmError::host("starting a thread", e))?;
        Ok(Self {
            work: sender,
            handle,
        })
    }

    /// Gives the thread its work. The argument of `work` is the result of confining the thread.
    pub fn run(self, work: impl FnOnce(Result<(), VmmError>) + Send + 'static) -> JoinHandle<()> {
        // Ignore the error: the thread receives until `self` is dropped, so it has not exited.
        let _ = self.work.send(Box::new(work));
        self.handle
    }
}

/// Threads of a spare process, started before the configuration of the machine is known.
#[derive(Default)]
pub struct SpareThreads {
    vcpus: Vec<ConfinedThread>,
    disks: Option<ConfinedThread>,
}

impl SpareThreads {
    /// Starts the threads of a machine with `vcpus` vCPUs. Ignores errors: missing threads are
    /// started when they are taken.
    pub fn start(vcpus: usize) -> Self {
        Self {
            vcpus: (0..vcpus)
                .map_while(|id| ConfinedThread::for_vcpu(id).ok())
                .collect(),
            disks: ConfinedThread::for_disks().ok(),
        }
    }

    /// Takes the threads of `count` vCPUs, and starts missing threads. Surplus threads exit.
    pub fn take_vcpus(&mut self, count: usize) -> Result<Vec<ConfinedThread>, VmmError> {
        let mut threads = std::mem::take(&mut self.vcpus);
        threads.truncate(count);
        for id in threads.len()..count {
            threads.push(ConfinedThread::for_vcpu(id)?);
        }
        Ok(threads)
    }

    /// Takes the thread of the disks, or starts it.
    pub fn take_disks(&mut self) -> Result<ConfinedThread, VmmError> {
        self.disks.take().map_or_else(ConfinedThread::for_disks, Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn spare_threads_are_confined_and_exit_if_dropped() {
        let mut threads = SpareThreads::start(3);
        let idle = threads.vcpus.pop().unwrap();
        let handle = idle.handle;
        drop(idle.work);
        handle.join().unwrap();

        let (sender, receiver) = channel();
        let taken = threads.take_vcpus(3).unwrap();
        let disks = threads.take_disks().unwrap();
        for thread in taken.into_iter().chain([disks]) {
            let (sender, (go, wait)) = (sender.clone(), channel::<()>());
            let handle = thread.run(move |confined| {
                let name = std::thread::current().name().unwrap().to_owned();
                sender.send((name, confined.is_ok())).unwrap();
                wait.recv().unwrap();
            });
            let (name, confined) = receiver.recv().unwrap();
            assert!(confined, "{name}");
            assert!(has_filter(&name), "{name}");
            go.send(()).unwrap();
            handle.join().unwrap();
        }
        assert_eq!(threads.take_vcpus(1).unwrap().len(), 1);
    }

    /// Returns whether the thread with this name has a system call filter.
    fn has_filter(name: &str) -> bool {
        let mut tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.any(|task| {
            let status =
                std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
            let has = |line: &str| status.lines().any(|l| l == line);
            has(&format!("Name:\t{name}")) && has("Seccomp:\t2")
        })
    }
}
