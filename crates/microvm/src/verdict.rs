//! What became of a sandbox, from what is left of it.

use jiffy_engine::SandboxEnd;
use jiffy_proto::vm::StopCause;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Why the sandbox ended: what the VMM said, how its process ended if that is known, whether its
/// group was over its limit of memory, and the guest's last words.
pub(crate) fn judge(
    cause: Option<StopCause>,
    status: io::Result<Option<ExitStatus>>,
    over_limit: bool,
    console: &[u8],
) -> SandboxEnd {
    // Whatever a VMM said before: one that made a call its filter forbids was broken, or no longer ours.
    if let Ok(Some(status)) = &status
        && status.signal() == Some(libc::SIGSYS)
    {
        return SandboxEnd::VmmDied {
            status: status.to_string(),
        };
    }
    match cause {
        Some(StopCause::Requested) => SandboxEnd::Requested,
        Some(StopCause::GuestReset) => last_words(&printable(console)),
        Some(StopCause::GuestFault { reason }) => SandboxEnd::GuestFault { reason },
        Some(StopCause::BadConfig { reason } | StopCause::HostError { reason }) => {
            SandboxEnd::HostError { reason }
        }
        None if over_limit => SandboxEnd::VmmDied {
            status: "out of memory: it needed more than its control group may use".to_owned(),
        },
        None => SandboxEnd::VmmDied {
            status: match status {
                Ok(Some(status)) => status.to_string(),
                Ok(None) => "how is not known".to_owned(),
                Err(e) => e.to_string(),
            },
        },
    }
}

fn last_words(console: &str) -> SandboxEnd {
    const PANIC: &str = "Kernel panic - not syncing: ";
    let Some(at) = console.rfind(PANIC) else {
        return SandboxEnd::GuestReset;
    };
    let message = console[at + PANIC.len()..]
        .lines()
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned();
    let memory = [
        "Out of memory",
        "out of memory",
        "System is deadlocked on memory",
    ];
    if memory.iter().any(|words| message.contains(words)) {
        SandboxEnd::GuestOutOfMemory { message }
    } else {
        SandboxEnd::GuestPanic { message }
    }
}

/// Text for a terminal: no control characters but line ends and tabs.
pub(crate) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_told_in_the_kernels_own_words() {
        let console =
            "foo\n[    1.2] Kernel panic - not syncing: sysrq triggered crash\n[    1.3] CPU: 0\n";
        let message = "sysrq triggered crash".to_owned();
        assert_eq!(last_words(console), SandboxEnd::GuestPanic { message });
        let oom = "Kernel panic - not syncing: System is deadlocked on memory\n";
        assert!(matches!(
            last_words(oom),
            SandboxEnd::GuestOutOfMemory { .. }
        ));
        assert_eq!(
            last_words("reboot: Restarting system\n"),
            SandboxEnd::GuestReset
        );
    }

    #[test]
    fn a_vmm_that_its_filter_killed_is_not_believed() {
        let end = |signal| {
            judge(
                Some(StopCause::Requested),
                Ok(Some(ExitStatus::from_raw(signal))),
                false,
                b"",
            )
        };
        assert!(matches!(end(libc::SIGSYS), SandboxEnd::VmmDied { .. }));
        // One that was slow to leave and was killed for it did nothing wrong.
        assert_eq!(end(libc::SIGKILL), SandboxEnd::Requested);
    }

    #[test]
    fn a_vmm_that_was_killed_for_memory_is_told_as_such() {
        let status = || Ok(Some(ExitStatus::from_raw(libc::SIGKILL)));
        let end = judge(None, status(), true, b"").to_string();
        assert!(end.contains("out of memory"), "{end}");
        let end = judge(None, status(), false, b"").to_string();
        assert!(!end.contains("out of memory"), "{end}");
    }

    #[test]
    fn console_output_cannot_drive_the_terminal() {
        assert_eq!(printable(b"a\x1b[2Jb\r\n\x07c"), "a[2Jb\nc");
    }
}
