//! Threads that are started and confined before their work is available. Compiling a system call
//! filter, first in the thread and then in the kernel, takes most of the time of starting a thread.

use crate::error::VmmError;
use crate::seccomp;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Stack size of each thread, in bytes.
const STACK_BYTES: usize = 256 * 1024;

type Work = Box<dyn FnOnce(Result<(), VmmError>) + Send>;

/// Thread that waits for its work. It exits if it is dropped before that.
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

    fn start(name: String, confine: fn() -> Result<(), VmmError>) -> Result<Self, VmmError> {
        let (give, inbox) = channel::<Work>();
        let main = move || {
            let confined = confine();
            if let Ok(work) = inbox.recv() {
                work(confined);
            }
        };
        let thread = Builder::new().name(name).stack_size(STACK_BYTES);
        let handle = thread
            .spawn(main)
            .map_err(|e| VmmError::host("starting a thread", e))?;
        Ok(Self { work: give, handle })
    }

    /// Gives the thread its work. The argument of `work` is the result of confining the thread.
    pub fn run(self, work: impl FnOnce(Result<(), VmmError>) + Send + 'static) -> JoinHandle<()> {
        // Ignore the error: the thread waits as long as `self` exists.
        let _ = self.work.send(Box::new(work));
        self.handle
    }
}

/// Threads for a machine whose configuration is not known yet.
#[derive(Default)]
pub struct ThreadsAhead {
    vcpus: Vec<ConfinedThread>,
    disks: Option<ConfinedThread>,
}

impl ThreadsAhead {
    /// Starts the threads of a machine with `vcpus` vCPUs. Threads that cannot be started are left
    /// out.
    pub fn start(vcpus: usize) -> Self {
        Self {
            vcpus: (0..vcpus)
                .map_while(|id| ConfinedThread::for_vcpu(id).ok())
                .collect(),
            disks: ConfinedThread::for_disks().ok(),
        }
    }

    /// Takes the threads of `count` vCPUs. Other threads exit.
    pub fn take_vcpus(&mut self, count: usize) -> Result<Vec<ConfinedThread>, VmmError> {
        let mut threads = std::mem::take(&mut self.vcpus);
        threads.truncate(count);
        for id in threads.len()..count {
            threads.push(ConfinedThread::for_vcpu(id)?);
        }
        Ok(threads)
    }

    /// Takes the thread of the disks.
    pub fn take_disks(&mut self) -> Result<ConfinedThread, VmmError> {
        self.disks.take().map_or_else(ConfinedThread::for_disks, Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_thread_that_was_started_ahead_does_its_work_confined_and_one_without_work_ends() {
        let mut threads = ThreadsAhead::start(3);
        let idle = threads.vcpus.pop().unwrap();
        let ended = idle.handle;
        drop(idle.work);
        ended.join().unwrap();

        let (tell, told) = channel();
        let taken = threads.take_vcpus(3).unwrap();
        let disks = threads.take_disks().unwrap();
        for thread in taken.into_iter().chain([disks]) {
            let (tell, (go, wait)) = (tell.clone(), channel::<()>());
            let handle = thread.run(move |confined| {
                let name = std::thread::current().name().unwrap().to_owned();
                tell.send((name, confined.is_ok())).unwrap();
                wait.recv().unwrap();
            });
            let (name, confined) = told.recv().unwrap();
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
