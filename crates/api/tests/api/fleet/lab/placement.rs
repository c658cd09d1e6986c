//! States of hosts, and explanations of placements.

use super::{LIMIT, Lab, Member, SECRET};
use crate::support::TestCaller;
use jiffy_fleet::node::{Answer, Query, row_hash};
use jiffy_fleet_core::HostStatus;
use jiffy_sandbox_manager::SandboxState;
use serde_json::Value;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Member {
    /// Returns the age of the last heartbeat of this member. `None` unless it is the coordinator.
    async fn heartbeat_age(&self) -> Option<Duration> {
        let id = self.node.id();
        let Ok(Answer::Heartbeats(heartbeats)) = self.node.answer(id, Query::Heartbeats).await
        else {
            return None;
        };
        let mut ages = heartbeats.ages_ms.iter();
        let (_, age) = ages.find(|(member, _)| *member == id)?;
        Some(Duration::from_millis(*age))
    }
}

impl Lab {
    /// Changes the state that a host reports, and waits until the coordinator has received it.
    pub async fn set_status(&self, host: u32, status: HostStatus) {
        let member = &self.members[&host];
        *member.host.status.lock().unwrap() = Some(status.clone());
        member.node.hasten_heartbeat();
        // The task of the node processes this query and its heartbeats in order. A heartbeat with
        // the old state was therefore sent before the answer, and each heartbeat after `start`
        // contains the new state. The answer itself is not needed.
        let _ = member.heartbeat_age().await;
        let start = Instant::now();
        let received = async {
            loop {
                let is_received = if member.node.view().is_coordinator {
                    // The coordinator sends its own heartbeats over no connection, so `link` does
                    // not see them. Its last heartbeat must be younger than `start`.
                    let age = member.heartbeat_age().await;
                    age.is_some_and(|age| age < start.elapsed())
                } else {
                    *member.link.reported.lock().unwrap() == Some(status.clone())
                };
                if is_received {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LIMIT, received).await.unwrap();
    }

    /// Returns the hash under which hosts report a template.
    pub fn template_hash(&self, name: &str) -> u64 {
        let hash = row_hash(&SECRET, "template", &[name]).0;
        u64::from_be_bytes(hash[..8].try_into().unwrap())
    }

    /// Returns the templates that a host has listed.
    pub fn templates(&self, host: u32) -> Vec<u64> {
        self.fleets.lock().unwrap()[&host]
            .templates()
            .present
            .clone()
    }

    /// Fills a host, which rejects further sandboxes.
    pub fn fill(&self, host: u32) {
        self.members[&host]
            .figures
            .is_full
            .store(true, Ordering::SeqCst);
    }

    /// Explains a placement, when the coordinator knows a number of decisions. All except for the
    /// last one were rejected by the selected hosts, whose reports arrive in any order.
    pub async fn why(&self, host: u32, caller: &TestCaller, id: &str, decisions: usize) -> Value {
        let path = format!("/fleet/why/{id}");
        let explained = async {
            loop {
                let why = self.call(host, caller, "GET", &path, Value::Null).await;
                let why = why.expect(200).body;
                let known = why["decisions"].as_array().unwrap();
                let rejected = known.iter().filter(|known| !known["rejected"].is_null());
                if known.len() >= decisions && rejected.count() + 1 >= decisions {
                    return why;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, explained).await.unwrap()
    }

    /// Returns whether a sandbox is on a host.
    pub fn has(&self, host: u32, id: &str) -> bool {
        let found = self.members[&host].sandboxes.find(id);
        found.is_some_and(|s| *s.state() != SandboxState::Killed)
    }

    /// Returns the number of requests to the records so far.
    pub fn record_requests(&self) -> u64 {
        self.records.requests()
    }
}
