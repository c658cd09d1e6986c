//! Usage of a volume and its quota.
//!
//! The quota limits bytes and nodes (files, directories and links).

use nix::errno::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// Unit in which the content of files is charged, in bytes.
const BLOCK: u64 = 4096;

/// Limits of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Maximum number of bytes. Each file is charged its length, rounded up to 4 KiB.
    pub bytes: u64,
    /// Maximum number of files, directories and other nodes.
    pub nodes: u64,
}

/// Usage of a volume. Space is charged before it is used, so the quota is never exceeded.
#[derive(Debug)]
pub(crate) struct Usage {
    quota: Quota,
    bytes: AtomicU64,
    nodes: AtomicU64,
}

/// Returns the charge for a file of `length` bytes.
pub(crate) fn charge(length: u64) -> u64 {
    length.div_ceil(BLOCK).saturating_mul(BLOCK)
}

impl Usage {
    pub(crate) fn new(quota: Quota, bytes: u64, nodes: u64) -> Self {
        Self {
            quota,
            bytes: AtomicU64::new(bytes),
            nodes: AtomicU64::new(nodes),
        }
    }

    pub(crate) fn quota(&self) -> Quota {
        self.quota
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn nodes(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Charges a new node.
    pub(crate) fn add_node(&self) -> Result<(), Errno> {
        add(&self.nodes, 1, self.quota.nodes)
    }

    /// Releases a node and the content of a file of `length` bytes.
    pub(crate) fn remove_node(&self, length: u64) {
        sub(&self.nodes, 1);
        sub(&self.bytes, charge(length));
    }

    /// Charges the space by which a file grows from `old` to `new` bytes, or releases the space by
    /// which it shrinks.
    pub(crate) fn resize(&self, old: u64, new: u64) -> Result<(), Errno> {
        let (old, new) = (charge(old), charge(new));
        if new > old {
            return add(&self.bytes, new - old, self.quota.bytes);
        }
        sub(&self.bytes, old - new);
        Ok(())
    }
}

fn add(value: &AtomicU64, more: u64, limit: u64) -> Result<(), Errno> {
    let sum = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
    let added = value.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
    added.map(|_| ()).map_err(|_| Errno::EDQUOT)
}

fn sub(value: &AtomicU64, less: u64) {
    let rest = |used: u64| Some(used.saturating_sub(less));
    // Ignore the result: the function never returns `None`.
    let _ = value.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
}
