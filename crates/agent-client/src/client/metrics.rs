//! Resource use of a guest, as measured by the guest's kernel.

use super::{AgentCall, AgentClient};
use crate::error::ClientError;
use crate::request_body::RequestBody;
use hyper::Method;
use serde::Deserialize;

/// Maximum length of a response in bytes.
const MAX_ANSWER_BYTES: usize = 4096;

/// Response of `/metrics`. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct GuestMetrics {
    /// Busy time of all CPUs since the previous `/metrics` request, or since boot, in percent of
    /// their total time.
    pub cpu_used_pct: f64,
    /// Memory in use.
    pub mem_used: u64,
    /// Memory in total.
    pub mem_total: u64,
    /// Files cached in memory.
    pub mem_cache: u64,
    /// Disk in use.
    pub disk_used: u64,
    /// Disk in total.
    pub disk_total: u64,
}

impl AgentClient {
    /// Returns the guest's current resource use.
    pub async fn metrics(&self) -> Result<GuestMetrics, ClientError> {
        let call = AgentCall {
            method: Method::GET,
            path: "/metrics",
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::Whole(None)).await?;
        let body = self.expect_success(answer).await?;
        // The guest determines the response, so its length is bounded.
        let body = body.collect(MAX_ANSWER_BYTES).await?;
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("invalid response of /metrics: {e}")))
    }
}
