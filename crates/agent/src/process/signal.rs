//! Signal names in requests.

use crate::rpc::{RpcCode, RpcError};
use serde_json::Value;

/// Returns the number of a signal such as `SIGNAL_SIGTERM`, `SIGTERM` or `15`. In addition to the
/// protocol's KILL and TERM, the usual signals for job control are accepted.
pub fn number(value: &Value) -> Result<i32, RpcError> {
    let number = match value {
        Value::Number(n) => n
            .as_i64()
            .and_then(|n| i32::try_from(n).ok())
            .filter(|n| (1..=31).contains(n)),
        Value::String(name) => match name.trim_start_matches("SIGNAL_") {
            "SIGKILL" => Some(libc::SIGKILL),
            "SIGTERM" => Some(libc::SIGTERM),
            "SIGINT" => Some(libc::SIGINT),
            "SIGHUP" => Some(libc::SIGHUP),
            "SIGQUIT" => Some(libc::SIGQUIT),
            "SIGUSR1" => Some(libc::SIGUSR1),
            "SIGUSR2" => Some(libc::SIGUSR2),
            "SIGSTOP" => Some(libc::SIGSTOP),
            "SIGCONT" => Some(libc::SIGCONT),
            "SIGTSTP" => Some(libc::SIGTSTP),
            "SIGWINCH" => Some(libc::SIGWINCH),
            "SIGALRM" => Some(libc::SIGALRM),
            _ => None,
        },
        _ => None,
    };
    number.ok_or_else(|| RpcError::new(RpcCode::InvalidArgument, format!("unknown signal {value}")))
}
