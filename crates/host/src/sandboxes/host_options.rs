//! Options of a host.

use crate::admission::{HostLimits, HostReader};
use jiffy_proto::agent::SiteSettings;
use jiffy_remote::RemoteStore;
use std::sync::Arc;
use std::time::Duration;

/// Options of a host.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Restored sandboxes that wait for their creator, per template and size in use.
    pub warm: usize,
    /// Time between two looks at whether what they were restored from is still in memory.
    pub tend: Duration,
    /// Limits of the use of the host.
    pub limits: HostLimits,
    /// Time between two looks at what each sandbox uses.
    pub sample: Duration,
    /// Time between two looks for what belongs to nobody.
    pub gc_interval: Duration,
    /// Tells what the host has left; none: the machine this program runs on.
    pub reader: Option<Arc<dyn HostReader>>,
    /// Certificate authorities and proxy of all sandboxes.
    pub site: SiteSettings,
    /// Store that snapshots are shared in; none: they stay on this host.
    pub remote: Option<Arc<RemoteStore>>,
    /// Tells the templates whose snapshots all tenants of the store share.
    pub is_stock: fn(&str) -> bool,
    /// Lock of the data directory, without which gc removes nothing; none: there is no other.
    pub lock: Option<Arc<crate::DirectoryLock>>,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            warm: 0,
            tend: Duration::from_secs(60),
            limits: HostLimits::default(),
            sample: Duration::from_secs(10),
            gc_interval: Duration::from_secs(60),
            reader: None,
            site: SiteSettings::default(),
            remote: None,
            is_stock: |_| false,
            lock: None,
        }
    }
}
