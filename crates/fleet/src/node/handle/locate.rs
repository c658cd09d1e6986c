//! Location of a sandbox: finds the member that has it, so that a call or a connection can be
//! forwarded to this member.
//!
//! The sources are, in this order: the sandboxes of this host, earlier answers, the coordinator's
//! directory, and queries to all members. The directory has a row for each sandbox with its host
//! and state. All members are also queried if the directory does not contain the sandbox. The row
//! of a new sandbox may be in transit, or was lost and is repeated with the next heartbeat. A
//! client may use the sandbox through another member before that.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator.

use super::Node;
use crate::node::query::{Answer, Query, RowPlace};
use jiffy_fleet_core::{MemberId, Millis, Revision, RowState, SandboxHash};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Maximum number of places from earlier answers that are remembered.
const MAX_PLACES: usize = 65_536;
/// Maximum number of queries per second about sandboxes that the directory does not contain. The
/// ids may be a client's guesses. Beyond the limit, the directory alone decides.
const MAX_SEARCH_QUERIES: usize = 2_000;
/// Interval of that limit.
const SEARCH_MS: u64 = 1_000;
/// Time for which an answer is remembered.
const PLACE_MS: u64 = 60_000;

/// Place of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Member that has the sandbox.
    pub member: MemberId,
    /// Address of the member.
    pub address: String,
    /// State at the time of the answer.
    pub state: RowState,
    /// The member is live, as far as this member knows.
    pub is_live: bool,
    /// The place was remembered from an earlier answer. If it is wrong, [`Node::forget`] must be
    /// called, and the sandbox be located again.
    pub is_remembered: bool,
}

/// Failure to locate a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    /// Members that may have the sandbox did not answer.
    #[error("cannot find the sandbox: {} did not answer; retry", names(.0))]
    Unreachable(Vec<MemberId>),
    /// This member has not read the record of the shard yet.
    #[error("this host does not know the members of the fleet yet: retry")]
    NoMembers,
}

/// Failure to reserve a row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The row exists.
    #[error("{0} has it")]
    Taken(MemberId),
    /// No coordinator can decide.
    #[error("no coordinator is available: retry")]
    NoCoordinator,
}

fn names(members: &[MemberId]) -> String {
    let names: Vec<_> = members.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Remembered places.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Cached places with the times of their queries.
    places: Mutex<HashMap<SandboxHash, (RowPlace, Millis)>>,
    searches: Mutex<Searches>,
}

/// Queries about sandboxes that the directory does not contain.
#[derive(Debug, Default)]
struct Searches {
    /// Start of the interval in which they are counted.
    since: Millis,
    /// Number of queries in this interval.
    queries: usize,
}

impl Searches {
    /// Counts a search of `members` queries. Returns whether it is permitted.
    fn permit(&mut self, now: Millis, members: usize) -> bool {
        if now.since(self.since) >= SEARCH_MS {
            *self = Self {
                since: now,
                queries: 0,
            };
        }
        // A fleet may have more members than queries are permitted.
        let is_first = self.queries == 0;
        self.queries = self.queries.saturating_add(members);
        is_first || self.queries <= MAX_SEARCH_QUERIES
    }
}

impl Places {
    fn find(&self, hash: SandboxHash, now: Millis) -> Option<RowPlace> {
        let places = self.places.lock();
        let (place, at) = places.get(&hash)?;
        (now.since(*at) < PLACE_MS).then_some(*place)
    }

    /// Remembers the place of a sandbox for a short time, so that repeated requests need no query
    /// to the coordinator.
    fn remember(&self, hash: SandboxHash, place: RowPlace, now: Millis) {
        let mut places = self.places.lock();
        if places.len() >= MAX_PLACES && !places.contains_key(&hash) {
            places.retain(|_, (_, at)| now.since(*at) < PLACE_MS);
            if places.len() >= MAX_PLACES {
                places.clear();
            }
        }
        places.insert(hash, (place, now));
    }
}

impl Node {
    /// Returns the answer to [`Query::Local`].
    pub(super) fn local(&self, hash: SandboxHash) -> Answer {
        match self.inner.rows.find(hash) {
            None => Answer::Absent,
            Some(row) => Answer::Found(RowPlace {
                host: self.id(),
                revision: row.revision,
                state: row.state,
            }),
        }
    }

