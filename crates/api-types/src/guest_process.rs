//! Processes inside a sandbox.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Process inside a sandbox. The sandbox determines all values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuestProcess {
    /// Process id.
    pub pid: u32,
    /// Id of the parent process. 0 for a process without a parent.
    pub parent_pid: u32,
    /// Name of the user, or its number if it has no name.
    pub user: String,
    /// Name of the program, at most 15 bytes.
    pub name: String,
    /// Command line, at most 512 characters. Empty if the process has none.
    pub command: String,
    /// State as in `ps`: `R` running, `S` sleeping, `D` waiting for a disk, `T` stopped, `Z` exited
    /// and not yet reaped.
    pub state: char,
    /// Processor time since the start in seconds.
    pub cpu_seconds: f64,
    /// Processor time divided by the time since the start, in percent of one processor.
    pub cpu_percent: f64,
    /// Resident memory in bytes.
    pub memory_bytes: u64,
    /// Time of the start.
    pub started_at: Moment,
    /// Start time in ticks of the guest's clock. The id may be used again by another process, which
    /// has another start time.
    pub start_ticks: u64,
}

/// Processes inside a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuestProcesses {
    /// Processes, in the requested order.
    pub processes: Vec<GuestProcess>,
    /// Number of processes in the sandbox, as far as the agent has read them: at most 4 MiB.
    pub total: usize,
}

/// Signal to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SignalProcess {
    /// Signal.
    pub signal: SignalName,
    /// Start time of the process. If it differs, the process has exited, and no process receives
    /// the signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ticks: Option<u64>,
}

/// Name of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum SignalName {
    /// Request to exit, which a process may handle.
    SigTerm,
    /// End of a process, which it cannot handle.
    SigKill,
    /// Interrupt from a keyboard.
    SigInt,
    /// Loss of the terminal. Many servers read their configuration again.
    SigHup,
    /// Quit from a keyboard, with a core file.
    SigQuit,
    /// Defined by the program.
    SigUsr1,
    /// Defined by the program.
    SigUsr2,
    /// Stop of a process, which it cannot handle.
    SigStop,
    /// Continuation of a stopped process.
    SigCont,
    /// Stop from a keyboard.
    SigTstp,
    /// Timer.
    SigAlrm,
    /// Change of the size of a terminal.
    SigWinch,
}

impl SignalName {
    /// All signals with their names and their numbers on Linux.
    pub const ALL: [(Self, &'static str, i32); 12] = [
        (Self::SigTerm, "SIGTERM", 15),
        (Self::SigKill, "SIGKILL", 9),
        (Self::SigInt, "SIGINT", 2),
        (Self::SigHup, "SIGHUP", 1),
        (Self::SigQuit, "SIGQUIT", 3),
        (Self::SigUsr1, "SIGUSR1", 10),
        (Self::SigUsr2, "SIGUSR2", 12),
        (Self::SigStop, "SIGSTOP", 19),
        (Self::SigCont, "SIGCONT", 18),
        (Self::SigTstp, "SIGTSTP", 20),
        (Self::SigAlrm, "SIGALRM", 14),
        (Self::SigWinch, "SIGWINCH", 28),
    ];

    /// Number on Linux.
    pub fn number(self) -> i32 {
        // `ALL` contains every signal, so the initial value (SIGTERM) is never returned.
        let all = Self::ALL.into_iter();
        all.fold(
            15,
            |number, (name, _, own)| if name == self { own } else { number },
        )
    }
}
