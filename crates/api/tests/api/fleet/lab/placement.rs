//! States of hosts, and explanations of placements.

use super::{LIMIT, Lab, SECRET};
use crate::support::TestCaller;
use jiffy_fleet::node::row_hash;
use jiffy_fleet_core::HostStatus;
use jiffy_sandbox_manager::SandboxState;
use serde_json::Value;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Lab {
    /// Changes the state that a host reports, and waits until the coordinator has received it.
    pub async fn set_status(&self, host: u32, status: HostStatus) {
        let member = &self.members[&host];
        *member.host.1.lock().unwrap() = Some(status);
        member.node.hasten_heartbeat();
        tokio::time::sleep(Duration::from_millis(100)).await;
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
        self.members[&host].figures.0.store(true, Ordering::SeqCst);
    }

    /// Explains a placement, when the coordinator knows a number of decisions.
    pub async fn why(&self, host: u32, caller: &TestCaller, id: &str, decisions: usize) -> Value {
        let path = format!("/fleet/why/{id}");
        let explained = async {
            loop {
                let why = self.call(host, caller, "GET", &path, Value::Null).await;
                let why = why.expect(200).body;
                if why["decisions"].as_array().unwrap().len() >= decisions {
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