    /// Returns the place of a sandbox. `None` if no live member has it: it does not exist, or
    /// only the store has it.
    ///
    /// # Errors
    /// [`LocateError`] if a member that may have the sandbox did not answer.
    pub async fn locate(&self, hash: SandboxHash) -> Result<Option<Place>, LocateError> {
        if let Answer::Found(place) = self.local(hash) {
            return Ok(Some(self.place_of(place, false)));
        }
        if let Some(place) = self.inner.places.find(hash, self.inner.clock.now()) {
            let place = self.place_of(place, true);
            if place.is_live {
                return Ok(Some(place));
            }
        }
        if let Some((member, address)) = self.members().coordinator() {
            match self.query(member, &address, Query::Directory(hash)).await {
                Some(Answer::Found(place)) => return Ok(Some(self.found(hash, place))),
                Some(Answer::Absent) => {
                    let members = self.members().peers(self.id()).len();
                    let now = self.inner.clock.now();
                    if !self.inner.places.searches.lock().permit(now, members) {
                        return Ok(None);
                    }
                }
                // Without the directory, the members are queried without this limit.
                _ => {}
            }
        } else {
            return Err(LocateError::NoMembers);
        }
        let mut unreachable = Vec::new();
        for (member, answer) in self.query_all(&Query::Local(hash)).await {
            match answer {
                // A member can report its own rows only.
                Some(Answer::Found(place)) if place.host == member => {
                    return Ok(Some(self.found(hash, place)));
                }
                Some(Answer::Absent) => {}
                _ => unreachable.push(member),
            }
        }
        if unreachable.is_empty() {
            Ok(None)
        } else {
            unreachable.sort();
            Err(LocateError::Unreachable(unreachable))
        }
    }

    /// Remembers the place of a new sandbox, whose row may not have reached the coordinator yet.
    pub fn remember(&self, hash: SandboxHash, member: MemberId) {
        let place = RowPlace {
            host: member,
            revision: Revision::default(),
            state: RowState::Running,
        };
        let now = self.inner.clock.now();
        self.inner.places.remember(hash, place, now);
    }

    /// Forgets the remembered place of a sandbox.
    pub fn forget(&self, hash: SandboxHash) {
        self.inner.places.places.lock().remove(&hash);
    }

    /// Reserves a row for a create on this host: no other member can reserve it for 30 s.
    ///
    /// # Errors
    /// [`ReserveError`] if the row exists, or no coordinator can decide.
    pub async fn reserve(&self, hash: SandboxHash) -> Result<(), ReserveError> {
        let coordinator = self.members().coordinator();
        let (member, address) = coordinator.ok_or(ReserveError::NoCoordinator)?;
        match self.query(member, &address, Query::Reserve(hash)).await {
            Some(Answer::Reserved) => Ok(()),
            Some(Answer::Found(place)) => Err(ReserveError::Taken(place.host)),
            _ => Err(ReserveError::NoCoordinator),
        }
    }

    /// Remembers a place that the coordinator has reported, and returns it.
    fn found(&self, hash: SandboxHash, place: RowPlace) -> Place {
        let now = self.inner.clock.now();
        self.inner.places.remember(hash, place, now);
        self.place_of(place, false)
    }

    /// Returns a place with the address and the state of its member. `is_remembered` is true if the
    /// place comes from an earlier answer of the coordinator, so that it may be wrong.
    fn place_of(&self, place: RowPlace, is_remembered: bool) -> Place {
        let members = self.members();
        let row = members.row(place.host);
        Place {
            member: place.host,
            address: row.map(|row| row.address.clone()).unwrap_or_default(),
            state: place.state,
            is_live: row.is_some_and(|row| row.state.is_live()),
            is_remembered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searches_are_limited_by_their_queries_and_always_possible_once_per_interval() {
        let mut searches = Searches::default();
        let now = Millis(5_000);
        let permitted = (0..2_000).filter(|_| searches.permit(now, 4)).count();
        assert_eq!(permitted, MAX_SEARCH_QUERIES / 4);
        let next = Millis(5_000 + SEARCH_MS);
        assert!(searches.permit(next, 3 * MAX_SEARCH_QUERIES));
        assert!(!searches.permit(next, 1));
    }
}
