//! Messages between members about the tables of the fleet (API keys, template names), as JSON. Any
//! member sends changes to the writer, the only member that commits them. The writer sends its
//! commits to all members, each of which has all rows in memory. The writer is the coordinator of
//! the fleet, and the *term* counts the coordinators.

use super::TableError;
use super::change::Change;
use jiffy_fleet_core::record::Row;
use jiffy_fleet_core::{FleetId, MemberId, Term};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum size of a message.
pub const MAX_TABLE_MESSAGE_BYTES: usize = 1 << 20;
/// Format of messages that this build writes.
const FORMAT: u32 = 1;
/// Maximum number of members in an answer.
const MAX_MEMBERS: usize = 2_000;

/// Message with the fleet of its sender.
#[derive(Debug, Serialize, Deserialize)]
struct Envelope<T> {
    format: u32,
    fleet: FleetId,
    content: T,
}

/// Request to another member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableRequest {
    /// Requests a change from the writer.
    Change(Box<Change>),
    /// Delivers commits of the writer.
    Push(Push),
    /// Requests the state of the tables.
    Contact,
}

/// Commits of the writer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push {
    /// Term of the writer.
    pub term: Term,
    /// Number of the last commit.
    pub number: u64,
    /// Number of the commit before the first one in the message.
    pub since: u64,
    /// Changed rows.
    pub rows: Vec<Row>,
}

/// Answer to a [`TableRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableAnswer {
    /// The change is committed.
    Changed {
        /// Changed row.
        row: Box<Row>,
        /// Number of the commit that contains the change.
        number: u64,
        /// Members that did not confirm in time that they have received the commit.
        unconfirmed: Vec<MemberId>,
    },
    /// State of the tables of the member.
    Contact {
        /// Number of the last commit.
        number: u64,
        /// Time in milliseconds since the member verified that its tables are current.
        age_ms: Option<u64>,
    },
    /// The request failed.
    Failed {
        /// Kind of the failure.
        kind: Failure,
        /// Message.
        message: String,
    },
}

/// Kind of a failure. Each kind except `Other` stands for the variant of [`TableError`] with the
/// same name. `NotWriter` also stands for [`TableError::NoWriter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // `TableError` describes the kinds.
pub enum Failure {
    Unknown,
    Exists,
    Changed,
    Invalid,
    Full,
    NotWriter,
    Unsettled,
    Other,
}

/// Content of messages with rules that its type does not express.
trait Content: Serialize + DeserializeOwned {
    fn check(&self) -> Result<(), String>;
}

impl Content for TableRequest {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Push(push) => {
                let is_valid = |row: &Row| (push.since + 1..=push.number).contains(&row.revision);
                // `since + 1` must not overflow.
                if push.since >= u64::MAX - 1 || push.since > push.number {
                    return Err("the numbers of its commits are invalid".to_owned());
                }
                if !push.rows.iter().all(is_valid) {
                    return Err("a row belongs to another commit".to_owned());
                }
                push.rows.iter().try_for_each(Row::check)
            }
            // The writer validates changes together with the rows that exist.
            Self::Change(_) | Self::Contact => Ok(()),
        }
    }
}

impl Content for TableAnswer {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Changed {
                row, unconfirmed, ..
            } => {
                if unconfirmed.len() > MAX_MEMBERS {
                    return Err("it has too many members".to_owned());
                }
                row.check()
            }
            Self::Contact { .. } | Self::Failed { .. } => Ok(()),
        }
    }
}

/// Encodes a request.
pub(super) fn encode_request(
    fleet: &FleetId,
    request: TableRequest,
) -> Result<Vec<u8>, TableError> {
    encode(fleet, request)
}

/// Decodes and checks a request of another member.
///
/// # Errors
/// [`TableError::Message`] if the request is damaged, too long, or belongs to another fleet.
pub fn decode_request(bytes: &[u8], fleet: &FleetId) -> Result<TableRequest, TableError> {
    decode(bytes, fleet)
}

/// Encodes an answer.
pub(super) fn encode_answer(fleet: &FleetId, answer: TableAnswer) -> Result<Vec<u8>, TableError> {
    encode(fleet, answer)
}

/// Decodes and checks an answer of another member.
///
/// # Errors
/// [`TableError::Message`] if the answer is damaged, too long, or belongs to another fleet.
pub fn decode_answer(bytes: &[u8], fleet: &FleetId) -> Result<TableAnswer, TableError> {
    decode(bytes, fleet)
}

/// Encodes a message with the fleet of the sender. Fails if the message is too long.
fn encode<T: Content>(fleet: &FleetId, content: T) -> Result<Vec<u8>, TableError> {
    let envelope = Envelope {
        format: FORMAT,
        fleet: fleet.clone(),
        content,
    };
    let bytes = serde_json::to_vec(&envelope).map_err(|e| TableError::Message(e.to_string()))?;
    check_size(bytes.len())?;
    Ok(bytes)
}

/// Decodes a message, and checks its format, its fleet and its content.
fn decode<T: Content>(bytes: &[u8], fleet: &FleetId) -> Result<T, TableError> {
    check_size(bytes.len())?;
    let failed = |e: serde_json::Error| TableError::Message(e.to_string());
    let envelope: Envelope<T> = serde_json::from_slice(bytes).map_err(failed)?;
    if envelope.format != FORMAT {
        let reason = format!(
            "it has format {}, but this version supports {FORMAT}: upgrade all hosts",
            envelope.format
        );
        return Err(TableError::Message(reason));
    }
    if envelope.fleet != *fleet {
        let reason = format!("it belongs to fleet {}, not to {fleet}", envelope.fleet);
        return Err(TableError::Message(reason));
    }
    envelope.content.check().map_err(TableError::Message)?;
    Ok(envelope.content)
}

fn check_size(bytes: usize) -> Result<(), TableError> {
    if bytes > MAX_TABLE_MESSAGE_BYTES {
        return Err(TableError::Message(format!(
            "it has {bytes} bytes, more than the limit of {MAX_TABLE_MESSAGE_BYTES}"
        )));
    }
    Ok(())
}

impl From<&TableError> for TableAnswer {
    fn from(error: &TableError) -> Self {
        let (kind, message) = match error {
            TableError::Unknown(message) => (Failure::Unknown, message.clone()),
            TableError::Exists(what) => (Failure::Exists, what.clone()),
            TableError::Changed(what) => (Failure::Changed, what.clone()),
            TableError::Invalid(message) => (Failure::Invalid, message.clone()),
            TableError::Full(what) => (Failure::Full, what.clone()),
            TableError::NotWriter(_) | TableError::NoWriter => (Failure::NotWriter, String::new()),
            TableError::Unsettled => (Failure::Unsettled, String::new()),
            e => (Failure::Other, e.to_string()),
        };
        Self::Failed { kind, message }
    }
}

/// Returns the error that another member reports.
pub(super) fn error_of(member: MemberId, kind: Failure, message: String) -> TableError {
    match kind {
        Failure::Unknown => TableError::Unknown(message),
        Failure::Exists => TableError::Exists(message),
        Failure::Changed => TableError::Changed(message),
        Failure::Invalid => TableError::Invalid(message),
        Failure::Full => TableError::Full(message),
        Failure::NotWriter => TableError::NotWriter(member),
        Failure::Unsettled => TableError::Unsettled,
        Failure::Other => TableError::Message(format!("{member} answered: {message}")),
    }
}
