//! [`Row`]: one API key, template name, secret, webhook, list of identity keys or volume in the
//! tables of the fleet, which all members have in memory. The records that store rows come from
//! other hosts, so each field is checked when it is read.
//!
//! A *member* is the daemon of one host of the fleet. A *commit* is one write that changes rows.
//! The *index* is the record that lists the rows of the last commits, before they are moved to the
//! other records of their table.

use super::super::{UnknownFields, check_text, rule};
use super::{IdentityRow, SecretRow, TABLE_PARTS, Table, VolumeRow, WebhookRow};
use crate::ids::MemberId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// Maximum number of rows of an import.
pub const MAX_IMPORT_ROWS: usize = 1_000;
/// Maximum length of an id.
pub(super) const MAX_ID_BYTES: usize = 64;
/// Maximum length in characters of a key's name.
const MAX_KEY_NAME: usize = 100;
/// Maximum number of networks of a key.
const MAX_NETWORKS: usize = 64;
/// Maximum length of the name, tag, version and root of a template.
const MAX_TEMPLATE_TEXT: usize = 255;

/// Defines a value of bytes that is written in hexadecimal.
macro_rules! hex_bytes {
    ($(#[$doc:meta])* $name:ident($length:literal)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(pub [u8; $length]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                decode_hex(&text)
                    .map(Self)
                    .ok_or_else(|| format!("expected {} hexadecimal digits", 2 * $length))
            }
        }
    };
}

hex_bytes! {
    /// SHA-256 of the secret of a key.
    KeyHash(32)
}
hex_bytes! {
    /// Random number of a request for a change. A request that is repeated has the same number.
    RequestId(16)
}

/// Decodes lower-case hexadecimal digits.
fn decode_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |c: &u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = (digit(high)? << 4) | digit(low)?;
    }
    Some(bytes)
}

/// Scope of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyScope {
    /// Full access.
    Admin,
    /// Access to its own resources.
    Create,
    /// Read access to all resources.
    Read,
}

/// Limits of a key. `None` if the key has no such limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // Named like the limits of keys of one host.
pub struct KeyLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sandboxes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_vcpus: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creates_per_minute: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_paused: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_snapshots: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_templates: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_builds: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_disk_mib: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_exchanges: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_ack: Option<KeySnapshotAck>,
}

/// Time at which snapshots of a key are acknowledged by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeySnapshotAck {
    /// When the memory is captured.
    Captured,
    /// When the files are complete on the host.
    Stored,
}

/// API key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRow {
    /// Id, to which sandboxes refer.
    pub id: String,
    /// Hash of the secret.
    pub hash: KeyHash,
    /// Name.
    pub name: String,
    /// Scope.
    pub scope: KeyScope,
    /// Limits.
    #[serde(default)]
    pub limits: KeyLimits,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last recorded use, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_ms: Option<u64>,
    /// Time of the revocation, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_ms: Option<u64>,
    /// Expiry time, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
    /// Time at which the removal of all resources of the key was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_ms: Option<u64>,
    /// Networks in CIDR notation from which the key may be used. Empty if all addresses may use it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Hash of the secret before the last rotation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_hash: Option<KeyHash>,
    /// Time until which the previous secret is valid, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_until_ms: Option<u64>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl KeyRow {
    /// Checks the fields of a key.
    fn check(&self) -> Result<(), String> {
        check_text("id", &self.id, MAX_ID_BYTES)?;
        rule(
            self.id.bytes().all(|b| b.is_ascii_alphanumeric()),
            "the field `id` must have letters and digits only",
        )?;
        let length = self.name.chars().count();
        rule(
            (1..=MAX_KEY_NAME).contains(&length) && !self.name.chars().any(char::is_control),
            "the name of a key must have 1 to 100 printable characters",
        )?;
        rule(
            self.addresses.len() <= MAX_NETWORKS,
            "a key may be bound to at most 64 networks",
        )?;
        rule(
            self.addresses.iter().all(|network| is_network(network)),
            "an entry of `addresses` is not a network in CIDR notation",
        )?;
        rule(
            self.end_ms.is_none() || self.revoked_ms.is_some(),
            "a key whose resources are removed must be revoked",
        )
    }
}

/// Returns whether the text has the form ADDRESS/LENGTH.
fn is_network(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else {
        return false;
    };
    let bits = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    length.len() <= 3 && length.parse::<u8>().is_ok_and(|length| length <= bits)
}

/// Name and tag of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateRow {
    /// Id of the key that owns the template. `None` for the owner of the fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Name.
    pub name: String,
    /// Tag.
    pub tag: String,
    /// Version of the template.
    pub template_version: String,
    /// Digest by which the store identifies the template. `None` if the store does not have the
    /// template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// Member that manages the template: it has its builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<MemberId>,
    /// True if all keys may use the template.
    #[serde(default)]
    pub public: bool,
    /// Time of the last change, in milliseconds since 1970.
    pub updated_ms: u64,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl TemplateRow {
    /// Checks the fields of a template name.
    fn check(&self) -> Result<(), String> {
        if let Some(owner) = &self.owner {
            check_text("owner", owner, MAX_ID_BYTES)?;
        }
        check_text("name", &self.name, MAX_TEMPLATE_TEXT)?;
        check_text("tag", &self.tag, MAX_TEMPLATE_TEXT)?;
        check_text(
            "template_version",
            &self.template_version,
            MAX_TEMPLATE_TEXT,
        )?;
        match &self.root {
            Some(root) => check_text("root", root, MAX_TEMPLATE_TEXT),
            None => Ok(()),
        }
    }
}

