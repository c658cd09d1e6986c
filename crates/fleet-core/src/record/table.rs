//! Tables that every member holds in memory: API keys, template names, secrets, webhooks, keys of
//! identity tokens and volumes. This module has their format in the records.
//!
//! A table is stored in parts. A hash of the row's key selects its part. One more record, the
//! *index*, lists the last commits of all parts. Only the coordinator writes the tables. A change
//! is committed by one replace of the index, which contains the changed rows until the parts of the
//! tables are rewritten. Each commit replaces the same record, so a former writer cannot commit any
//! longer.

mod identity_row;
mod index;
mod part;
mod row;
mod secret_row;
mod volume_row;
mod webhook_row;

pub use identity_row::{IdentityKey, IdentityRow};
pub use index::{MAX_PENDING_BYTES, TableIndex};
pub use part::{MAX_PART_ROWS_BYTES, TablePart};
pub use row::{
    KeyHash, KeyLimits, KeyRow, KeyScope, KeySnapshotAck, MAX_IMPORT_ROWS, RequestId, Row,
    RowContent, RowKey, TemplateRow,
};
pub use secret_row::{MAX_OWNER_SECRETS, SecretRow};
pub use volume_row::{
    MAX_OWNER_VOLUME_BYTES, MAX_OWNER_VOLUME_FILES, MAX_OWNER_VOLUMES, VolumeRow,
};
pub use webhook_row::{MAX_OWNER_WEBHOOKS, WebhookRow};

use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of parts of a table.
pub const TABLE_PARTS: usize = 256;
/// Maximum size of an encoded part or index.
pub const MAX_TABLE_BYTES: usize = (1 << 20) - 1024;

/// Table of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Table {
    /// API keys.
    Keys,
    /// Names and tags of templates.
    Templates,
    /// Secrets of API keys.
    Secrets,
    /// Webhooks of API keys.
    Webhooks,
    /// Keys that sign identity tokens, in one row.
    Identity,
    /// Volumes of API keys.
    Volumes,
}

impl Table {
    /// All tables.
    pub const ALL: [Self; 6] = [
        Self::Keys,
        Self::Templates,
        Self::Secrets,
        Self::Webhooks,
        Self::Identity,
        Self::Volumes,
    ];

    /// Returns the name of the table in the keys of its records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Templates => "templates",
            Self::Secrets => "secrets",
            Self::Webhooks => "webhooks",
            Self::Identity => "identity",
            Self::Volumes => "volumes",
        }
    }

    /// Returns the position of the table in [`Self::ALL`].
    #[must_use]
    pub fn position(self) -> usize {
        match self {
            Self::Keys => 0,
            Self::Templates => 1,
            Self::Secrets => 2,
            Self::Webhooks => 3,
            Self::Identity => 4,
            Self::Volumes => 5,
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
