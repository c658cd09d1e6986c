//! Changes of the tables (API keys, template names, secrets, webhooks, keys of identity tokens,
//! volumes), and their validation by the writer, the only member that commits them.

mod owned;

use super::TableError;
use super::state::{State, encoded_bytes};
use jiffy_fleet_core::record::{
    IdentityRow, KeyHash, KeyLimits, KeyRow, MAX_IMPORT_ROWS, MAX_PART_ROWS_BYTES, RequestId, Row,
    RowContent, RowKey, SecretRow, Table, TemplateRow, VolumeRow, WebhookRow,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Maximum number of API keys, including revoked ones.
const MAX_KEYS: usize = 200_000;

/// Change of one or several rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Number of the request. A repeated request has the same number.
    pub request: RequestId,
    /// Change.
    pub action: Action,
}

/// Kind of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Creates an API key.
    CreateKey(KeyRow),
    /// Revokes a key.
    RevokeKey {
        /// Id.
        id: String,
        /// True to mark the resources of the key for removal as well. This is possible even if the
        /// key is revoked already.
        end: bool,
    },
    /// Replaces the secret of a key.
    RotateKey {
        /// Id.
        id: String,
        /// Hash of the new secret.
        hash: KeyHash,
        /// Time in milliseconds for which the previous secret remains valid.
        overlap_ms: u64,
        /// New expiry time. `None` if it does not change.
        expires_ms: Option<u64>,
    },
    /// Replaces the limits of a key.
    LimitKey {
        /// Id.
        id: String,
        /// Limits on which the change is based. The key must have them.
        former: KeyLimits,
        /// New limits.
        limits: KeyLimits,
    },
    /// Adds or replaces the name and tag of a template.
    PutTemplate(TemplateRow),
    /// Removes the name and tag of a template.
    RemoveTemplate {
        /// Owner.
        owner: Option<String>,
        /// Name.
        name: String,
        /// Tag.
        tag: String,
    },
    /// Creates a secret of an API key.
    CreateSecret(SecretRow),
    /// Replaces the value and the metadata of a secret. The version must follow the current one.
    ReplaceSecret(SecretRow),
    /// Removes the secrets with these ids that exist.
    RemoveSecrets(Vec<String>),
    /// Creates a webhook of an API key.
    CreateWebhook(WebhookRow),
    /// Replaces a webhook. The version must follow the current one.
    ReplaceWebhook(WebhookRow),
    /// Removes the webhooks with these ids that exist.
    RemoveWebhooks(Vec<String>),
    /// Creates or replaces the keys that sign identity tokens. The version must follow the current
    /// one.
    ReplaceIdentity(IdentityRow),
    /// Creates a volume of an API key.
    CreateVolume(VolumeRow),
    /// Removes the volumes with these ids that exist.
    RemoveVolumes(Vec<String>),
    /// Adds rows of a host that joins.
    Import(Vec<RowContent>),
}

impl Action {
    /// Returns whether the change is committed without delay, because it ends access.
    pub(super) fn is_urgent(&self) -> bool {
        matches!(self, Self::RevokeKey { .. } | Self::RotateKey { .. })
    }
}

/// Changes that were validated together, and are not committed yet. Each change is validated with
/// the rows of the state and of the changes before it.
pub(super) struct Staged<'a> {
    state: &'a State,
    /// Number of the commit.
    number: u64,
    /// Time of the changes, in milliseconds since 1970.
    now_ms: u64,
    /// Changed rows.
    rows: BTreeMap<RowKey, Row>,
    /// Ids of changed keys by hash of their secret.
    hashes: HashMap<KeyHash, String>,
    /// Sizes of changed parts.
    bytes: HashMap<(Table, u8), usize>,
    /// Number of new API keys.
    keys: usize,
}

impl<'a> Staged<'a> {
    pub fn new(state: &'a State, number: u64, now_ms: u64) -> Self {
        Self {
            state,
            number,
            now_ms,
            rows: BTreeMap::new(),
            hashes: HashMap::new(),
            bytes: HashMap::new(),
            keys: 0,
        }
    }

    /// Returns the size of the encoded rows.
    pub fn encoded_bytes(&self) -> usize {
        self.bytes.values().sum()
    }

    /// Returns the changed rows.
    pub fn into_rows(self) -> Vec<Row> {
        self.rows.into_values().collect()
    }

    fn current(&self, key: &RowKey) -> Option<&Row> {
        match self.rows.get(key) {
            Some(row) => Some(row).filter(|row| !row.removed),
            None => self.state.row(key).map(Arc::as_ref),
        }
    }

