//! Changes of secrets, webhooks and volumes of API keys, and their validation by the writer.

use super::{Staged, TableError, name_of, unknown};
use jiffy_fleet_core::record::{
    MAX_IMPORT_ROWS, MAX_OWNER_SECRETS, MAX_OWNER_VOLUME_BYTES, MAX_OWNER_VOLUME_FILES,
    MAX_OWNER_VOLUMES, MAX_OWNER_WEBHOOKS, RequestId, Row, RowContent, RowKey, SecretRow, Table,
    VolumeRow,
};

/// Maximum number of secrets, of webhooks and of volumes. Each member holds all of them in memory.
const MAX_OWNED: usize = 20_000;

/// Version of a volume, which is never replaced.
const VOLUME_VERSION: u64 = 1;

/// Returns owner and version of a secret, webhook or volume. `None` for rows of other tables.
fn owner_and_version(content: &RowContent) -> Option<(Option<&str>, u64)> {
    match content {
        RowContent::Secret(secret) => Some((secret.owner.as_deref(), secret.version)),
        RowContent::Webhook(webhook) => Some((webhook.owner.as_deref(), webhook.version)),
        RowContent::Volume(volume) => Some((volume.owner.as_deref(), VOLUME_VERSION)),
        RowContent::Key(_) | RowContent::Template(_) | RowContent::Identity(_) => None,
    }
}

impl Staged<'_> {
    /// Stages a new secret, webhook or volume. A repeated request changes nothing and returns the
    /// row.
    pub(super) fn create_owned(
        &mut self,
        request: RequestId,
        content: RowContent,
    ) -> Result<Row, TableError> {
        let row = self.row(request, content);
        let key = row.key();
        if let Some(existing) = self.current(&key) {
            // The answer to the first attempt was lost.
            if existing.request == request {
                return Ok(existing.clone());
            }
            return Err(TableError::Exists(name_of(&key)));
        }
        self.check_new_owned(&row)?;
        self.put(request, row.content, false)
    }

    /// Checks that the owner of a secret, webhook or volume may have one more. Other rows are not
    /// checked.
    pub(super) fn check_new_owned(&self, row: &Row) -> Result<(), TableError> {
        let Some((owner, _)) = owner_and_version(&row.content) else {
            return Ok(());
        };
        if let Some(secret) = row.as_secret()
            && self.has_secret(secret)
        {
            return Err(TableError::Exists(format!("secret `{}`", secret.name)));
        }
        if let Some(volume) = row.as_volume() {
            self.check_new_volume(volume)?;
        }
        let table = row.key().table();
        let max = match table {
            Table::Webhooks => MAX_OWNER_WEBHOOKS,
            Table::Volumes => MAX_OWNER_VOLUMES,
            _ => MAX_OWNER_SECRETS,
        };
        let (total, own) = self.count(table, owner);
        if total >= MAX_OWNED || own >= max {
            return Err(TableError::Full(name_of(&row.key())));
        }
        Ok(())
    }

    /// Returns whether the owner of `row` has a secret with the name of `row`.
    fn has_secret(&self, row: &SecretRow) -> bool {
        let is_same = |other: &SecretRow| (&other.owner, &other.name) == (&row.owner, &row.name);
        let mut staged = self.rows.values().filter(|staged| !staged.removed);
        if staged.any(|staged| staged.as_secret().is_some_and(is_same)) {
            return true;
        }
        let committed = self.state.secret(row.owner.as_deref(), &row.name);
        // The committed secret may be removed by a change of the same commit.
        committed.is_some_and(|committed| self.current(&committed.key()).is_some())
    }

    /// Checks that the owner of a new volume has no other volume with its name, and that the
    /// volumes of the owner do not exceed their total size.
    fn check_new_volume(&self, new: &VolumeRow) -> Result<(), TableError> {
        let staged = self.rows.values().filter(|row| !row.removed);
        let committed = self.state.rows(Table::Volumes).map(|row| &**row);
        let committed = committed.filter(|row| !self.rows.contains_key(&row.key()));
        let all = staged.chain(committed).filter_map(Row::as_volume);
        let (mut bytes, mut files) = (new.bytes, new.files);
        for volume in all.filter(|volume| volume.owner == new.owner) {
            if volume.name == new.name {
                return Err(TableError::Exists(format!("volume `{}`", new.name)));
            }
            bytes = bytes.saturating_add(volume.bytes);
            files = files.saturating_add(volume.files);
        }
        if bytes > MAX_OWNER_VOLUME_BYTES || files > MAX_OWNER_VOLUME_FILES {
            return Err(TableError::Full(format!("volume `{}`", new.name)));
        }
        Ok(())
    }

    /// Returns the number of rows of a table, and of the rows of an owner.
    fn count(&self, table: Table, owner: Option<&str>) -> (usize, usize) {
        let is_own = |row: &Row| {
            let found = owner_and_version(&row.content);
            found.is_some_and(|(other, _)| other == owner)
        };
        let (mut total, mut own) = (0_usize, 0_usize);
        for row in self.state.rows(table) {
            total += 1;
            own += usize::from(is_own(row));
        }
        for (key, row) in self.rows.iter().filter(|(key, _)| key.table() == table) {
            let was_committed = self.state.row(key).is_some();
            let change = |count: &mut usize| match (was_committed, row.removed) {
                (false, false) => *count += 1,
                (true, true) => *count = count.saturating_sub(1),
                _ => {}
            };
            change(&mut total);
            if is_own(row) {
                change(&mut own);
            }
        }
        (total, own)
    }

    /// Stages the next version of a secret or webhook. A repeated request changes nothing and
    /// returns the row.
    pub(super) fn replace_owned(
        &mut self,
        request: RequestId,
        content: RowContent,
    ) -> Result<Row, TableError> {
        let row = self.row(request, content);
        let key = row.key();
        let existing = self.current(&key).ok_or_else(|| unknown(&key))?;
        if existing.request == request {
            return Ok(existing.clone());
        }
        let former = owner_and_version(&existing.content);
        let next = former.and_then(|(owner, version)| Some((owner, version.checked_add(1)?)));
        let name = |row: &Row| row.as_secret().map(|secret| secret.name.clone());
        let is_next = next.is_some() && next == owner_and_version(&row.content);
        if !is_next || name(existing) != name(&row) {
            return Err(TableError::Changed(name_of(&key)));
        }
        self.put(request, row.content, false)
    }

    /// Stages the removal of secrets, webhooks or volumes. Returns the last one.
    pub(super) fn remove_owned(
        &mut self,
        request: RequestId,
        ids: Vec<String>,
        key: fn(String) -> RowKey,
    ) -> Result<Row, TableError> {
        if ids.len() > MAX_IMPORT_ROWS {
            let reason = format!("at most {MAX_IMPORT_ROWS} objects can be removed at once");
            return Err(TableError::Invalid(reason));
        }
        let mut last = Err(TableError::Unknown("the objects do not exist".to_owned()));
        for id in ids {
            if let Some(row) = self.current(&key(id)) {
                let content = row.content.clone();
                last = Ok(self.put(request, content, true)?);
            }
        }
        last
    }
}
