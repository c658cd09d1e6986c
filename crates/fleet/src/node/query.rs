//! Queries: requests between members that are not part of the membership protocol, and their
//! answers, as JSON. The protocol itself (heartbeats, registrations) is in `jiffy_fleet_core`.
//!
//! The coordinator is the member that registers members and selects the hosts of new sandboxes. It
//! has a directory with a row for each sandbox: its host and its state. A row is found by a hash of
//! the sandbox id. Names and idempotency keys have rows as well, so that they are unique in the
//! fleet.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. A
//! *budget* is the limit of an API key (for example the number of sandboxes) on all hosts. The
//! coordinator divides it into *shares*, within which the members create sandboxes without a
//! request.

mod placement;

use super::handle::Members;
use jiffy_fleet_core::record::MemberState;
use jiffy_fleet_core::{
    MAX_MESSAGE_BYTES, MemberId, MembershipError, Message, Revision, RowState, SandboxHash,
};
use serde::{Deserialize, Serialize};

pub use placement::{
    Decision, LimitedNeed, NotPlaced, PlaceRequest, Placed, PlacementEnd, ShareRequest, Shares,
    TakenName,
};

/// Maximum size of an encoded query.
pub const MAX_QUERY_BYTES: usize = 8 << 10;
/// Maximum size of an encoded answer. The rows of all members have at most 1 MiB.
pub const MAX_ANSWER_BYTES: usize = (1 << 20) + (64 << 10);
/// Maximum number of messages in a reply.
const MAX_REPLIES: usize = 16;
/// Maximum size of an encoded reply.
const MAX_REPLY_BYTES: usize = MAX_MESSAGE_BYTES + (64 << 10);

/// Request to another member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Query {
    /// Host of a sandbox, from the directory. Only the coordinator can answer.
    Directory(SandboxHash),
    /// Row of a sandbox, if the receiver itself has the sandbox.
    Local(SandboxHash),
    /// Numbers of the receiver's sandboxes.
    Summary,
    /// Reserves a new row for a sandbox that the sender will create. Fails if the row exists in the
    /// fleet, or if another member has reserved the row.
    Reserve(SandboxHash),
    /// Ages of the heartbeats that the coordinator has received.
    Heartbeats,
    /// Members of the fleet. The argument is the digest of the list that the sender has. The list
    /// is omitted from the answer if it has the same digest.
    Members(String),
    /// Operator's command for the coordinator.
    Operate(Operation),
    /// Request to accept records that are older than the records that the receiver has read before.
    /// An operator sends it after restoring the records from a backup.
    AcceptRestore,
    /// Selection of the host of a new sandbox.
    Place(Box<PlaceRequest>),
    /// The selected host runs the sandbox, or has rejected it.
    Ended(PlacementEnd),
    /// Request of the sender for larger shares of budgets.
    Share(ShareRequest),
    /// Recent placement decisions. The receiver returns the decisions about the sandbox of the row
    /// and, if the string is the id of a decision (`dTERM-NUMBER`), that decision. The string is
    /// the operator's input, which may also be a name or a sandbox id.
    Why(SandboxHash, String),
}

/// Operator's command on a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// The member receives no more sandboxes.
    Drain(MemberId),
    /// The member receives sandboxes again.
    Undrain(MemberId),
    /// The dead member or front with this id leaves the fleet.
    Remove(MemberId),
    /// The silent member is declared dead. This is possible even if most members are silent, in
    /// which case the coordinator declares none dead by itself.
    ConfirmDead(MemberId),
}

impl Operation {
    /// Returns the member that the command concerns.
    #[must_use]
    pub fn member(self) -> MemberId {
        match self {
            Self::Drain(member)
            | Self::Undrain(member)
            | Self::Remove(member)
            | Self::ConfirmDead(member) => member,
        }
    }