    /// Adds a change. Returns the changed row. For an import, this is the last row.
    pub fn add(&mut self, change: Change) -> Result<Row, TableError> {
        let request = change.request;
        match change.action {
            Action::CreateKey(row) => self.create_key(request, row),
            Action::RevokeKey { id, end } => {
                let now = self.now_ms;
                self.change_key(request, &id, end, |key| {
                    key.revoked_ms = key.revoked_ms.or(Some(now));
                    if end {
                        key.end_ms = key.end_ms.or(Some(now));
                    }
                })
            }
            Action::RotateKey {
                id,
                hash,
                overlap_ms,
                expires_ms,
            } => {
                self.check_secret(&hash, &id)?;
                self.check_expiry(expires_ms)?;
                let until = self.now_ms.saturating_add(overlap_ms);
                self.change_key(request, &id, false, |key| {
                    key.previous_hash = Some(key.hash);
                    key.previous_until_ms = Some(until);
                    key.hash = hash;
                    key.expires_ms = expires_ms.or(key.expires_ms);
                })
            }
            Action::LimitKey { id, former, limits } => {
                self.check_limits(request, &id, &former)?;
                self.change_key(request, &id, false, |key| key.limits = limits)
            }
            Action::PutTemplate(row) => self.put(request, RowContent::Template(row), false),
            Action::RemoveTemplate { owner, name, tag } => {
                let key = RowKey::Template(owner, name, tag);
                let row = self.current(&key).ok_or_else(|| unknown(&key))?;
                self.put(request, row.content.clone(), true)
            }
            Action::CreateSecret(row) => self.create_owned(request, RowContent::Secret(row)),
            Action::ReplaceSecret(row) => self.replace_owned(request, RowContent::Secret(row)),
            Action::RemoveSecrets(ids) => self.remove_owned(request, ids, RowKey::Secret),
            Action::CreateWebhook(row) => self.create_owned(request, RowContent::Webhook(row)),
            Action::ReplaceWebhook(row) => self.replace_owned(request, RowContent::Webhook(row)),
            Action::RemoveWebhooks(ids) => self.remove_owned(request, ids, RowKey::Webhook),
            Action::ReplaceIdentity(row) => self.replace_identity(request, row),
            Action::CreateVolume(row) => self.create_owned(request, RowContent::Volume(row)),
            Action::RemoveVolumes(ids) => self.remove_owned(request, ids, RowKey::Volume),
            Action::Import(rows) => self.import(request, rows),
        }
    }

    /// Stages a new key. A repeated request changes nothing and returns the row.
    fn create_key(&mut self, request: RequestId, row: KeyRow) -> Result<Row, TableError> {
        let key = RowKey::Key(row.id.clone());
        if let Some(existing) = self.current(&key) {
            // The answer to the first attempt was lost.
            if existing.request == request {
                return Ok(existing.clone());
            }
            return Err(TableError::Exists(format!("key `{}`", row.id)));
        }
        self.check_secret(&row.hash, &row.id)?;
        self.check_expiry(row.expires_ms)?;
        if row.revoked_ms.is_some() || row.previous_hash.is_some() {
            let reason = "a new key must not be revoked or rotated";
            return Err(TableError::Invalid(reason.to_owned()));
        }
        self.put(request, RowContent::Key(row), false)
    }

    /// Stages a change of a key. A repeated request changes nothing and returns the row. With
    /// `may_be_revoked`, a revoked key is changed as well.
    fn change_key(
        &mut self,
        request: RequestId,
        id: &str,
        may_be_revoked: bool,
        change: impl FnOnce(&mut KeyRow),
    ) -> Result<Row, TableError> {
        let key = RowKey::Key(id.to_owned());
        let row = self.current(&key).ok_or_else(|| unknown(&key))?;
        // The answer to the first attempt was lost.
        if row.request == request {
            return Ok(row.clone());
        }
        let mut content = row.content.clone();
        if let RowContent::Key(row) = &mut content {
            if row.revoked_ms.is_some() && !may_be_revoked {
                return Err(unknown(&key));
            }
            change(row);
        }
        self.put(request, content, false)
    }

    /// Stages the next version of the keys that sign identity tokens. A repeated request changes
    /// nothing and returns the row.
    fn replace_identity(
        &mut self,
        request: RequestId,
        row: IdentityRow,
    ) -> Result<Row, TableError> {
        let current = self.current(&RowKey::Identity);
        if let Some(existing) = current.filter(|existing| existing.request == request) {
            return Ok(existing.clone());
        }
        let version = current
            .and_then(Row::as_identity)
            .map_or(0, |row| row.version);
        if version.checked_add(1) != Some(row.version) {
            return Err(TableError::Changed(name_of(&RowKey::Identity)));
        }
        self.put(request, RowContent::Identity(row), false)
    }

