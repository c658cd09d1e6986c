//! Outcome of a command: its exit code, message and captured output, and the report for `--json`.

use jiffy_api_types::SandboxInfo;
use jiffy_engine_api::{BootMode, BootReport, ExitReason};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Instant;

/// Number of console lines shown with a failure.
const CONSOLE_LINES: usize = 12;
/// Maximum captured output of each stream in bytes.
const MAX_CAPTURED_BYTES: usize = 64 << 20;

/// Captured output for `--json`.
#[derive(Debug, Default)]
pub struct CapturedOutput {
    bytes: Vec<u8>,
    truncated: bool,
}

impl CapturedOutput {
    /// Appends a chunk up to the limit.
    pub fn push(&mut self, chunk: &[u8]) {
        // Cannot be negative: the buffer never exceeds the limit.
        let free_bytes = MAX_CAPTURED_BYTES - self.bytes.len();
        self.truncated |= chunk.len() > free_bytes;
        self.bytes
            .extend_from_slice(&chunk[..chunk.len().min(free_bytes)]);
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Boot of the guest of a command.
#[derive(Debug, Clone, Copy)]
pub struct GuestBoot {
    mode: Option<BootMode>,
    ms: Option<f64>,
    phases: Option<Phases>,
}

impl From<BootReport> for GuestBoot {
    fn from(report: BootReport) -> Self {
        Self {
            mode: Some(report.mode),
            ms: Some(ms(report.total_us)),
            phases: Some(Phases {
                vmm: ms(report.vmm_us),
                kernel: ms(report.kernel_us),
                init: ms(report.init_us),
                agent: ms(report.agent_us),
            }),
        }
    }
}

impl From<&SandboxInfo> for GuestBoot {
    fn from(record: &SandboxInfo) -> Self {
        Self {
            mode: record.boot_mode,
            ms: record.boot_ms,
            // The API reports only the total time.
            phases: None,
        }
    }
}

/// Outcome of a command.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Exit code of this process.
    pub code: u8,
    /// Message for standard error.
    pub message: Option<String>,
    /// True if the exit of the command was observed, or if the agent killed it at its timeout.
    /// False after failures and signals. Volumes are copied back only if this is true.
    pub finished: bool,
    /// Boot of the guest.
    pub boot: Option<GuestBoot>,
    /// Time from the request of the process to its exit, in microseconds.
    pub exec_us: u64,
    /// Captured standard output.
    pub stdout: CapturedOutput,
    /// Captured standard error.
    pub stderr: CapturedOutput,
}

/// JSON report of `--json`. The field names are part of the interface.
#[derive(Serialize)]
struct RunReport<'a> {
    exit_code: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
    stdout: String,
    stderr: String,
    stdout_truncated: bool,
    stderr_truncated: bool,
    boot_mode: Option<BootMode>,
    boot_ms: Option<f64>,
    boot_phases_ms: Option<Phases>,
    exec_ms: f64,
    total_ms: f64,
}

/// Phases of the boot, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Phases {
    vmm: f64,
    kernel: f64,
    init: f64,
    agent: f64,
}

/// Converts microseconds to milliseconds.
fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

impl Outcome {
    /// Returns the outcome after signal `number` before the command started.
    pub fn interrupted(number: i32) -> Self {
        Self {
            code: signal_code(number),
            ..Self::default()
        }
    }

    /// Returns the outcome of a failure of Jiffy.
    pub fn failed(code: u8, message: String) -> Self {
        Self {
            code,
            message: Some(message),
            ..Self::default()
        }
    }

    /// Prints the report and returns the exit code.
    pub fn report(&self, json: bool, start: Instant) -> anyhow::Result<ExitCode> {
        if json {
            let total_us = u64::try_from(start.elapsed().as_micros())?;
            outln!("{}", jiffy_client::terminal::json(&self.json(total_us))?);
        } else if let Some(message) = &self.message {
            errln!("jiffy: {message}");
        }
        Ok(ExitCode::from(self.code))
    }

    /// Returns the report of `jiffy run --json`.
    fn json(&self, total_us: u64) -> RunReport<'_> {
        RunReport {
            exit_code: self.code,
            message: self.message.as_deref(),
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
            stdout_truncated: self.stdout.truncated,
            stderr_truncated: self.stderr.truncated,
            boot_mode: self.boot.and_then(|b| b.mode),
            boot_ms: self.boot.and_then(|b| b.ms),
            boot_phases_ms: self.boot.and_then(|b| b.phases),
            exec_ms: ms(self.exec_us),
            total_ms: ms(total_us),
        }
    }
}

/// Returns the exit code of a process killed by signal `number`, 128 + N as in shells.
pub fn signal_code(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

/// Returns the exit reason of a guest with the last lines of its console.
pub fn exit_message(reason: &ExitReason, console: &str) -> String {
    with_last_lines(&reason.to_string(), console)
}

/// Appends the last lines of a console to a message.
pub fn with_last_lines(message: &str, console: &str) -> String {
    format!("{message}{}", last_lines(console))
}

/// Returns the last lines of the console below a heading. Empty if the console is empty.
fn last_lines(console: &str) -> String {
    let lines: Vec<&str> = console.lines().filter(|l| !l.trim().is_empty()).collect();
    if lines.is_empty() {
        return String::new();
    }
    // The cause of a failure is usually at the end.
    let shown = &lines[lines.len().saturating_sub(CONSOLE_LINES)..];
    let mut text = String::from("\n  the guest's last console output:");
    for line in shown {
        text.push_str("\n  | ");
        text.push_str(line);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_console_lines_are_shown() {
        let console: String = (0..40).map(|i| format!("line {i}\n\n")).collect();
        let text = last_lines(&console);
        assert!(
            text.ends_with("| line 39") && !text.contains("line 27\n") && text.contains("line 28")
        );
        assert_eq!(last_lines("\n \n"), "");
    }

    #[test]
    fn captured_output_is_bounded() {
        let mut captured = CapturedOutput::default();
        captured.push(&vec![b'x'; MAX_CAPTURED_BYTES - 1]);
        assert!(!captured.truncated);
        captured.push(b"yz");
        assert!(captured.truncated);
        assert_eq!(captured.bytes.len(), MAX_CAPTURED_BYTES);
    }
}
