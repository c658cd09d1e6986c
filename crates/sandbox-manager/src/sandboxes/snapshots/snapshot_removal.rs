//! Removal of snapshots that clients request to remove.
//!
//! The *warm pool* has guests that were started in advance and wait for a create. A *bucket* of the
//! pool has the guests of one template snapshot.

use crate::sandboxes::snapshot_catalog::SnapshotPin;
use crate::sandboxes::{OperationError, Snapshots};
use crate::snapshot::Snapshot;
use jiffy_api_types::SnapshotPurpose;

/// Maximum number of users that an error names.
const MAX_NAMED_USERS: usize = 5;

impl Snapshots<'_> {
    /// Removes a snapshot. If it is retained for a client and sandboxes or other snapshots still
    /// use it, it loses its name and is no longer retained. It is then removed with its last user.
    ///
    /// # Errors
    /// [`OperationError::InUse`] if the snapshot is still being stored, or if it is in use and is
    /// not retained for a client.
    pub fn remove(self, id: &str) -> Result<Snapshot, OperationError> {
        let (record, pin) = self.pin_removable(id)?;
        let is_removable = record.retained && record.purpose != SnapshotPurpose::Template;
        // The daemon retires template snapshots itself, and a snapshot that is not retained is
        // removed with its last user. A client may therefore remove these only while they are
        // unused.
        if !is_removable && let Some(user) = self.user_of(&record.id) {
            return Err(OperationError::InUse {
                id: record.id,
                user,
            });
        }
        if let Some(removed) = self.0.catalog.update(&record.id, |s| {
            s.retained = false;
            s.name = None;
        }) {
            // Only template snapshots have a bucket in the warm pool; for others this has no
            // effect.
            self.0.pool.drop_bucket(&removed.fingerprint);
        }
        // Garbage collection skips pinned snapshots.
        drop(pin);
        self.0.gc.collect([record.id.clone()]);
        // If other users need the content in the store, this queues the removal of the id, so that
        // no host finds the snapshot by it.
        self.withdraw(&record.id);
        Ok(record)
    }

    /// Pins a snapshot that will be removed. Pinning prevents that garbage collection removes it at
    /// the same time.
    fn pin_removable(self, id: &str) -> Result<(Snapshot, SnapshotPin), OperationError> {
        let (record, pin) = self.pin(id)?;
        if record.storing {
            return Err(OperationError::InUse {
                id: record.id,
                user: "this host, which is still storing it".to_owned(),
            });
        }
        Ok((record, pin))
    }

    /// Describes the users of a snapshot: sandboxes and snapshots, with their names.
    fn user_of(self, id: &str) -> Option<String> {
        // One more user than an error names, to detect that others exist.
        let sandboxes = self.0.indexes.users.some_of(id, MAX_NAMED_USERS + 1);
        let sandboxes = sandboxes.into_iter().map(|id| {
            let name = self.0.find(&id).and_then(|record| record.name);
            match name {
                Some(name) => format!("sandbox {id} ({name})"),
                None => format!("sandbox {id}"),
            }
        });
        let mut users: Vec<String> = sandboxes.collect();
        {
            let snapshots = self.0.catalog.read();
            let remaining = (MAX_NAMED_USERS + 1).saturating_sub(users.len());
            for child in snapshots.children(id).take(remaining) {
                let name = snapshots.get(child).and_then(|s| s.name.as_ref());
                users.push(match name {
                    Some(name) => format!("snapshot {child} ({name})"),
                    None => format!("snapshot {child}"),
                });
            }
        }
        if users.len() > MAX_NAMED_USERS {
            users.truncate(MAX_NAMED_USERS);
            users.push("others".to_owned());
        }
        (!users.is_empty()).then(|| users.join(", "))
    }
}
