//! Errors of operators' commands on members, such as the drain or the removal of a host.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. A front
//! has a `MemberId` as well.

use crate::ids::MemberId;
use crate::record::MemberState;
use serde::{Deserialize, Serialize};

/// Error of an operator's command on a member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MembershipError {
    /// The member does not exist.
    #[error("host {0} does not exist: `jiffy fleet nodes` lists all hosts")]
    Unknown(MemberId),
    /// The member sends heartbeats.
    #[error("{member} sent a heartbeat {silent_ms} ms ago: stop its daemon first, or drain it")]
    Active {
        /// Member.
        member: MemberId,
        /// Time since its last heartbeat.
        silent_ms: u64,
    },
    /// The coordinator is new: the member may still send its first heartbeat to it.
    #[error("the coordinator is new and must wait for heartbeats of {0}: retry in 12 s")]
    Grace(MemberId),
    /// The state of the member does not permit the command.
    #[error("{}", state_text(*.member, *.state))]
    State {
        /// Member.
        member: MemberId,
        /// State.
        state: MemberState,
    },
    /// No other host accepts sandboxes.
    #[error("{0} is the last host that accepts sandboxes: add a host before the drain")]
    LastHost(MemberId),
    /// The coordinator's record has no space for further removed fronts. Removed fronts stay listed
    /// in it, because their certificates remain valid: without the list, they could return.
    #[error("too many fronts were removed: create a new fleet")]
    TooManyFronts,
    /// This member is not the coordinator.
    #[error("no coordinator accepts the command at present: retry")]
    NotCoordinator(Option<MemberId>),
}

/// Returns the reason for which the state of a member does not permit a command, and the remedy.
fn state_text(member: MemberId, state: MemberState) -> String {
    match state {
        MemberState::Up => format!("{member} is not draining: it accepts sandboxes already"),
        MemberState::Draining => {
            format!("{member} is draining already: `jiffy fleet undrain {member}` ends the drain")
        }
        MemberState::Dead => format!(
            "{member} is dead: start its daemon to use it again, or run `jiffy fleet remove \
             {member}`"
        ),
        MemberState::Left if member.is_front() => format!(
            "{member} was removed from the fleet: add the front with `jiffy front --join` and another \
             data directory"
        ),
        MemberState::Left => {
            format!("{member} was removed from the fleet: add the host with `jiffy fleet join`")
        }
    }
}
