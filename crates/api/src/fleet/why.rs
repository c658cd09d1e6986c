//! `jiffy fleet why`: explains on which host a sandbox was placed, and for which reason. A
//! *decision* is the selection of a host for one create, or its rejection.
//!
//! The *coordinator* is the member of the fleet that selects the hosts of new sandboxes and
//! declares silent members dead.

use super::Fleet;
use super::forward::{BufferedCall, Purpose};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::{Liveness, short};
use axum::body::to_bytes;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use jiffy_api_types::{FleetDecision, FleetWhy};
use jiffy_engine_api::is_id;
use jiffy_fleet::node::Decision;
use jiffy_fleet_core::SandboxHash;
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use std::collections::VecDeque;
use std::time::Instant;

/// Maximum number of decisions that this host remembers.
const MAX_DECISIONS: usize = 1024;
/// Maximum size of the answer of a member in bytes.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Decision of this host without the coordinator.
#[derive(Debug)]
pub(super) struct LocalDecision {
    /// Hash of the id of the sandbox, by which the fleet finds its host.
    row: SandboxHash,
    at: Instant,
    reason: &'static str,
}

impl LocalDecision {
    /// Returns the decision to create a sandbox here because no coordinator was available.
    pub fn without_coordinator(row: SandboxHash) -> Self {
        Self {
            row,
            at: Instant::now(),
            reason: "no coordinator answered, so that the sandbox was created on the host that \
                     received the call",
        }
    }
}

/// Recent decisions of this host, the oldest first.
#[derive(Debug, Default)]
pub(super) struct LocalDecisions(Mutex<VecDeque<LocalDecision>>);

impl LocalDecisions {
    pub fn add(&self, decision: LocalDecision) {
        let mut decisions = self.0.lock();
        if decisions.len() == MAX_DECISIONS {
            decisions.pop_front();
        }
        decisions.push_back(decision);
    }
}

/// Returns the id of a sandbox from a response.
async fn sandbox_id(response: Response) -> Option<String> {
    if !response.status().is_success() {
        return None;
    }
    let body = to_bytes(response.into_body(), MAX_ANSWER_BYTES)
        .await
        .ok()?;
    let value: Value = serde_json::from_slice(&body).ok()?;
    value["sandboxID"].as_str().map(str::to_owned)
}

impl App {
    /// Explains the placement of a sandbox, or of a create that was rejected.
    pub(crate) async fn why(
        &self,
        fleet: &Fleet,
        caller: &Caller,
        headers: HeaderMap,
        text: &str,
    ) -> Result<FleetWhy, ApiError> {
        let id = self.sandbox_id(fleet, caller, headers, text).await;
        let row = match &id {
            Some(id) => fleet.sandbox_hash(id),
            None => fleet.name_hash(caller.owner_id().as_deref(), text),
        };
        let decisions = fleet.node.decisions(row, text).await;
        let is_known = decisions.is_some();
        let mut decisions: Vec<_> = decisions
            .unwrap_or_default()
            .into_iter()
            .map(shown)
            .collect();
        decisions.extend(fleet.local_decisions(row));
        let place = fleet.node.locate(row).await.ok().flatten();
        let host = place.map(|place| place.member.to_string());
        let mut lines: Vec<_> = decisions.iter().map(line).collect();
        if decisions.is_empty() {
            let text = short(text);
            lines.push(match (&host, is_known) {
                (_, false) => "no coordinator answered: retry".to_owned(),
                (Some(host), true) => format!(
                    "{text} is on {host}, and no decision about it is in memory: forks and \
                     sandboxes of functions stay on their host, and the decisions of a former \
                     coordinator are forgotten"
                ),
                (None, true) => {
                    let message = format!(
                        "a sandbox or recent create `{text}` does not exist: use the id or name of \
                         a sandbox, or the id of a decision from the error of a create"
                    );
                    return Err(ApiError::not_found("sandbox_not_found", message));
                }
            });
        }
        Ok(FleetWhy {
            sandbox: id,
            host,
            decisions,
            text: lines.join("\n"),
        })
    }

    /// Returns the complete id of a sandbox on any member.
    async fn sandbox_id(
        &self,
        fleet: &Fleet,
        caller: &Caller,
        headers: HeaderMap,
        text: &str,
    ) -> Option<String> {
        if is_id(text) {
            return Some(text.to_owned());
        }
        if let Ok(sandbox) = self.sandbox(caller, text, Liveness::IncludingBroken) {
            return Some(sandbox.id().to_owned());
        }
        let path = format!("/sandboxes/{}", utf8_percent_encode(text, NON_ALPHANUMERIC));
        let call = BufferedCall {
            method: Method::GET,
            uri: path.parse().ok()?,
            headers,
            body: Default::default(),
            caller: caller.clone(),
            client: None,
            purpose: Purpose::Call,
            placement: None,
        };
        let answers = fleet.send_to_all(&call, sandbox_id).await;
        answers.into_iter().find_map(|(_, _, id)| id)
    }
}

impl Fleet {
    /// Returns the decisions of this host about a sandbox that it made without a coordinator.
    fn local_decisions(&self, row: SandboxHash) -> Vec<FleetDecision> {
        let decisions = self.local.0.lock();
        let about = decisions.iter().filter(|decision| decision.row == row);
        let host = self.node.id().to_string();
        about
            .map(|decision| FleetDecision {
                id: None,
                age_ms: u64::try_from(decision.at.elapsed().as_millis()).unwrap_or(u64::MAX),
                host: Some(host.clone()),
                reason: decision.reason.to_owned(),
                rejected: None,
            })
            .collect()
    }
}

fn shown(decision: Decision) -> FleetDecision {
    FleetDecision {
        id: Some(decision.id),
        age_ms: decision.age_ms,
        host: decision.host.map(|host| host.to_string()),
        reason: decision.reason,
        rejected: decision.rejected,
    }
}

/// Returns a decision as one line.
fn line(decision: &FleetDecision) -> String {
    let seconds = decision.age_ms / 1000;
    let reason = &decision.reason;
    match (&decision.host, &decision.rejected) {
        (Some(host), None) => format!("placed on {host} {seconds} s ago: {reason}"),
        (Some(host), Some(rejected)) => {
            format!("{host} rejected it {seconds} s ago: {rejected}; selected as {reason}")
        }
        (None, _) => format!("rejected {seconds} s ago: {reason}"),
    }
}
