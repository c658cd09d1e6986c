//! Push: after each commit of the tables, the writer sends the changed rows to all members. They
//! then need not wait for their next read of the records. Members that miss a push read the commit
//! from the records.
//!
//! The *writer* is the coordinator of the fleet: the only member that changes tables. The *term*
//! counts the coordinators of a fleet: each has a higher term than its predecessor.

use super::message::{Push, TableAnswer, TableRequest};
use super::{PEER_TIMEOUT, Shared};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::Row;
use std::sync::Arc;
use tokio::task::JoinSet;
use tokio::time::timeout;

impl Shared {
    /// Pushes the commits after `since` to all members. Returns the members that have not confirmed
    /// `number` within [`PEER_TIMEOUT`].
    pub(super) async fn push(
        self: &Arc<Self>,
        since: u64,
        number: u64,
        rows: Vec<Row>,
    ) -> Vec<MemberId> {
        let others = self.peers.others();
        // A writer whose term has ended must not confirm that the tables are current.
        let Some(term) = self.term() else {
            return others;
        };
        let mut pushes = JoinSet::new();
        for member in others {
            let shared = self.clone();
            let push = Push {
                term,
                number,
                since,
                rows: rows.clone(),
            };
            pushes.spawn(async move {
                let request = shared.request(member, TableRequest::Push(push));
                let is_confirmed = match timeout(PEER_TIMEOUT, request).await {
                    Ok(Ok(TableAnswer::Contact { number: seen, .. })) => seen >= number,
                    _ => false,
                };
                (!is_confirmed).then_some(member)
            });
        }
        let mut unconfirmed = Vec::new();
        while let Some(result) = pushes.join_next().await {
            unconfirmed.extend(result.ok().flatten());
        }
        unconfirmed.sort_unstable();
        unconfirmed
    }

    /// Applies the commits of the writer. A push of another member, or with missing commits, only
    /// causes a read of the records.
    pub(super) async fn receive(&self, peer: MemberId, push: Push) -> TableAnswer {
        let is_writer = self.peers.writer() == Some((peer, push.term));
        let is_applied = is_writer && {
            let mut state = self.state.write();
            push.term >= state.term()
                && state.apply_commits(push.since, push.number, push.term, push.rows)
        };
        if is_applied {
            self.contact.lock().verify((self.clock)());
            self.announce(push.number);
        } else if let Err(e) = self.load().await {
            tracing::warn!(error = %e, "cannot read the tables of the fleet after a change");
        }
        self.contact_answer()
    }
}