/// Content of a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowContent {
    /// Row of [`Table::Keys`].
    Key(KeyRow),
    /// Row of [`Table::Templates`].
    Template(TemplateRow),
    /// Row of [`Table::Secrets`].
    Secret(SecretRow),
    /// Row of [`Table::Webhooks`].
    Webhook(WebhookRow),
    /// Row of [`Table::Identity`].
    Identity(IdentityRow),
    /// Row of [`Table::Volumes`].
    Volume(VolumeRow),
}

/// Row of a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Number of the commit that changed the row last.
    pub revision: u64,
    /// Request that changed the row last.
    pub request: RequestId,
    /// The row was removed. Only rows in the index have this mark: the other records omit removed
    /// rows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removed: bool,
    /// Content.
    pub content: RowContent,
}

/// Key of a row in its table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowKey {
    /// Id of an API key.
    Key(String),
    /// Owner, name and tag of a template.
    Template(Option<String>, String, String),
    /// Id of a secret. An owner chooses names only, so it cannot fill the part of another owner's
    /// secrets.
    Secret(String),
    /// Id of a webhook.
    Webhook(String),
    /// The only row of [`Table::Identity`].
    Identity,
    /// Id of a volume.
    Volume(String),
}

impl RowKey {
    /// Returns the table of the row.
    #[must_use]
    pub fn table(&self) -> Table {
        match self {
            Self::Key(_) => Table::Keys,
            Self::Template(..) => Table::Templates,
            Self::Secret(_) => Table::Secrets,
            Self::Webhook(_) => Table::Webhooks,
            Self::Identity => Table::Identity,
            Self::Volume(_) => Table::Volumes,
        }
    }

    /// Returns the part of the table that contains the row.
    #[must_use]
    pub fn part(&self) -> u8 {
        match self {
            Self::Key(id) | Self::Secret(id) | Self::Webhook(id) | Self::Volume(id) => {
                part_of(&[id])
            }
            Self::Identity => 0,
            Self::Template(owner, name, tag) => {
                part_of(&[owner.as_deref().unwrap_or_default(), name, tag])
            }
        }
    }
}

/// Returns the part of a row, by the FNV-1a hash of its key.
fn part_of(fields: &[&str]) -> u8 {
    // A zero byte ends each field, so that no two lists of fields have the same bytes.
    let bytes = fields
        .iter()
        .flat_map(|field| field.bytes().chain(std::iter::once(0)));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // All bytes of the hash determine the part.
    let folded = hash ^ (hash >> 32);
    let part = (folded ^ (folded >> 16) ^ (folded >> 8)) % TABLE_PARTS as u64;
    u8::try_from(part).unwrap_or(0)
}

impl Row {
    /// Returns the key of the row.
    #[must_use]
    pub fn key(&self) -> RowKey {
        match &self.content {
            RowContent::Key(key) => RowKey::Key(key.id.clone()),
            RowContent::Template(template) => RowKey::Template(
                template.owner.clone(),
                template.name.clone(),
                template.tag.clone(),
            ),
            RowContent::Secret(secret) => RowKey::Secret(secret.id.clone()),
            RowContent::Webhook(webhook) => RowKey::Webhook(webhook.id.clone()),
            RowContent::Identity(_) => RowKey::Identity,
            RowContent::Volume(volume) => RowKey::Volume(volume.id.clone()),
        }
    }

    /// Returns the API key. `None` for rows of another table.
    #[must_use]
    pub fn as_key(&self) -> Option<&KeyRow> {
        match &self.content {
            RowContent::Key(key) => Some(key),
            _ => None,
        }
    }

    /// Returns the template. `None` for rows of another table.
    #[must_use]
    pub fn as_template(&self) -> Option<&TemplateRow> {
        match &self.content {
            RowContent::Template(template) => Some(template),
            _ => None,
        }
    }

    /// Returns the secret. `None` for rows of another table.
    #[must_use]
    pub fn as_secret(&self) -> Option<&SecretRow> {
        match &self.content {
            RowContent::Secret(secret) => Some(secret),
            _ => None,
        }
    }

    /// Returns the webhook. `None` for rows of another table.
    #[must_use]
    pub fn as_webhook(&self) -> Option<&WebhookRow> {
        match &self.content {
            RowContent::Webhook(webhook) => Some(webhook),
            _ => None,
        }
    }

    /// Returns the keys of identity tokens. `None` for rows of another table.
    #[must_use]
    pub fn as_identity(&self) -> Option<&IdentityRow> {
        match &self.content {
            RowContent::Identity(identity) => Some(identity),
            _ => None,
        }
    }

    /// Returns the volume. `None` for rows of another table.
    #[must_use]
    pub fn as_volume(&self) -> Option<&VolumeRow> {
        match &self.content {
            RowContent::Volume(volume) => Some(volume),
            _ => None,
        }
    }

    /// Checks the content. Returns the violated rule.
    ///
    /// # Errors
    /// The violated rule.
    pub fn check(&self) -> Result<(), String> {
        match &self.content {
            RowContent::Key(key) => key.check(),
            RowContent::Template(template) => template.check(),
            RowContent::Secret(secret) => secret.check(),
            RowContent::Webhook(webhook) => webhook.check(),
            RowContent::Identity(identity) => identity.check(),
            RowContent::Volume(volume) => volume.check(),
        }
    }
}
