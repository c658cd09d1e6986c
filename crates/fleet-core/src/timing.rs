//! Times of heartbeats, terms and verdicts. All values must fit together: a coordinator may declare
//! a member dead only after the member has lost its authority ([`Timing::is_safe`]).
//!
//! The *authority* of a member is its permission to claim, resume and restore stored sandboxes,
//! until a deadline. A *verdict* is the decision that a member is dead. A *takeover* makes another
//! member the coordinator of a shard (a part of the fleet's sandboxes). A *share* is the part of an
//! API key's limit that one member may use. The *head* of a sandbox is the record that decides
//! which member may run the sandbox.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

/// Durations in milliseconds. All members of a fleet use [`Timing::PRODUCTION`]. Tests use other
/// values to show that the checks of the simulator detect unsafe ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Interval of heartbeats.
    pub heartbeat: u64,
    /// Duration of the authority of a member, from the sending of an acknowledged heartbeat.
    pub deadline: u64,
    /// Interval at which a coordinator replaces the record of its shard.
    pub renew: u64,
    /// Delay before a write of unknown outcome is repeated.
    pub repeat: u64,
    /// Time for which a coordinator acknowledges heartbeats after it sent its last successful
    /// replacement of the record.
    pub acknowledge: u64,
    /// Time without a heartbeat after which a coordinator decides that a member is dead.
    pub silence: u64,
    /// Time without a heartbeat after which a host receives no new sandboxes, until its next
    /// heartbeat.
    pub unplaceable: u64,
    /// Time after a takeover during which no verdict is made.
    pub grace: u64,
    /// Time without acknowledgement after which a member observes the record of its shard.
    pub observe: u64,
    /// Minimum time without acknowledgement before a takeover. Also the time without a heartbeat
    /// after which a member counts towards mass silence.
    pub unacknowledged: u64,
    /// Interval at which a member reads the record of its shard after [`Self::observe`].
    pub poll: u64,
    /// Time after which an unchanged record permits a takeover.
    pub unchanged: u64,
    /// Additional time for each member that precedes this one as a candidate.
    pub rank: u64,
    /// Delay after a takeover before shares are granted although members have not reported theirs.
    /// `None` in production: a member that is cut off still uses its share.
    pub unreported_shares: Option<u64>,
    /// Time without use after which a member returns a part of its share.
    pub unused_share: u64,
    /// Minimum time for which a killed head is retained. It must exceed the delay of a late write:
    /// the creation of a head that arrives after the removal would succeed.
    pub killed: u64,
}

impl Timing {
    /// Times of a fleet.
    pub const PRODUCTION: Self = Self {
        heartbeat: 2_000,
        deadline: 10_000,
        renew: 3_000,
        repeat: 500,
        acknowledge: 9_000,
        silence: 12_000,
        unplaceable: 5_000,
        grace: 12_000,
        observe: 3_000,
        unacknowledged: 6_000,
        poll: 2_000,
        unchanged: 12_000,
        rank: 500,
        unreported_shares: None,
        unused_share: 90_000,
        killed: 24 * 3_600 * 1_000,
    };

    /// Returns whether no verdict is possible while an acknowledged heartbeat is valid, for clocks
    /// that differ by at most 1 %.
    ///
    /// A coordinator makes a verdict at the earliest `silence` after it received a heartbeat. The
    /// authority from this heartbeat ends `deadline` after its sending.
    ///
    /// After a takeover, a heartbeat that the former coordinator acknowledged may still be valid.
    /// It was sent at most `acknowledge` after the last replacement of the record. The new
    /// coordinator has observed this replacement for at least `unchanged`, and makes no verdict for
    /// a further `grace`.
    #[must_use]
    pub const fn is_safe(&self) -> bool {
        // `/ 50` adds 2 %: one clock may be 1 % too slow, and the other 1 % too fast.
        let deadline = self.deadline + self.deadline / 50;
        let former = self.acknowledge + self.deadline;
        deadline < self.silence
            && former + former / 50 < self.unchanged + self.grace
            && self.unreported_shares.is_none()
    }
}

const _: () = assert!(Timing::PRODUCTION.is_safe());

impl Default for Timing {
    fn default() -> Self {
        Self::PRODUCTION
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_times_are_recognised() {
        let production = Timing::PRODUCTION;
        for unsafe_timing in [
            Timing {
                acknowledge: 18_000,
                ..production
            },
            Timing {
                grace: 0,
                ..production
            },
            Timing {
                silence: 8_000,
                ..production
            },
            Timing {
                unreported_shares: Some(0),
                ..production
            },
        ] {
            assert!(!unsafe_timing.is_safe(), "{unsafe_timing:?}");
        }
    }
}
