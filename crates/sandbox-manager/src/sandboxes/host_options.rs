//! [`HostOptions`]: options with which a daemon opens the sandboxes of its host.
//!
//! The *warm pool* has guests that were started in advance and wait for a create. A *fold* merges
//! the files of a removed snapshot into the files of its child.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. A *tenant* is an owner of snapshots in the store.

use crate::VolumeMounter;
use crate::admission::{HostLimits, HostReader};
use crate::usage_ledger::UsageLedger;
use jiffy_event_log::EventFeed;
use jiffy_fleet::Heads;
use jiffy_proto::agent::SiteSettings;
use jiffy_store::host::RemoteStore;
use std::sync::Arc;
use std::time::Duration;

/// Options of a host.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Number of warm-pool guests for each template and size in use.
    pub warm: usize,
    /// Interval between prefetches that keep the snapshots of the warm pool in memory. Also the
    /// maximum delay of folds and checksums of snapshots.
    pub upkeep_interval: Duration,
    /// Limits of the use of the host.
    pub limits: HostLimits,
    /// Interval between samples of the usage of each sandbox.
    pub sample: Duration,
    /// Interval between garbage collection passes.
    pub gc_interval: Duration,
    /// Source of the host's figures. Defaults to the machine that runs this program.
    pub reader: Option<Arc<dyn HostReader>>,
    /// Certificate authorities and proxy of all sandboxes.
    pub site: SiteSettings,
    /// Store in which hosts share snapshots. `None` if snapshots stay on this host.
    pub remote: Option<Arc<RemoteStore>>,
    /// Records by which several hosts share sandboxes in the store. `None` if each sandbox stays
    /// on its host.
    pub heads: Option<Heads>,
    /// True if an earlier daemon of this data directory shared its sandboxes with other hosts. If
    /// `heads` is `None`, kills are then recorded, and their heads are marked once this host shares
    /// sandboxes again.
    pub has_shared: bool,
    /// Returns whether all tenants of the store share the snapshots of a template.
    pub is_stock: fn(&str) -> bool,
    /// Lock of the data directory: garbage collection stops if it is no longer in place. `None` if
    /// no other daemon can use the directory.
    pub lock: Option<Arc<crate::DirectoryLock>>,
    /// Receives the events of the sandboxes. Defaults to a feed in memory.
    pub events: EventFeed,
    /// Mounts volumes. `None` if this host has none.
    pub volumes: Option<Arc<dyn VolumeMounter>>,
    /// Counts the usage of owners. Defaults to a ledger in memory.
    pub usage: UsageLedger,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            warm: 0,
            upkeep_interval: Duration::from_secs(60),
            limits: HostLimits::default(),
            sample: Duration::from_secs(10),
            gc_interval: Duration::from_secs(60),
            reader: None,
            site: SiteSettings::default(),
            remote: None,
            heads: None,
            has_shared: false,
            is_stock: |_| false,
            lock: None,
            events: EventFeed::in_memory(),
            usage: UsageLedger::in_memory(),
            volumes: None,
        }
    }
}
