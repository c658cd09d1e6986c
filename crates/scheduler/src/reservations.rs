//! Reservations: resources of a placement that the host has not reported as used yet.
//!
//! A *placement* is the selection of the host of a new sandbox.

use crate::{HostId, Resources};
use std::collections::{HashMap, VecDeque};

/// Time in milliseconds after which an unconfirmed reservation expires.
pub const RESERVATION_TIME_MS: u64 = 10_000;

/// Number of a reservation. Numbers are not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(pub u64);

/// A reservation.
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    /// Host of the placement.
    pub host: HostId,
    /// Reserved resources.
    pub needs: Resources,
}

/// All reservations. All of them have the same duration, so that they expire in order.
#[derive(Debug, Default)]
pub struct Reservations {
    /// Number of the next reservation.
    next: u64,
    /// Reservations that are neither confirmed nor expired.
    open: HashMap<ReservationId, Reservation>,
    /// Deadlines in milliseconds, the earliest first. Entries of ended reservations are skipped.
    deadlines: VecDeque<(u64, ReservationId)>,
}

impl Reservations {
    /// Adds a reservation that expires [`RESERVATION_TIME_MS`] after `now_ms`.
    pub fn add(&mut self, reservation: Reservation, now_ms: u64) -> ReservationId {
        let id = ReservationId(self.next);
        self.next += 1;
        self.open.insert(id, reservation);
        // Deadlines stay in order even if the clock steps back.
        let latest = self.deadlines.back().map_or(0, |&(deadline, _)| deadline);
        self.deadlines
            .push_back((latest.max(now_ms.saturating_add(RESERVATION_TIME_MS)), id));
        id
    }

    /// Ends a reservation. Returns `None` if it has ended before.
    pub fn end(&mut self, id: ReservationId) -> Option<Reservation> {
        let reservation = self.open.remove(&id);
        // Entries of ended reservations must not accumulate while none expires.
        while self
            .deadlines
            .front()
            .is_some_and(|(_, id)| !self.open.contains_key(id))
        {
            self.deadlines.pop_front();
        }
        reservation
    }

    /// Ends a reservation that has expired at `now_ms`. Returns `None` if there is none.
    pub fn expire(&mut self, now_ms: u64) -> Option<Reservation> {
        while let Some(&(deadline, id)) = self.deadlines.front() {
            if deadline > now_ms && self.open.contains_key(&id) {
                return None;
            }
            self.deadlines.pop_front();
            if let Some(reservation) = self.open.remove(&id) {
                return Some(reservation);
            }
        }
        None
    }

    /// Ends all reservations of a host.
    pub fn end_host(&mut self, host: HostId) {
        self.open.retain(|_, reservation| reservation.host != host);
    }

    /// Returns the number of open reservations.
    pub fn len(&self) -> usize {
        self.open.len()
    }
}
