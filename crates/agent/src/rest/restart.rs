//! `POST /restart`: terminates all processes except this agent, as before a reboot.

use super::error::RestError;
use super::file_query::parameter;
use crate::body::ReplyBody;
use crate::state::Agent;
use crate::workers::CallClass;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use std::fs;
use std::time::{Duration, Instant};

/// Maximum and default time for processes to exit after SIGTERM.
const MAX_GRACE: Duration = Duration::from_secs(60);
/// Time for processes to exit after SIGKILL. A process that waits for a disk needs longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval of checks for remaining processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Flag of kernel threads (`PF_KTHREAD`, linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;

/// Sends SIGTERM to all processes, and SIGKILL after `grace_ms`.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = |name: &str| parameter(request.uri(), name);
    super::only_root(agent, query("username").as_deref(), "restarts are").await?;
    let grace = match query("grace_ms") {
        None => MAX_GRACE,
        Some(text) => {
            let parsed = text.parse().map(Duration::from_millis);
            let parsed = parsed
                .map_err(|_| RestError::bad(format!("`grace_ms` is '{text}': use milliseconds")))?;
            parsed.min(MAX_GRACE)
        }
    };
    // SAFETY: the call takes no arguments.
    if unsafe { libc::getpid() } != 1 {
        return Err(RestError::new(
            StatusCode::NOT_FOUND,
            "cannot restart: this agent is not process 1",
        ));
    }
    // A stopped process handles SIGTERM when it is continued, or receives SIGKILL.
    for (signal, limit) in [
        (libc::SIGTERM, grace),
        (libc::SIGCONT, grace),
        (libc::SIGKILL, KILL_TIMEOUT),
    ] {
        // SAFETY: the call takes no pointers. As process 1, the agent reaches every process except
        // itself.
        unsafe { libc::kill(-1, signal) };
        if signal != libc::SIGTERM && wait_for_exits(agent, limit, signal).await? {
            return Ok(super::no_content());
        }
    }
    let remaining = remaining_processes(agent).await?;
    Err(RestError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("processes have not exited: {remaining:?}"),
    ))
}

/// Returns whether all processes exit before `limit`. With SIGKILL, new processes receive the
/// signal as well.
async fn wait_for_exits(
    agent: &Agent,
    limit: Duration,
    signal: libc::c_int,
) -> Result<bool, RestError> {
    let end = Instant::now() + limit;
    loop {
        if remaining_processes(agent).await?.is_empty() {
            return Ok(true);
        }
        if Instant::now() >= end {
            return Ok(false);
        }
        if signal == libc::SIGKILL {
            // SAFETY: as above.
            unsafe { libc::kill(-1, signal) };
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns all other processes that have not exited, except kernel threads.
async fn remaining_processes(agent: &Agent) -> Result<Vec<u32>, RestError> {
    let what = "cannot list the processes";
    let list = |_: &_| list_processes();
    Ok(agent.workers.run(CallClass::Start, what, list).await?)
}

/// Processes of the guest except the agent, which is process 1, and except kernel threads.
fn list_processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let pids = pids.filter(|pid| *pid != 1);
    let is_running = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| is_program(&stat))
    };
    pids.filter(is_running).collect()
}

/// Returns whether a `/proc/PID/stat` belongs to a program that has not exited.
fn is_program(stat: &str) -> bool {
    // The name may contain any characters.
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return false;
    };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ended = matches!(fields.first(), Some(&"Z" | &"X") | None);
    // Field 9 of proc_pid_stat(5). The first two fields are before the closing parenthesis.
    let flags = fields.get(6).and_then(|f| f.parse::<u64>().ok());
    !ended && flags.unwrap_or(0) & PF_KTHREAD == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_threads_and_ended_processes_are_not_counted() {
        assert!(is_program("7 (a) b) S 1 7 7 0 -1 4194560 0 0"));
        assert!(!is_program("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0"));
        assert!(!is_program("9 (gone) Z 1 9 9 0 -1 4194572 0 0"));
        assert!(!is_program(""));
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(is_program(&own));
    }
}
