//! [`Snapshot`]: the record of a snapshot of this host.
//!
//! A *captured* snapshot is acknowledged to its client, but its files are not complete yet: its
//! record is `storing`.
//!
//! The *fingerprint* of the snapshot of a template or build step is a hash of everything that
//! determines its guests. The *lineage* of a sandbox consists of all sandboxes and snapshots that
//! are connected with it.

use crate::lineage_record::PrunedAncestors;
use crate::store_copies::StoreCopies;
use jiffy_api_types::{SandboxSize, SnapshotContent, SnapshotInfo, SnapshotPurpose};
use jiffy_proto::agent::SiteSettings;
use std::collections::BTreeMap;

/// Record of a snapshot of this host, as of one moment. The snapshot's files belong to its engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Id: letters and digits.
    pub(crate) id: String,
    /// Name chosen by the creator.
    pub(crate) name: Option<String>,
    /// Purpose of the snapshot.
    pub(crate) purpose: SnapshotPurpose,
    /// Sandbox that the snapshot was taken of. Empty for a template snapshot.
    pub(crate) sandbox: String,
    /// API key of the owner. `None` if the snapshot belongs to the host's owner.
    pub(crate) owner: Option<String>,
    /// Environment of the sandbox. Default for sandboxes created from the snapshot.
    pub(crate) env: BTreeMap<String, String>,
    /// Certificate authorities and proxy of the sandbox. Default for sandboxes created from the
    /// snapshot.
    pub(crate) site: SiteSettings,
    /// Template that the snapshot descends from.
    pub(crate) template: String,
    /// Fingerprint by which the snapshot of a template or of a build step is found. Empty for other
    /// snapshots.
    pub(crate) fingerprint: String,
    /// Resources of a guest restored from the snapshot.
    pub(crate) size: SandboxSize,
    /// Name of the engine that took the snapshot and restores it.
    pub(crate) engine: String,
    /// Parent snapshot.
    pub(crate) parent: Option<String>,
    /// Removed snapshots between this snapshot and its parent.
    pub(crate) pruned: Option<PrunedAncestors>,
    /// True if the snapshot is retained even if nothing descends from it.
    pub(crate) retained: bool,
    /// Time for which the guest was stopped, in milliseconds.
    pub(crate) stopped_ms: f64,
    /// Time from the request to the completion, in milliseconds.
    pub(crate) total_ms: f64,
    /// Disk space of the snapshot without its parents, in bytes.
    pub(crate) bytes: u64,
    /// Time of the creation, in milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// Content: memory and disk, or the disk only.
    pub(crate) content: SnapshotContent,
    /// True while the snapshot is captured in memory and not complete on the disk.
    pub(crate) storing: bool,
    /// Copies in shared stores.
    pub(crate) store: StoreCopies,
}

impl Snapshot {
    /// Returns the id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the purpose.
    pub fn purpose(&self) -> SnapshotPurpose {
        self.purpose
    }

    /// Returns the id of the sandbox that the snapshot was taken of. Empty for a template snapshot.
    pub fn sandbox(&self) -> &str {
        &self.sandbox
    }

    /// Returns the API key of the owner. `None` if the snapshot belongs to the host's owner.
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Returns the environment of the sandbox.
    pub fn env(&self) -> &BTreeMap<String, String> {
        &self.env
    }

    /// Returns the certificate authorities and the proxy of the sandbox.
    pub fn site(&self) -> &SiteSettings {
        &self.site
    }

    /// Returns the reference of the template that the snapshot descends from.
    pub fn template(&self) -> &str {
        &self.template
    }

    /// Returns the fingerprint by which the snapshot of a template or of a build step is found.
    /// Empty for other snapshots.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Returns the resources of a guest restored from the snapshot.
    pub fn size(&self) -> SandboxSize {
        self.size
    }

    /// Returns the name of the engine.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Returns the id of the parent snapshot.
    pub fn parent(&self) -> Option<&str> {
        self.parent.as_deref()
    }

    /// Returns whether the snapshot is retained even if nothing descends from it.
    pub fn is_retained(&self) -> bool {
        self.retained
    }

    /// Returns the time for which the guest was stopped, in milliseconds.
    pub fn stopped_ms(&self) -> f64 {
        self.stopped_ms
    }

    /// Returns the time from the request to the completion, in milliseconds.
    pub fn total_ms(&self) -> f64 {
        self.total_ms
    }

    /// Returns the disk space without the parents, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the time of the creation, in milliseconds since 1970.
    pub fn created_ms(&self) -> u64 {
        self.created_ms
    }

    /// Returns the content: memory and disk, or the disk only.
    pub fn content(&self) -> SnapshotContent {
        self.content
    }

    /// Returns whether the snapshot is captured in memory and not complete on the disk yet.
    pub fn is_storing(&self) -> bool {
        self.storing
    }

    /// Returns the roots of the complete copies in stores.
    pub fn copy_roots(&self) -> impl Iterator<Item = &str> {
        self.store.copies.iter().map(|copy| &*copy.root)
    }

    /// Returns whether another host is responsible for the removal of a copy of the snapshot in a
    /// store (`StoreCopy::fetched`). Either that host pushed the copy and this host fetched it, or
    /// the sandbox has moved to that host.
    pub fn is_fetched(&self) -> bool {
        self.store.copies.iter().any(|copy| copy.fetched)
    }

    /// Returns whether the snapshot is a part of the lineage of its sandbox. Snapshots of templates
    /// and of build steps are shared, and are not.
    pub(crate) fn is_in_lineage(&self) -> bool {
        !matches!(
            self.purpose,
            SnapshotPurpose::Template | SnapshotPurpose::Step
        )
    }

    /// Returns whether a client requested the snapshot: lists show it, and it counts in the quota
    /// of its owner.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.purpose == SnapshotPurpose::Requested && self.retained
    }
}

impl From<Snapshot> for SnapshotInfo {
    /// Omits certificates and the proxy, and the URLs of the host's stores.
    fn from(record: Snapshot) -> Self {
        Self {
            id: record.id,
            name: record.name,
            purpose: record.purpose,
            sandbox: record.sandbox,
            owner: record.owner,
            env: record.env,
            template: record.template,
            fingerprint: record.fingerprint,
            size: record.size,
            engine: record.engine,
            parent: record.parent,
            // The field of the API still has the name that an earlier version used.
            kept: record.retained,
            stopped_ms: record.stopped_ms,
            total_ms: record.total_ms,
            bytes: record.bytes,
            created_ms: record.created_ms,
            content: record.content,
            storing: record.storing,
        }
    }
}
