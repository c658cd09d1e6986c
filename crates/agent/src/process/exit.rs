//! Exit of a process, and the final frame of the streams of clients, which reports the exit.

use crate::rpc::frame;
use bytes::Bytes;
use serde::Serialize;

/// Exit of a process, as reported by `waitpid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessExit {
    /// Exit with this status.
    Code(i32),
    /// Termination by this signal.
    Signal(i32),
}

impl ProcessExit {
    /// Returns whether the kernel's out-of-memory killer may have caused the exit, directly or
    /// through a shell.
    pub fn is_sigkill(self) -> bool {
        // A shell whose child was killed exits with 128 + SIGKILL.
        matches!(self, Self::Signal(libc::SIGKILL) | Self::Code(137))
    }

    /// Returns the final frames of a stream: the `end` event and the end of the stream.
    /// `output_open` is true if other processes have the output open. Their later output is not
    /// sent. `out_of_memory` is true if the kernel killed the process at a memory limit.
    pub fn frames(self, out_of_memory: bool, output_open: bool) -> Bytes {
        let (code, exited, mut status) = match self {
            Self::Code(code) => (code, true, format!("exit status {code}")),
            // The exit code that a shell would return.
            Self::Signal(signal) => (128 + signal, false, format!("signal: {}", describe(signal))),
        };
        if out_of_memory {
            status.push_str(" (out of memory)");
        }
        let event = EventMessage {
            event: EndEvent {
                end: ProcessEnd {
                    exit_code: code,
                    exited,
                    error: (code != 0).then_some(&status),
                    status: &status,
                    oom_killed: out_of_memory,
                    output_open,
                },
            },
        };
        let mut bytes = Vec::from(frame::message(&event));
        bytes.extend_from_slice(&frame::end(None));
        Bytes::from(bytes)
    }
}

/// Message of the stream of a process.
#[derive(Serialize)]
struct EventMessage<T> {
    event: T,
}

/// Last event of a process.
#[derive(Serialize)]
struct EndEvent<'a> {
    end: ProcessEnd<'a>,
}

/// End of a process, in the format of the envd protocol.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ProcessEnd<'a> {
    exit_code: i32,
    /// False if a signal terminated the process.
    exited: bool,
    /// Description of the exit.
    status: &'a str,
    /// Text of `status`. Absent if the exit code is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    oom_killed: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    output_open: bool,
}

/// Returns Go's name of a signal. Clients compare the text.
fn describe(signal: i32) -> String {
    let text = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        _ => return format!("signal {signal}"),
    };
    text.to_owned()
}
