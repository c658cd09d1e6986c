//! Determines why a sandbox ended, after its VMM has exited. The sources may contradict each other,
//! because a guest may have compromised its VMM.

use jiffy_engine_api::ExitReason;
use jiffy_proto::vm::StopCause;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Determines why a sandbox ended. Considers the VMM's stop cause, its exit status if known, an OOM
/// kill in its control group, and the guest's last console output. `over_limit` states that there
/// was an OOM kill.
pub(crate) fn classify(
    cause: Option<StopCause>,
    status: io::Result<Option<ExitStatus>>,
    over_limit: bool,
    console: &[u8],
) -> ExitReason {
    // Ignore the stop cause of a VMM killed by its seccomp filter: the VMM was faulty or
    // compromised.
    if let Ok(Some(status)) = &status
        && status.signal() == Some(libc::SIGSYS)
    {
        return ExitReason::VmmDied {
            status: status.to_string(),
        };
    }
    match cause {
        Some(StopCause::Requested) => ExitReason::Requested,
        // A panicking guest reboots at once (`panic=-1`), so only the console output
        // distinguishes a panic from a reboot.
        Some(StopCause::GuestReset) => reset_reason(&printable(console)),
        Some(StopCause::MissingMemory { reason }) => ExitReason::MissingMemory { reason },
        Some(StopCause::GuestFault { reason }) => ExitReason::GuestFault { reason },
        Some(StopCause::BadConfig { reason } | StopCause::HostError { reason }) => {
            ExitReason::HostError { reason }
        }
        // The VMM reported no cause, so it was killed or crashed.
        None if over_limit => ExitReason::VmmDied {
            status: "out of memory: the VMM exceeded the limit of its control group".to_owned(),
        },
        None => ExitReason::VmmDied {
            status: match status {
                Ok(Some(status)) => status.to_string(),
                Ok(None) => "unknown exit status".to_owned(),
                Err(e) => e.to_string(),
            },
        },
    }
}

/// Returns why the guest has reset itself, from the message of a kernel panic on its console.
fn reset_reason(console: &str) -> ExitReason {
    const PANIC_PREFIX: &str = "Kernel panic - not syncing: ";
    let Some(at) = console.rfind(PANIC_PREFIX) else {
        return ExitReason::GuestReset;
    };
    let message = console[at + PANIC_PREFIX.len()..]
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
        ExitReason::GuestOutOfMemory { message }
    } else {
        ExitReason::GuestPanic { message }
    }
}

/// Converts bytes to text for a terminal. Removes control characters except line feeds and tabs.
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
    fn a_panic_is_reported_with_the_kernels_message() {
        let console =
            "foo\n[    1.2] Kernel panic - not syncing: sysrq triggered crash\n[    1.3] CPU: 0\n";
        let message = "sysrq triggered crash".to_owned();
        assert_eq!(reset_reason(console), ExitReason::GuestPanic { message });
        let oom = "Kernel panic - not syncing: System is deadlocked on memory\n";
        assert!(matches!(
            reset_reason(oom),
            ExitReason::GuestOutOfMemory { .. }
        ));
        assert_eq!(
            reset_reason("reboot: Restarting system\n"),
            ExitReason::GuestReset
        );
    }

    #[test]
    fn the_stop_cause_of_a_vmm_killed_by_its_filter_does_not_count() {
        let end = |signal| {
            classify(
                Some(StopCause::Requested),
                Ok(Some(ExitStatus::from_raw(signal))),
                false,
                b"",
            )
        };
        assert!(matches!(end(libc::SIGSYS), ExitReason::VmmDied { .. }));
        // A VMM that was killed because it exited too slowly is not at fault.
        assert_eq!(end(libc::SIGKILL), ExitReason::Requested);
    }

    #[test]
    fn missing_memory_is_distinguished_from_other_host_errors() {
        let reason = || "the store did not answer for 1 s".to_owned();
        let end = |cause| classify(Some(cause), Ok(None), false, b"");
        let missing = end(StopCause::MissingMemory { reason: reason() });
        assert_eq!(missing, ExitReason::MissingMemory { reason: reason() });
        let other = end(StopCause::HostError { reason: reason() });
        assert_eq!(other, ExitReason::HostError { reason: reason() });
        // A compromised VMM could report any cause.
        let killed = Ok(Some(ExitStatus::from_raw(libc::SIGSYS)));
        let cause = StopCause::MissingMemory { reason: reason() };
        let killed = classify(Some(cause), killed, false, b"");
        assert!(matches!(killed, ExitReason::VmmDied { .. }));
    }

    #[test]
    fn a_vmm_killed_at_its_memory_limit_is_reported_as_such() {
        let status = || Ok(Some(ExitStatus::from_raw(libc::SIGKILL)));
        let end = classify(None, status(), true, b"").to_string();
        assert!(end.contains("out of memory"), "{end}");
        let end = classify(None, status(), false, b"").to_string();
        assert!(!end.contains("out of memory"), "{end}");
    }

    #[test]
    fn console_output_cannot_drive_the_terminal() {
        assert_eq!(printable(b"a\x1b[2Jb\r\n\x07c"), "a[2Jb\nc");
    }
}
