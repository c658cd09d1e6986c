//! [`SentryProcess`]: monitors the process that isolates a sandbox. It need not be a child of this
//! process.
//!
//! The *sentry* is gVisor's kernel in user space, one process per sandbox.

use crate::error::GvisorError;
use jiffy_engine_api::ProcessInstance;
use nix::libc;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Monitored process, identified by a pidfd.
#[derive(Debug)]
pub(crate) struct SentryProcess {
    /// Process id and start time, which together identify the process.
    pub mark: ProcessInstance,
    fd: AsyncFd<OwnedFd>,
}

impl SentryProcess {
    /// Starts to monitor process `pid`. Must be called inside a tokio runtime.
    pub fn watch(pid: u32) -> Result<Self, GvisorError> {
        let number = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| GvisorError::Process(io::ErrorKind::NotFound.into()))?;
        let fd = pidfd_open(number, PidfdFlags::empty()).map_err(|e| match e {
            Errno::SRCH => GvisorError::Process(e.into()),
            e => GvisorError::Host(e.into()),
        })?;
        // SAFETY: an OwnedFd is the same descriptor always, and is closed only when dropped.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }
            .map_err(|e| GvisorError::Host(e.into_parts().1))?;
        // Read the mark only after the pidfd was opened. If this mark equals an earlier mark, the
        // process id was not reused in between, so the pidfd refers to the process of both marks.
        let mark = ProcessInstance::of(pid).map_err(GvisorError::Process)?;
        Ok(Self { mark, fd })
    }

    /// Waits until the process has exited.
    pub async fn ended(&self) {
        loop {
            match self.fd.readable().await {
                Ok(mut ready) if !self.has_ended() => ready.clear_ready(),
                // A process that cannot be monitored counts as exited.
                _ => return,
            }
        }
    }

    /// Returns whether the process has exited.
    pub fn has_ended(&self) -> bool {
        use std::os::fd::AsRawFd;
        let mut poll = libc::pollfd {
            fd: self.fd.get_ref().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the array has one pollfd, and the timeout is 0.
        let count = unsafe { libc::poll(&raw mut poll, 1, 0) };
        // Readable means that the process has exited. An error of poll counts as an exit too.
        count != 0
    }

    /// Kills the process. All processes of the sandbox are in its PID namespace and are killed with
    /// it.
    pub fn kill(&self) {
        // Ignore the error: the process has exited.
        let _ = pidfd_send_signal(self.fd.get_ref(), Signal::KILL);
    }

    /// Returns the CPU time of the process and its descendants, in microseconds.
    pub fn cpu_us(&self) -> Option<u64> {
        let mut ticks = 0_u64;
        let mut pids = vec![self.mark.pid];
        while let Some(pid) = pids.pop() {
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
                continue;
            };
            // The name of the program may contain spaces and brackets, and ends at the last
            // bracket.
            let fields = stat.rsplit_once(')')?.1.split_whitespace();
            // The first of `fields` is field 3. Fields 14 to 17: user and system time of the
            // process, and of its children that were waited for.
            let used = fields.skip(11).take(4).map_while(|f| f.parse::<u64>().ok());
            ticks += used.sum::<u64>();
            let threads = fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten();
            for thread in threads.flatten() {
                let children =
                    fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                pids.extend(
                    children
                        .split_whitespace()
                        .filter_map(|c| c.parse::<u32>().ok()),
                );
            }
        }
        // USER_HZ is 100 on all supported platforms (time(7)).
        Some(ticks * 10_000)
    }

    /// Returns the private memory in bytes: the memory of the sentry and the memfd that contains
    /// the memory of the guest's programs.
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
                // Blocks are counted in units of 512 bytes. The length would include memory that
                // was not touched.
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
    async fn the_exit_of_a_process_is_detected() {
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