    /// Returns the state of the member after the command.
    #[must_use]
    pub fn state(self) -> MemberState {
        match self {
            Self::Drain(_) => MemberState::Draining,
            Self::Undrain(_) => MemberState::Up,
            Self::Remove(_) => MemberState::Left,
            Self::ConfirmDead(_) => MemberState::Dead,
        }
    }
}

/// Answer to a [`Query`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// Place of the row.
    Found(RowPlace),
    /// No live member has the row (answer of the coordinator), or the receiver does not have it.
    Absent,
    /// The receiver is not the coordinator, or does not know the rows of all live members yet.
    Incomplete,
    /// Numbers of the receiver's sandboxes.
    Summary(HostSummary),
    /// The row is reserved for the sender.
    Reserved,
    /// Heartbeats.
    Heartbeats(Heartbeats),
    /// Members of the fleet. `None` if they have the digest of the query.
    Members(Option<Members>),
    /// `None`: the command takes effect when the coordinator next writes its record of the members.
    /// `Some`: the reason why the command is not possible.
    Operated(Option<MembershipError>),
    /// True if the records were older than the records that the receiver had read before.
    Accepted(bool),
    /// Host for the sandbox.
    Placed(Box<Placed>),
    /// The sandbox was not placed.
    NotPlaced(NotPlaced),
    /// The request was executed.
    Done,
    /// Shares of the sender.
    Shares(Shares),
    /// Decisions, the newest last.
    Decisions(Vec<Decision>),
}

/// Heartbeats, as the coordinator has received them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Heartbeats {
    /// Members, and the milliseconds since their last heartbeats.
    pub ages_ms: Vec<(MemberId, u64)>,
    /// The rows of all live members are known.
    pub is_directory_complete: bool,
    /// Number of members without a recent heartbeat, and of all members. `None` unless more than
    /// half are silent: the coordinator then declares no member dead.
    pub mass_silence: Option<(usize, usize)>,
}

/// Host and state of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowPlace {
    /// Member that has the sandbox.
    pub host: MemberId,
    /// Revision of the head, the record in the store that decides which member may run the sandbox.
    /// Zero if the sandbox was never stored and therefore has no head.
    pub revision: Revision,
    /// State.
    pub state: RowState,
}

/// Numbers of a host's sandboxes, for operators.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostSummary {
    /// Running sandboxes.
    pub running: u64,
    /// Paused sandboxes.
    pub paused: u64,
    /// Paused sandboxes whose state is on this host only.
    pub unstored: u64,
    /// Guests in the warm pools.
    pub warm: u64,
    /// Memory that is available for further sandboxes, in MiB.
    pub free_memory_mib: u64,
    /// Number of the last commit of the tables (API keys, template names) in the host's memory.
    pub tables: u64,
}

/// Error of a query, answer or reply that cannot be encoded or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// Larger than its maximum.
    #[error("the request has {bytes} bytes, more than the maximum of {max}")]
    TooLarge {
        /// Size.
        bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// Not valid JSON of this format.
    #[error("the request is malformed: {0}")]
    Malformed(String),
}

fn check(bytes: usize, max: usize) -> Result<(), QueryError> {
    if bytes > max {
        return Err(QueryError::TooLarge { bytes, max });
    }
    Ok(())
}

fn malformed(error: impl std::fmt::Display) -> QueryError {
    QueryError::Malformed(error.to_string())
}

fn encode(value: &impl Serialize, max: usize) -> Result<Vec<u8>, QueryError> {
    let bytes = serde_json::to_vec(value).map_err(malformed)?;
    check(bytes.len(), max)?;
    Ok(bytes)
}

fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8], max: usize) -> Result<T, QueryError> {
    check(bytes.len(), max)?;
    serde_json::from_slice(bytes).map_err(malformed)
}

impl Query {
    /// Returns the JSON of the query.
    ///
    /// # Errors
    /// [`QueryError`] if the query exceeds the maximum size.
    pub fn encode(&self) -> Result<Vec<u8>, QueryError> {
        encode(self, MAX_QUERY_BYTES)
    }

