//! Contact of a member with the fleet: whether its tables are known to be current. Without contact,
//! a member accepts no API keys, because a key may have been revoked meanwhile.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.
//!
//! A member is in contact if its tables were verified in the last 60 s. Three events verify them:
//! - The member has read the index, which is the record that lists the last commits.
//! - The writer (the coordinator, the only member that changes tables) has confirmed the number of
//!   the last commit of its term.
//! - Another member that has the same tables has verified them.
//!
//! If the records are unavailable to all members, no table can change. A member that cannot read
//! the records is therefore also in contact if more than half of all members, including itself,
//! answer that they have no newer tables.

use super::message::{TableAnswer, TableRequest};
use super::{CONTACT_TIMEOUT, PEER_TIMEOUT, Shared, TableError};
use jiffy_fleet_core::MemberId;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Interval between two reads of the index.
const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Interval between two attempts while the member has no contact.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Age of the last verification above which a member requests the state of the others.
const STALE_AGE: Duration = Duration::from_secs(20);
/// Interval between two messages of the writer without changes.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the background task checks whether a poll is due.
const TICK: Duration = Duration::from_secs(1);

/// Times of the last contacts, on the clock of the tables.
#[derive(Debug, Default)]
pub(super) struct Contact {
    /// Time at which the tables were current, as far as this member knows.
    verified: Option<Duration>,
    /// Time at which more than half of the members had no newer tables than this one.
    majority: Option<Duration>,
}

impl Contact {
    /// Records that the tables were current at the time `at`.
    pub fn verify(&mut self, at: Duration) {
        self.verified = self.verified.max(Some(at));
    }

    /// Returns the time since the tables were known to be current.
    pub fn age(&self, now: Duration) -> Option<Duration> {
        self.verified.map(|at| now.saturating_sub(at))
    }

    /// Returns an error if the member had no contact for [`CONTACT_TIMEOUT`].
    pub fn check(&self, now: Duration) -> Result<(), TableError> {
        let last = self.verified.max(self.majority);
        let age = last.map(|at| now.saturating_sub(at));
        match age {
            Some(age) if age < CONTACT_TIMEOUT => Ok(()),
            age => Err(TableError::Disconnected(age)),
        }
    }
}

/// Verifies the tables periodically, until the future is dropped.
pub(super) async fn run(shared: Arc<Shared>) {
    let (mut polled, mut confirmed) = (None::<Duration>, None::<Duration>);
    let mut failed = false;
    loop {
        let now = (shared.clock)();
        let is_due = |last: Option<Duration>, interval| {
            last.is_none_or(|last| now.saturating_sub(last) >= interval)
        };
        let interval = if failed {
            RETRY_INTERVAL
        } else {
            POLL_INTERVAL
        };
        if is_due(polled, interval) {
            polled = Some(now);
            match shared.load().await {
                Ok(_) => failed = false,
                Err(e) => {
                    if !failed {
                        tracing::warn!(error = %e, "cannot read the tables of the fleet");
                    }
                    failed = true;
                }
            }
            let age = shared.contact.lock().age((shared.clock)());
            if age.is_none_or(|age| age >= STALE_AGE) {
                shared.verify_with_others().await;
            }
        }
        if is_due(confirmed, CONFIRM_INTERVAL) && shared.is_writer() {
            confirmed = Some(now);
            let number = shared.state.read().number();
            if number > 0 {
                let shared = shared.clone();
                tokio::spawn(async move { shared.push(number, number, Vec::new()).await });
            }
        }
        sleep(TICK).await;
    }
}

impl Shared {
    /// Requests the state of the tables from all other members.
    async fn verify_with_others(self: &Arc<Self>) {
        let others = self.peers.others();
        let started = (self.clock)();
        let mut answers = JoinSet::new();
        for &member in &others {
            let shared = self.clone();
            answers.spawn(async move { shared.contact_of(member).await });
        }
        let own = self.state.read().number();
        let (mut same, mut is_current) = (1, own > 0);
        while let Some(answer) = answers.join_next().await {
            let Ok(Some((number, age))) = answer else {
                continue;
            };
            if number > own {
                is_current = false;
            } else {
                same += 1;
                if let Some(at) = age.and_then(|age| started.checked_sub(age))
                    && number == own
                {
                    self.contact.lock().verify(at);
                }
            }
        }
        if is_current && same * 2 > others.len() + 1 {
            self.contact.lock().majority = Some(started);
        }
    }

    /// Requests the number of the last commit that a member knows, and the time since its last
    /// contact with the writer.
    async fn contact_of(&self, member: MemberId) -> Option<(u64, Option<Duration>)> {
        let request = self.request(member, TableRequest::Contact);
        match timeout(PEER_TIMEOUT, request).await {
            Ok(Ok(TableAnswer::Contact { number, age_ms })) => {
                Some((number, age_ms.map(Duration::from_millis)))
            }
            _ => None,
        }
    }
}
