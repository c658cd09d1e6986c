//! Writes a console message for each process that the kernel killed because of a lack of memory.
//! The kernel's own messages are below the level that the console shows.

use super::oom::OomWatch;
use crate::calendar::format_seconds;
use crate::sys;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::io::Interest;

/// Kernel log. Each read returns one record.
const KERNEL_LOG: &str = "/dev/kmsg";
/// Maximum size of a record (`PRINTKRB_RECORD_MAX` and the text around it).
pub(super) const MAX_RECORD_BYTES: usize = 8192;
/// Maximum number of lines, so that a guest with permanently exhausted memory does not fill its
/// console.
const MAX_LINES: u32 = 100;

/// A process that the kernel killed because of memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OomVictim {
    /// Process id.
    pub pid: u32,
    name: String,
    /// Resident memory in KiB.
    kib: u64,
    /// Set if the limit of a control group was reached. The guest may still have free memory.
    in_group: bool,
}

impl OomVictim {
    /// Parses a record of the kernel's log. Returns `None` if it does not name a victim.
    pub fn parse(record: &str) -> Option<Self> {
        let (prefix, text) = record.split_once(';')?;
        // Programs can also write records, but not with the facility of the kernel, which is 0.
        // `priority` is facility * 8 + level.
        let priority: u32 = prefix.split(',').next()?.parse().ok()?;
        if priority > 7 {
            return None;
        }
        // Further lines of a record contain its device and subsystem.
        let text = text.lines().next()?;
        let (kind, rest) = text.split_once(": Killed process ")?;
        let in_group = match kind {
            "Out of memory" | "Out of memory (oom_kill_allocating_task)" => false,
            "Memory cgroup out of memory" => true,
            _ => return None,
        };
        let (pid, rest) = rest.split_once(" (")?;
        // A name may contain parentheses.
        let (name, rest) = rest.rsplit_once(") total-vm:")?;
        let resident = ["anon-rss:", "file-rss:", "shmem-rss:"];
        let parts = rest.split([' ', ',']).filter_map(|word| {
            let number = resident.iter().find_map(|key| word.strip_prefix(key))?;
            number.strip_suffix("kB")?.parse::<u64>().ok()
        });
        Some(Self {
            pid: pid.parse().ok()?,
            name: name.to_owned(),
            kib: parts.fold(0, u64::saturating_add),
            in_group,
        })
    }

    /// Returns the line of the log about a process that the kernel has killed.
    fn line(&self, at: SystemTime) -> String {
        let of = if self.in_group {
            "a control group of the guest".to_owned()
        } else {
            guest_memory_text()
        };
        format!(
            "{} out of memory: the kernel killed process {} ({}), which used {} MiB; {of} had none left",
            format_utc(at),
            self.pid,
            self.name,
            self.kib / 1024,
        )
    }
}

/// Returns a text with the guest's memory.
fn guest_memory_text() -> String {
    match sys::memory_kib() {
        Ok(kib) => format!("the guest ({} MiB)", kib / 1024),
        Err(_) => "the guest".to_owned(),
    }
}

/// Writes a line to the console, which the host records.
fn write_console(line: &str) {
    // A failure to write cannot be reported elsewhere.
    let _ = writeln!(io::stderr(), "jiffy: {line}");
}

/// Opens the kernel's log for later records. Each open file has a separate position.
pub(super) fn open_kernel_log() -> io::Result<File> {
    let mut log = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(KERNEL_LOG)?;
    log.seek(SeekFrom::End(0))?;
    Ok(log)
}

/// Reports every kill from now on, on the console and with `on_kill`. Returns only if the kernel's
/// log cannot be read.
pub async fn follow_kernel(on_kill: impl Fn()) {
    let mut lines = 0;
    let opened =
        open_kernel_log().and_then(|log| sys::register(OwnedFd::from(log), Interest::READABLE));
    let Ok(log) = opened else { return };
    let mut buffer = vec![0; MAX_RECORD_BYTES];
    loop {
        let Ok(mut ready) = log.readable().await else {
            return;
        };
        match ready.try_io(|log| sys::read(log.as_raw_fd(), &mut buffer)) {
            Ok(Ok(n)) => {
                let record = String::from_utf8_lossy(&buffer[..n]);
                let Some(victim) = OomVictim::parse(&record) else {
                    continue;
                };
                on_kill();
                if lines < MAX_LINES {
                    lines += 1;
                    write_console(&victim.line(SystemTime::now()));
                }
            }
            // Records were overwritten before they were read, or a record is too long.
            Ok(Err(e)) if matches!(e.raw_os_error(), Some(libc::EPIPE | libc::EINVAL)) => {}
            Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(_)) => return,
            Err(_would_block) => {}
        }
    }
}

/// Kills that are known only from a counter, on kernels without a log (gVisor).
#[derive(Debug, Default)]
pub struct CountedKills {
    watch: OomWatch,
    /// Number of kills that were logged.
    lines: u32,
}

impl CountedKills {
    /// Checks the counter after a child exited. `command` is the program of the child if the child
    /// was killed.
    pub fn child_ended(&mut self, pid: u32, command: Option<&str>) {
        if self.watch.happened() && self.lines < MAX_LINES {
            self.lines += 1;
            let now = format_utc(SystemTime::now());
            let of = guest_memory_text();
            write_console(&match command {
                Some(command) => format!(
                    "{now} out of memory: process {pid} ({command}), or one that it waited for, \
                     was killed; {of} had none left"
                ),
                None => format!("{now} out of memory: a process was killed; {of} had none left"),
            });
        }
    }
}

/// Formats a time as RFC 3339 in UTC, in seconds.
fn format_utc(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    format_seconds(i64::try_from(seconds).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_kill_is_recognised_by_the_kernels_own_record_only() {
        let text = "Killed process 212 (my (odd) name) total-vm:527552kB, anon-rss:476160kB, \
            file-rss:1024kB, shmem-rss:1024kB, UID:1000 pgtables:984kB oom_score_adj:0\n \
            SUBSYSTEM=x\n";
        // Fields before the text: priority (3 is the kernel's level "error"), number of the record,
        // time and flags.
        let whole = format!("3,512,4711,-;Out of memory: {text}");
        let victim = OomVictim::parse(&whole).unwrap();
        assert_eq!(
            (
                victim.pid,
                victim.name.as_str(),
                victim.kib,
                victim.in_group
            ),
            (212, "my (odd) name", 478_208, false)
        );
        let line = victim.line(UNIX_EPOCH + Duration::from_secs(1_795_444_999));
        assert!(
            line.starts_with(
                "2026-11-23T14:43:19Z out of memory: the kernel killed process 212 \
                (my (odd) name), which used 467 MiB; the guest"
            ),
            "{line}"
        );
        let group = format!("3,512,4711,-;Memory cgroup out of memory: {text}");
        assert!(OomVictim::parse(&group).unwrap().in_group);
        // Programs can also write to the log, but such a record has a facility number.
        for other in [
            format!("11,512,4711,-;Out of memory: {text}"),
            "6,1,2,-;oom_reaper: reaped process 212 (x)".to_owned(),
            "3,1,2,-;Out of memory: Killed process x (y) total-vm:1kB".to_owned(),
            String::new(),
        ] {
            assert_eq!(OomVictim::parse(&other), None, "{other}");
        }
    }
}