    /// Returns the query with this JSON.
    ///
    /// # Errors
    /// [`QueryError`] if it is malformed or too large.
    pub fn decode(bytes: &[u8]) -> Result<Self, QueryError> {
        decode(bytes, MAX_QUERY_BYTES)
    }
}

impl Answer {
    /// Returns the JSON of the answer.
    ///
    /// # Errors
    /// [`QueryError`] if the answer exceeds the maximum size.
    pub fn encode(&self) -> Result<Vec<u8>, QueryError> {
        encode(self, MAX_ANSWER_BYTES)
    }

    /// Returns the answer with this JSON.
    ///
    /// # Errors
    /// [`QueryError`] if it is malformed or too large.
    pub fn decode(bytes: &[u8]) -> Result<Self, QueryError> {
        decode(bytes, MAX_ANSWER_BYTES)
    }
}

/// Returns the JSON of the messages with which a member replies to a message.
///
/// # Errors
/// [`QueryError`] if they exceed the maximum size.
pub fn encode_replies(messages: &[Message]) -> Result<Vec<u8>, QueryError> {
    encode(&messages, MAX_REPLY_BYTES)
}

/// Returns the messages of a reply. Bounds of each message are checked by its receiver.
///
/// # Errors
/// [`QueryError`] if the reply is malformed or too large.
pub fn decode_replies(bytes: &[u8]) -> Result<Vec<Message>, QueryError> {
    let messages: Vec<Message> = decode(bytes, MAX_REPLY_BYTES)?;
    if messages.len() > MAX_REPLIES {
        return Err(malformed(format!("more than {MAX_REPLIES} messages")));
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_and_answers_are_read_back_and_malformed_ones_rejected() {
        let hash = SandboxHash([7; 16]);
        for query in [
            Query::Directory(hash),
            Query::Local(hash),
            Query::Summary,
            Query::Reserve(hash),
            Query::Heartbeats,
            Query::Members("00".to_owned()),
            Query::Operate(Operation::Drain(MemberId(2))),
            Query::AcceptRestore,
            Query::Place(Box::default()),
            Query::Share(ShareRequest { needs: Vec::new() }),
            Query::Why(hash, "web".to_owned()),
        ] {
            assert_eq!(Query::decode(&query.encode().unwrap()).unwrap(), query);
        }
        let place = RowPlace {
            host: MemberId(2),
            revision: Revision(3),
            state: RowState::Stored,
        };
        for answer in [
            Answer::Found(place),
            Answer::Absent,
            Answer::Incomplete,
            Answer::Reserved,
            Answer::Members(Some(Members::default())),
            Answer::Members(None),
            Answer::Operated(None),
            Answer::Operated(Some(MembershipError::LastHost(MemberId(2)))),
            Answer::Accepted(true),
            Answer::NotPlaced(NotPlaced::Received(MemberId(2))),
            Answer::Done,
            Answer::Decisions(vec![Decision::default()]),
            Answer::Heartbeats(Heartbeats {
                ages_ms: vec![(MemberId(1), 800)],
                ..Heartbeats::default()
            }),
            Answer::Summary(HostSummary {
                running: 1,
                ..HostSummary::default()
            }),
        ] {
            assert_eq!(Answer::decode(&answer.encode().unwrap()).unwrap(), answer);
        }
        let large = vec![b' '; MAX_ANSWER_BYTES + 1];
        for bytes in [
            &b""[..],
            b"{}",
            b"\"unknown\"",
            b"{\"local\":\"00\"}",
            &large,
        ] {
            assert!(Query::decode(bytes).is_err());
            assert!(Answer::decode(bytes).is_err());
        }
        assert!(decode_replies(b"[{}]").is_err());
        assert!(decode_replies(b"[]").unwrap().is_empty());
    }
}
