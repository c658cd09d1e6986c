//! Memory limits of each request, and of all requests of a tenant together. Wasmtime calls the
//! limiter when a memory or table grows.
//!
//! A *tenant* is the owner of functions. All functions of a tenant run in one process.

use crate::cpu_meter::RequestUsage;
use crate::engine::{MAX_CORE_INSTANCES, MAX_MEMORIES, MAX_TABLE_ELEMENTS, MAX_TABLES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use wasmtime::ResourceLimiter;

/// Memory budget of a tenant's requests in bytes.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: u64,
    used: AtomicU64,
}

/// Part of the budget that a request has reserved.
#[derive(Debug)]
pub(crate) struct MemoryReservation {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit,
            used: AtomicU64::new(0),
        }
    }

    /// Returns the bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves `bytes`. Returns false if the budget is exhausted.
    fn reserve(&self, bytes: u64) -> bool {
        // The counter protects no other data, so that `Relaxed` suffices.
        let increased = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, increased)
            .is_ok()
    }
}

impl MemoryReservation {
    pub(crate) fn empty(budget: &Arc<MemoryBudget>) -> Self {
        Self {
            budget: budget.clone(),
            bytes: 0,
        }
    }

    /// Reserves `bytes`. Returns false, without reserving anything, if the budget is exhausted.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        let is_reserved = self.budget.reserve(bytes);
        if is_reserved {
            self.bytes += bytes;
        }
        is_reserved
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Limits of a request's store.
#[derive(Debug)]
pub(crate) struct MemoryLimiter {
    usage: Arc<RequestUsage>,
    reservation: MemoryReservation,
    /// Maximum total size of the request's linear memories in bytes.
    limit: u64,
    /// Bytes of linear memory granted so far.
    granted: u64,
    /// Table elements granted so far.
    elements: usize,
}

impl MemoryLimiter {
    pub(crate) fn new(budget: &Arc<MemoryBudget>, usage: Arc<RequestUsage>, limit: u64) -> Self {
        let reservation = MemoryReservation::empty(budget);
        Self {
            usage,
            reservation,
            limit,
            granted: 0,
            elements: 0,
        }
    }

    /// Records that a growth was denied, and returns false.
    fn deny(&self) -> bool {
        self.usage.growth_refused.store(true, Ordering::Relaxed);
        false
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let more = u64::try_from(desired.saturating_sub(current)).unwrap_or(u64::MAX);
        if self.granted.saturating_add(more) > self.limit {
            return Ok(self.deny());
        }
        if maximum.is_some_and(|maximum| desired > maximum) {
            // Not a denial by the host: the module itself declares this maximum.
            return Ok(false);
        }
        if !self.reservation.grow(more) {
            self.usage
                .tenant_memory_short
                .store(true, Ordering::Relaxed);
            return Ok(self.deny());
        }
        // Memory is never returned before the request ends: WebAssembly memories cannot shrink.
        self.granted += more;
        Ok(true)
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let elements = self
            .elements
            .saturating_add(desired.saturating_sub(current));
        if elements > MAX_TABLE_ELEMENTS {
            return Ok(self.deny());
        }
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        self.elements = elements;
        Ok(true)
    }

    // Wasmtime checks these numbers when a store creates an instance, a table or a memory.
    fn instances(&self) -> usize {
        usize::try_from(MAX_CORE_INSTANCES).unwrap_or(usize::MAX)
    }

    fn tables(&self) -> usize {
        usize::try_from(MAX_TABLES).unwrap_or(usize::MAX)
    }

    fn memories(&self) -> usize {
        usize::try_from(MAX_MEMORIES).unwrap_or(usize::MAX)
    }
}
