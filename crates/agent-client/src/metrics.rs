//! What a guest uses, as its own kernel sees it.

use crate::body::Outgoing;
use crate::client::{AgentClient, Call};
use crate::error::ClientError;
use hyper::Method;
use serde::Deserialize;

/// Longest answer.
const MAX_ANSWER: usize = 4096;

/// Answer of `/metrics`. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct GuestMetrics {
    /// Use of all processors since the last question, in percent.
    pub cpu_used_pct: f64,
    /// Memory in use.
    pub mem_used: u64,
    /// Memory there is.
    pub mem_total: u64,
    /// Files cached in memory.
    pub mem_cache: u64,
    /// Disk in use.
    pub disk_used: u64,
    /// Disk there is.
    pub disk_total: u64,
}

impl AgentClient {
    /// What the guest uses now.
    pub async fn metrics(&self) -> Result<GuestMetrics, ClientError> {
        let call = Call {
            method: Method::GET,
            path: "/metrics",
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, Outgoing::Whole(None)).await?;
        let body = self.expect_success(answer).await?;
        let body = body.collect(MAX_ANSWER).await?;
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("answer of /metrics: {e}")))
    }
}
