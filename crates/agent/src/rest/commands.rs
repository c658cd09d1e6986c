//! `/commands`: number of running commands of clients, from which the host derives whether the
//! sandbox is in use.

use crate::body::{ReplyBody, json};
use crate::state::Agent;
use hyper::Response;
use serde::Serialize;

/// Response of `/commands`. Terminals and start commands of templates are not included.
#[derive(Debug, Serialize)]
struct ClientCommands {
    /// Number of running commands.
    running: usize,
    /// Time in milliseconds since the last command ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_ms_ago: Option<u64>,
}

/// Returns the current values.
pub fn answer(agent: &Agent) -> Response<ReplyBody> {
    let (running, ended) = agent.processes.commands();
    let ended_ms_ago = ended.map(|ago| u64::try_from(ago.as_millis()).unwrap_or(u64::MAX));
    json(&ClientCommands {
        running,
        ended_ms_ago,
    })
}
