//! Mutants: deliberate defects that the checks of the simulator must detect. They are unsafe times,
//! and executors that perform effects in a wrong order.
//!
//! A *verdict* declares a member dead. The *head* of a sandbox is the record that decides which
//! member may run the sandbox. A *root* identifies the snapshot of a sandbox in the store, and a
//! *manifest* lists its files. The *home* is the host that has files of a sandbox that runs
//! nowhere.

use jiffy_fleet_core::Timing;

/// Deviation from the production code. `None` is the production code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    None,
    /// A coordinator acknowledges heartbeats for 18 s, instead of 9 s, after it last replaced the
    /// record of the shard.
    CoordinatorLimit,
    /// A coordinator makes verdicts directly after its takeover.
    NoGrace,
    /// A coordinator makes verdicts 8 s after the last heartbeat, before the authority of the
    /// member ends.
    EarlyVerdict,
    /// A heartbeat is acknowledged although the verdict on its sender is being committed.
    AcknowledgeCondemned,
    /// The guest receives its identity when it is restored, before the claim has succeeded.
    IdentityBeforeClaim,
    /// The head is written while the manifest is being uploaded.
    HeadBeforeManifest,
    /// The former root is retracted while the head is being written.
    RetractBeforeHead,
    /// Shares are granted directly after a takeover.
    SharesDuringGrace,
    /// A write without an answer is treated as failed if the record is unchanged, although it may
    /// still arrive.
    UnchangedIsFailed,
    /// A killed head is removed although its home has not confirmed the kill.
    PurgeBeforeReturn,
}

impl Mutation {
    pub const ALL: [Self; 10] = [
        Self::CoordinatorLimit,
        Self::NoGrace,
        Self::EarlyVerdict,
        Self::AcknowledgeCondemned,
        Self::IdentityBeforeClaim,
        Self::HeadBeforeManifest,
        Self::RetractBeforeHead,
        Self::SharesDuringGrace,
        Self::UnchangedIsFailed,
        Self::PurgeBeforeReturn,
    ];

    /// Returns the times of the members. Killed heads are retained for 90 s instead of 24 h, and
    /// unused
    /// shares for 20 s instead of 90 s.
    pub fn timing(self) -> Timing {
        let mut timing = Timing {
            killed: 90_000,
            unused_share: 20_000,
            ..Timing::PRODUCTION
        };
        match self {
            Self::CoordinatorLimit => timing.acknowledge = 18_000,
            Self::NoGrace => timing.grace = 0,
            Self::EarlyVerdict => timing.silence = 8_000,
            Self::SharesDuringGrace => timing.unreported_shares = Some(0),
            _ => {}
        }
        timing
    }
}
