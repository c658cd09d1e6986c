//! Errors of reads and changes of the tables of the fleet (API keys, template names).

use crate::RecordError;
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::RecordError as FormatError;
use std::time::Duration;

/// Failure of a call of [`Tables`](super::Tables).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// This member cannot determine whether its tables are current.
    #[error(
        "this host cannot verify API keys: it has had no contact with the fleet for {}; retry at \
         another host, or when this host has contact again", seconds(.0)
    )]
    Disconnected(Option<Duration>),
    /// No member could make the change. The change was not made.
    #[error(
        "cannot change the tables of the fleet: no coordinator is reachable; the change was not \
         made; try again"
    )]
    NoWriter,
    /// The member that received the change does not write the tables, or no longer writes them.
    /// The change was not made.
    #[error(
        "cannot change the tables of the fleet: {} is not their writer; the change was not made; \
         try again", .0
    )]
    NotWriter(MemberId),
    /// The outcome of the change is not known yet.
    #[error(
        "cannot determine whether the tables of the fleet were changed: the coordinator or the \
         records did not answer in time; check the result and try again"
    )]
    Unsettled,
    /// The row does not exist, or is in a state that does not permit the change.
    #[error("{0}")]
    Unknown(String),
    /// A row with this key or secret exists.
    #[error("{0} exists already; use another name or id")]
    Exists(String),
    /// The row has changed since the caller read it.
    #[error("{0} changed at the same time; try again")]
    Changed(String),
    /// The change violates a rule.
    #[error("cannot change the tables of the fleet: {0}")]
    Invalid(String),
    /// The table, or the part of the row, has no space.
    #[error("cannot add {0}: the tables of the fleet are full; remove rows that are not needed")]
    Full(String),
    /// A message has another format, or belongs to another fleet.
    #[error("cannot use a message about tables: {0}")]
    Message(String),
    /// The records cannot be read or written.
    #[error(transparent)]
    Records(#[from] RecordError),
    /// A record cannot be used.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl TableError {
    /// Returns whether the same call may succeed later without any change.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Disconnected(_) | Self::NoWriter | Self::NotWriter(_) | Self::Unsettled => true,
            Self::Records(e) => e.is_temporary(),
            _ => false,
        }
    }
}

fn seconds(time: &Option<Duration>) -> String {
    match time {
        Some(time) => format!("{} s", time.as_secs()),
        None => "the time since its start".to_owned(),
    }
}
