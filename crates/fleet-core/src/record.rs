//! Records that all hosts of a fleet share, as JSON: the root of the fleet, shards, heads and
//! tables. The crate `jiffy-fleet` stores them.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A *shard*
//! is a part of the fleet's sandboxes. Its record lists the members and names the coordinator.
//!
//! `jiffy-fleet` encrypts records and binds each to its key (the name under which it is stored).
//! The functions here still check everything: a record may be damaged, of a newer format, or of
//! another fleet or sandbox. Records contain no fractional numbers, so that unknown fields are
//! preserved exactly.

mod head;
mod label;
mod root;
mod shard;
mod table;

pub use head::{
    Head, HeadKind, HeadState, KilledAt, MAX_HEAD_BYTES, MAX_INLINE_RECORD_BYTES, NodeLoss, Policy,
    SandboxRecord, Snapshot,
};
pub use label::{HostLabel, MAX_LABELS};
pub use root::{MAX_ROOT_BYTES, ObjectRecords, Root, SlotRange};
pub use shard::{
    Capacity, MAX_ADDRESS_BYTES, MAX_MEMBERS, MAX_REMOVED_FRONTS, MAX_SHARD_BYTES, MemberRow,
    MemberState, ShardRecord,
};
pub use table::{
    IdentityKey, IdentityRow, KeyHash, KeyLimits, KeyRow, KeyScope, KeySnapshotAck,
    MAX_IMPORT_ROWS, MAX_OWNER_SECRETS, MAX_OWNER_VOLUME_BYTES, MAX_OWNER_VOLUME_FILES,
    MAX_OWNER_VOLUMES, MAX_OWNER_WEBHOOKS, MAX_PART_ROWS_BYTES, MAX_PENDING_BYTES, MAX_TABLE_BYTES,
    RequestId, Row, RowContent, RowKey, SecretRow, TABLE_PARTS, Table, TableIndex, TablePart,
    TemplateRow, VolumeRow, WebhookRow,
};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Format of records that this build writes.
pub const FORMAT: u32 = 1;

/// Fields that this build does not know. They are preserved.
pub type UnknownFields = BTreeMap<String, Value>;

/// Error of a record that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The record exceeds its maximum size.
    #[error("{record} has {bytes} bytes, more than the maximum of {max}")]
    TooLarge {
        /// Kind of the record.
        record: &'static str,
        /// Size.
        bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// The record is not valid JSON, or violates a rule of its format.
    #[error("{record} is damaged: {reason}; restore it from a backup of the records")]
    Damaged {
        /// Kind of the record.
        record: &'static str,
        /// Violated rule.
        reason: String,
    },
    /// The record was written by a newer version of Jiffy.
    #[error("{record} has format {format}, but this version supports {FORMAT}: upgrade Jiffy")]
    NewerFormat {
        /// Kind of the record.
        record: &'static str,
        /// Format of the record.
        format: u64,
    },
    /// The record belongs to another fleet, shard or sandbox than the requested one.
    #[error("{record} belongs to {actual}, but {expected} was requested")]
    ForeignKey {
        /// Kind of the record.
        record: &'static str,
        /// Requested fleet, shard or sandbox.
        expected: String,
        /// Fleet, shard or sandbox in the record.
        actual: String,
    },
}

impl RecordError {
    fn damaged(record: &'static str, reason: impl ToString) -> Self {
        Self::Damaged {
            record,
            reason: reason.to_string(),
        }
    }
}

/// Record type with its rules.
trait Checked: Serialize + DeserializeOwned {
    const NAME: &'static str;
    const MAX_BYTES: usize;

    /// Checks all rules that the types of the fields do not express. Returns the violated rule.
    fn check(&self) -> Result<(), String>;
}

/// Returns the JSON of a record.
fn encode<R: Checked>(record: &R) -> Result<Vec<u8>, RecordError> {
    record
        .check()
        .map_err(|reason| RecordError::damaged(R::NAME, reason))?;
    let bytes = serde_json::to_vec(record).map_err(|error| RecordError::damaged(R::NAME, error))?;
    check_size::<R>(bytes.len())?;
    Ok(bytes)
}

/// Returns the record with this JSON.
fn decode<R: Checked>(bytes: &[u8]) -> Result<R, RecordError> {
    check_size::<R>(bytes.len())?;
    let value: Value =
        serde_json::from_slice(bytes).map_err(|error| RecordError::damaged(R::NAME, error))?;
    // The field `version` of a record is the number of its format.
    match value.get("version").and_then(Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) if format > u64::from(FORMAT) => {
            return Err(RecordError::NewerFormat {
                record: R::NAME,
                format,
            });
        }
        _ => {
            return Err(RecordError::damaged(
                R::NAME,
                "the field `version` is invalid",
            ));
        }
    }
    if has_fraction(&value) {
        return Err(RecordError::damaged(
            R::NAME,
            "a number is not an integer of 64 bits",
        ));
    }
    // Decode the text and not `value`: in a `Value`, a repeated field has already replaced the
    // first one.
    let record: R =
        serde_json::from_slice(bytes).map_err(|error| RecordError::damaged(R::NAME, error))?;
    record
        .check()
        .map_err(|reason| RecordError::damaged(R::NAME, reason))?;
    Ok(record)
}

/// Checks the size of an encoded record.
fn check_size<R: Checked>(bytes: usize) -> Result<(), RecordError> {
    if bytes > R::MAX_BYTES {
        return Err(RecordError::TooLarge {
            record: R::NAME,
            bytes,
            max: R::MAX_BYTES,
        });
    }
    Ok(())
}

/// Returns whether a number in the value is not an integer. The depth of a value is limited by the
/// parser.
fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_fraction),
        Value::Object(fields) => fields.values().any(has_fraction),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// Format number, which is always [`FORMAT`] in a decoded record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct Format(u32);

impl Default for Format {
    fn default() -> Self {
        Self(FORMAT)
    }
}

/// Checks a text field: 1 to `max` printable ASCII characters.
fn check_text(field: &str, text: &str, max: usize) -> Result<(), String> {
    if text.is_empty() || text.len() > max || !text.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err(format!(
            "the field `{field}` must have 1 to {max} printable characters"
        ));
    }
    Ok(())
}

/// Returns an error with this reason if the rule does not hold.
fn rule(holds: bool, reason: &str) -> Result<(), String> {
    if holds {
        Ok(())
    } else {
        Err(reason.to_owned())
    }
}
