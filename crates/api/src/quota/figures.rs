//! Metrics of keys: their usage and limits, for Prometheus.
//!
//! The *quota* limits the sandboxes, snapshots and other resources of a key. A *scrape* is a
//! request of Prometheus for all metrics.

use super::{KeyUsage, Quota};
use crate::keys::{Key, Limits};
use jiffy_sandbox_manager::FigureFamily;

/// Name, help text and value of a metric of a key. The value is `None` if the key has no limit.
type OfKey<T> = (&'static str, &'static str, fn(&T) -> Option<u64>);

const USED: [OfKey<KeyUsage>; 8] = [
    ("key_sandboxes", "Running sandboxes of a key", |u| {
        Some(u.host.sandboxes)
    }),
    (
        "key_paused",
        "Sandboxes of a key that are paused or will be paused at their timeout",
        |u| Some(u.host.paused),
    ),
    ("key_snapshots", "Snapshots of a key", |u| {
        Some(u.host.snapshots)
    }),
    ("key_templates", "Tags of templates of a key", |u| {
        Some(u.builds.templates)
    }),
    ("key_builds", "Waiting and running builds of a key", |u| {
        Some(u.builds.builds)
    }),
    ("key_uploads", "Uploaded files of a key", |u| {
        Some(u.builds.uploads)
    }),
    (
        "key_exchanges",
        "Requests and streams to sandboxes of a key",
        |u| Some(u.exchanges),
    ),
    ("key_disk_bytes", "Disk space of a key", |u| {
        Some(u.amount().disk_bytes)
    }),
];
const LIMITS: [OfKey<Limits>; 6] = [
    (
        "key_sandboxes_limit",
        "Maximum number of running sandboxes",
        |l| l.max_sandboxes.map(u64::from),
    ),
    (
        "key_paused_limit",
        "Maximum number of paused sandboxes",
        |l| l.max_paused.map(u64::from),
    ),
    ("key_snapshots_limit", "Maximum number of snapshots", |l| {
        l.max_snapshots.map(u64::from)
    }),
    (
        "key_templates_limit",
        "Maximum number of template tags",
        |l| l.max_templates.map(u64::from),
    ),
    (
        "key_builds_limit",
        "Maximum number of waiting and running builds",
        |l| l.max_builds.map(u64::from),
    ),
    ("key_disk_limit_bytes", "Maximum disk space", |l| {
        l.max_disk_mib.map(|mib| mib.saturating_mul(1 << 20))
    }),
];
/// Maximum number of keys in a scrape. Each key has at most 14 values.
const MAX_KEYS: usize = 1000;

/// Returns one metric family per entry of `all`, with a value for each key.
fn families<T>(all: &[OfKey<T>], of_keys: &[(String, T)]) -> Vec<FigureFamily> {
    let family = |(name, help, read): &OfKey<T>| {
        let value = |(key, of): &(String, T)| Some((key.clone(), read(of)? as f64));
        FigureFamily {
            name,
            help,
            label: "key",
            values: of_keys.iter().filter_map(value).collect(),
        }
    };
    all.iter().map(family).collect()
}

impl Quota {
    /// Returns the usage and the limits of each key that was not revoked, for at most [`MAX_KEYS`]
    /// keys.
    pub fn figures(&self) -> Vec<FigureFamily> {
        // Without the keys, the scrape has no key metrics but is not rejected.
        let mut keys: Vec<Key> = self.keys.list().unwrap_or_default();
        keys.retain(|key| key.revoked_ms.is_none());
        // The oldest keys remain, so that the same keys appear in every scrape.
        keys.truncate(MAX_KEYS);
        let used = keys.iter().filter_map(|key| {
            let usage = self.usage_of(&key.id).ok()?;
            Some((key.id.clone(), usage))
        });
        let used: Vec<_> = used.collect();
        let limits = keys.iter().map(|key| (key.id.clone(), self.limits_of(key)));
        let limits: Vec<_> = limits.collect();
        let mut figures = families(&USED, &used);
        figures.extend(families(&LIMITS, &limits));
        figures
    }
}
