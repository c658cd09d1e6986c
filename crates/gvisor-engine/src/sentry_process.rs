//! The process that isolates a sandbox, which need not be our child.

use crate::error::GvisorError;
use jiffy_engine_api::ProcessInstance;
use nix::libc;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A process that is watched.
#[derive(Debug)]
pub(crate) struct SentryProcess {
    pub mark: ProcessInstance,
    fd: AsyncFd<OwnedFd>,
}

impl SentryProcess {
    /// Watches process `pid`; must be called inside a tokio runtime.
    pub fn watch(pid: u32) -> Result<Self, GvisorError> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| GvisorError::Process(io::ErrorKind::NotFound.into()))?;
        let fd = pidfd_open(number, PidfdFlags::empty());
        let fd = fd.map_err(|e| GvisorError::Process(e.into()))?;
        // SAFETY: an OwnedFd is the same descriptor always, and is closed only when dropped.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        let fd = fd.map_err(|e| GvisorError::Process(e.into_parts().1))?;
        // After opening: the mark is that of the process which the descriptor means, or of none.
        let mark = ProcessInstance::of(pid).map_err(GvisorError::Process)?;
        Ok(Self { mark, fd })
    }

    /// Waits until it has ended.
    pub async fn ended(&self) {
        loop {
            match self.fd.readable().await {
                Ok(mut ready) if !self.has_ended() => ready.clear_ready(),
                // A process that cannot be watched is looked at no longer.
                _ => return,
            }
        }
    }

    /// True if it has ended.
    pub fn has_ended(&self) -> bool {
        use std::os::fd::AsRawFd;
        let mut poll = libc::pollfd {
            fd: self.fd.get_ref().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd, and no time to wait.
        let count = unsafe { libc::poll(&raw mut poll, 1, 0) };
        count != 0
    }

    /// Ends it without asking. All processes of the sandbox are in its process namespace, and end
    /// with it.
    pub fn kill(&self) {
        // One that is gone needs none.
        let _ = pidfd_send_signal(self.fd.get_ref(), Signal::KILL);
    }

    /// Processor time of it and what it runs, in microseconds.
    pub fn cpu_us(&self) -> Option<u64> {
        let mut ticks = 0_u64;
        let mut pids = vec![self.mark.pid];
        while let Some(pid) = pids.pop() {
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
                continue;
            };
            let fields = stat.rsplit_once(')')?.1.split_whitespace();
            // Fields 14 to 17: in user mode, in the kernel, and both of children that were waited
            // for.
            let used = fields.skip(11).take(4).map_while(|f| f.parse::<u64>().ok());
            ticks += used.sum::<u64>();
            let threads = fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten();
            for thread in threads.flatten() {
                let children = fs::read_to_string(thread.path().join("children"));
                let children = children.unwrap_or_default();
                pids.extend(
                    children
                        .split_whitespace()
                        .filter_map(|c| c.parse::<u32>().ok()),
                );
            }
        }
        // The kernel's ticks for user space are hundredths of a second on every platform there is
        // (USER_HZ, time(7)).
        Some(ticks * 10_000)
    }

    /// Memory that is its own in bytes: what the guest's programs have, which is one nameless file,
    /// and the kernel's that runs them.
    pub fn memory_bytes(&self) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        let pid = self.mark.pid;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let anonymous = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
        let kib: u64 = anonymous.split_whitespace().next()?.parse().ok()?;
        let mut bytes = kib * 1024;
        for fd in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
            let name = fs::read_link(fd.path()).unwrap_or_default();
            if name.as_os_str().as_encoded_bytes().starts_with(b"/memfd:") {
                bytes += fs::metadata(fd.path()).map_or(0, |m| m.blocks() * 512);
            }
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_process_is_seen_by_other_processes() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let process = SentryProcess::watch(child.id()).unwrap();
        assert!(!process.has_ended());
        assert!(process.cpu_us().is_some() && process.memory_bytes().is_some());
        process.kill();
        process.ended().await;
        assert!(process.has_ended());
        child.wait().unwrap();
        assert!(SentryProcess::watch(child.id()).is_err());
    }
}
