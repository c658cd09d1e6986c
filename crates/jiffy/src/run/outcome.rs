//! Outcome of a run, and its report.

use jiffy_api_types::SandboxInfo;
use jiffy_engine_api::{BootMode, BootReport, ExitReason};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Instant;

/// Console lines shown with a failure.
const CONSOLE_LINES: usize = 12;
/// Most captured output of each stream, in bytes.
const MAX_CAPTURED_BYTES: usize = 64 << 20;

/// Output kept for `--json`.
#[derive(Debug, Default)]
pub struct CapturedOutput {
    bytes: Vec<u8>,
    truncated: bool,
}

impl CapturedOutput {
    /// Adds a chunk as far as there is room.
    pub fn push(&mut self, chunk: &[u8]) {
        let room = MAX_CAPTURED_BYTES - self.bytes.len();
        self.truncated |= chunk.len() > room;
        self.bytes
            .extend_from_slice(&chunk[..chunk.len().min(room)]);
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Boot of the guest of a run.
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
            // A daemon's client hears of the whole only.
            phases: None,
        }
    }
}

/// Outcome of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Our exit code.
    pub code: u8,
    /// Said on standard error, if there is something to say beyond the command's own words.
    pub message: Option<String>,
    /// The command ended, in whatever way, and its guest did not.
    pub finished: bool,
    /// Boot of the guest.
    pub boot: Option<GuestBoot>,
    /// From asking for the process to its end, in microseconds.
    pub exec_us: u64,
    /// Captured output.
    pub stdout: CapturedOutput,
    /// Captured output.
    pub stderr: CapturedOutput,
}

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

#[derive(Debug, Clone, Copy, Serialize)]
struct Phases {
    vmm: f64,
    kernel: f64,
    init: f64,
    agent: f64,
}

fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

impl Outcome {
    /// Ended by signal `number` before there was a command.
    pub fn interrupted(number: i32) -> Self {
        Self {
            code: signalled(number),
            ..Self::default()
        }
    }

    /// Ended by us, with a reason.
    pub fn failed(code: u8, message: String) -> Self {
        Self {
            code,
            message: Some(message),
            ..Self::default()
        }
    }

    /// Tells and returns the exit code.
    pub fn report(&self, json: bool, began: Instant) -> anyhow::Result<ExitCode> {
        if json {
            let total_us = u64::try_from(began.elapsed().as_micros())?;
            outln!("{}", jiffy_client::terminal::json(&self.json(total_us))?);
        } else if let Some(message) = &self.message {
            errln!("jiffy: {message}");
        }
        Ok(ExitCode::from(self.code))
    }

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

/// 128 + N, as shells have it.
pub fn signalled(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

/// A guest that is gone, with its last words.
pub fn end(end: &ExitReason, console: &str) -> String {
    with_last_lines(&end.to_string(), console)
}

/// A sentence about a guest, with the last lines of its console.
pub fn with_last_lines(sentence: &str, console: &str) -> String {
    format!("{sentence}{}", last_lines(console))
}

/// The console's last lines under a heading; nothing if there are none.
fn last_lines(console: &str) -> String {
    let lines: Vec<&str> = console.lines().filter(|l| !l.trim().is_empty()).collect();
    if lines.is_empty() {
        return String::new();
    }
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
