//! Faults of members, and waiting for their effects.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. The *roster* of a host is the list of its sandboxes in the store, which the others
//! read after its loss. A *verdict* is the decision that a host is dead.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until this decision. Its
//! first epoch has the number 1.

use super::{LIMIT, Lab};
use crate::support::{Answer, TestCaller};
use jiffy_fleet::roster::{RosterOf, RosterState};
use jiffy_fleet_core::{Epoch, MemberId};
use serde_json::Value;
use std::time::Duration;

impl Lab {
    /// Waits until the roster of a member has a sandbox in a state.
    pub async fn until_listed(&self, host: u32, id: &str, state: RosterState) {
        let (rosters, of) = (self.rosters(), RosterOf::Host(MemberId(host)));
        let listed = async {
            loop {
                if let Some(read) = rosters.read(of).await.unwrap()
                    && read
                        .roster
                        .entries
                        .get(id)
                        .is_some_and(|e| e.state == state)
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LIMIT, listed).await.unwrap();
    }

    /// Calls through a member until the status of the answer is `status`.
    pub async fn until(&self, host: u32, caller: &TestCaller, path: &str, status: u16) -> Answer {
        let called = async {
            loop {
                let answer = self.call(host, caller, "GET", path, Value::Null).await;
                if answer.status == status {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LIMIT, called).await.unwrap()
    }

    /// Stops all traffic of a member, which continues to run.
    pub fn freeze(&self, host: u32) {
        self.network.frozen.lock().unwrap().insert(MemberId(host));
    }

    /// Connects a frozen member again, and waits until it has compared its sandboxes with their
    /// heads.
    pub async fn thaw(&self, host: u32) {
        self.network.frozen.lock().unwrap().remove(&MemberId(host));
        let node = &self.members[&host].node;
        let ready = node.wait_for(|view| view.is_ready() && view.epoch > Some(Epoch(1)));
        tokio::time::timeout(LIMIT, ready).await.unwrap().unwrap();
    }

    /// Waits until the other members know that a member is dead.
    pub async fn until_lost(&self, host: u32) {
        for (other, member) in &self.members {
            if *other != host {
                let lost = member.node.until_lost(MemberId(host));
                tokio::time::timeout(LIMIT, lost).await.unwrap();
            }
        }
    }

    /// Stops a member and waits for the verdict on it.
    pub async fn stop(&self, host: u32) {
        let id = MemberId(host);
        self.network.nodes.lock().unwrap().remove(&id);
        self.network.routers.lock().unwrap().remove(&id);
        self.members[&host].node.stop().await;
        self.until_lost(host).await;
    }
}