    /// Adds the rows of an import. Rows that an earlier attempt of the same request has added are
    /// skipped.
    fn import(&mut self, request: RequestId, rows: Vec<RowContent>) -> Result<Row, TableError> {
        if rows.is_empty() || rows.len() > MAX_IMPORT_ROWS {
            let reason = format!("an import must have 1 to {MAX_IMPORT_ROWS} rows");
            return Err(TableError::Invalid(reason));
        }
        let mut last = None;
        for content in rows {
            let row = self.row(request, content);
            let key = row.key();
            match self.current(&key) {
                Some(existing) if existing.request == request => last = Some(existing.clone()),
                Some(_) => return Err(TableError::Exists(name_of(&key))),
                None => {
                    if let Some(row) = row.as_key() {
                        self.check_secret(&row.hash, &row.id)?;
                    }
                    self.check_new_owned(&row)?;
                    last = Some(self.put(request, row.content, false)?);
                }
            }
        }
        last.ok_or_else(|| TableError::Invalid("the import is empty".to_owned()))
    }

    /// Returns a row of this commit that is not removed.
    fn row(&self, request: RequestId, content: RowContent) -> Row {
        Row {
            revision: self.number,
            request,
            removed: false,
            content,
        }
    }

    /// Adds a row, if it and its table have space for it. `removed` marks the row as removed.
    fn put(
        &mut self,
        request: RequestId,
        content: RowContent,
        removed: bool,
    ) -> Result<Row, TableError> {
        let row = Row {
            removed,
            ..self.row(request, content)
        };
        row.check().map_err(TableError::Invalid)?;
        let key = row.key();
        let is_new = self.current(&key).is_none();
        let place = (key.table(), key.part());
        let added = self.bytes.get(&place).copied().unwrap_or(0) + encoded_bytes(&row);
        // The former size of a replaced row is not subtracted. The sum is then too large, which
        // only matters near the limit.
        let is_full = self.state.bytes_of(place.0, place.1) + added > MAX_PART_ROWS_BYTES;
        let has_too_many = is_new && self.state.keys() + self.keys >= MAX_KEYS;
        let is_revoked = row.as_key().is_some_and(|key| key.revoked_ms.is_some());
        // A full table must not prevent a revocation or a removal.
        let may_exceed = removed || (is_revoked && !is_new);
        if !may_exceed && (is_full || (has_too_many && row.as_key().is_some())) {
            return Err(TableError::Full(name_of(&key)));
        }
        self.bytes.insert(place, added);
        if let Some(own) = row.as_key() {
            self.keys += usize::from(is_new);
            self.hashes.insert(own.hash, own.id.clone());
        }
        self.rows.insert(key, row.clone());
        Ok(row)
    }

    /// Checks that a key has these limits, unless the same request has changed them before. A key
    /// that does not exist is not checked.
    fn check_limits(
        &self,
        request: RequestId,
        id: &str,
        limits: &KeyLimits,
    ) -> Result<(), TableError> {
        let row = self.current(&RowKey::Key(id.to_owned()));
        let row = row.filter(|row| row.request != request);
        match row.and_then(Row::as_key) {
            Some(key) if key.limits != *limits => {
                Err(TableError::Changed(format!("the limits of key `{id}`")))
            }
            _ => Ok(()),
        }
    }

    /// Checks that no other key has a secret with this hash.
    fn check_secret(&self, hash: &KeyHash, id: &str) -> Result<(), TableError> {
        let committed = self.state.key_by_hash(hash).and_then(|row| row.as_key());
        let is_used = committed.is_some_and(|key| key.id != id)
            || self.hashes.get(hash).is_some_and(|other| other != id);
        if is_used {
            return Err(TableError::Exists("a key with this secret".to_owned()));
        }
        Ok(())
    }

    fn check_expiry(&self, expires_ms: Option<u64>) -> Result<(), TableError> {
        match expires_ms {
            Some(at) if at <= self.now_ms => {
                let reason = "the expiry time of the key is in the past: use a later time";
                Err(TableError::Invalid(reason.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the name of a row for messages.
fn name_of(key: &RowKey) -> String {
    match key {
        RowKey::Key(id) => format!("key `{id}`"),
        RowKey::Template(_, name, tag) => format!("template `{name}:{tag}`"),
        RowKey::Secret(id) => format!("secret `{id}`"),
        RowKey::Webhook(id) => format!("webhook `{id}`"),
        RowKey::Identity => "the keys of identity tokens".to_owned(),
        RowKey::Volume(id) => format!("volume `{id}`"),
    }
}

fn unknown(key: &RowKey) -> TableError {
    TableError::Unknown(match key {
        RowKey::Key(id) => format!("key `{id}` does not exist or was revoked"),
        _ => format!("{} does not exist", name_of(key)),
    })
}
