//! Lock for the garbage collection of a tenant's objects: object `gc/lock`. Collections, repairs
//! and repacking hold it.
//!
//! All writes to the object are conditional, so that at most one host acquires or renews the lock.
//! Each version has random bytes, because equal content would have an equal ETag. A free lock is an
//! object of zeroes: removing the object is not conditional and could remove another host's lock.

use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{ObjectVersion, StoreError, Written};
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Age at which a lock that is not renewed is considered abandoned.
pub const GC_LOCK_TIME: Duration = Duration::from_secs(3600);
/// Interval at which the holder renews its lock.
const RENEWAL_TIME: Duration = Duration::from_secs(GC_LOCK_TIME.as_secs() / 8);
/// Length in bytes of the content of a lock.
const LOCK_BYTES: usize = 32;
/// Maximum size in bytes of a lock that is read.
const MAX_LOCK_BYTES: u64 = LOCK_BYTES as u64;
/// Time for which a renewal is repeated while the store is unavailable.
const RENEWAL_PATIENCE: Duration = Duration::from_secs(90);
/// Pause before a renewal is repeated.
const RENEWAL_PAUSE: Duration = Duration::from_millis(500);
/// Content of a lock that no host holds.
const FREE: [u8; LOCK_BYTES] = [0; LOCK_BYTES];

/// Lock that this process holds.
#[derive(Debug)]
pub(crate) struct CollectionLock {
    key: String,
    held: Mutex<Held>,
    renewing: tokio::sync::Mutex<()>,
    /// Time of the store when the lock was acquired, in milliseconds since 1970.
    pub now: i64,
}

/// Version of the lock that this process wrote last.
#[derive(Debug, Clone)]
struct Held {
    version: ObjectVersion,
    /// Time just before the write.
    renewed: Instant,
}

impl SharedStore {
    /// Returns the store's time in milliseconds since 1970, from a newly written object.
    pub(super) async fn store_time(&self, tenant: &Tenant) -> Result<i64, StoreError> {
        let probe = tenant.key("gc/clock");
        self.backend.put(&probe, random_content(&probe)?).await?;
        let current = self.backend.head(&probe).await?;
        Ok(current.ok_or(StoreError::Gone(probe))?.modified_ms)
    }

    /// Acquires the lock. Takes over a lock that was not renewed for `lock_time`.
    ///
    /// # Errors
    /// [`StoreError::Collecting`] if another process holds it.
    pub(crate) async fn lock_collection(
        &self,
        tenant: &Tenant,
        lock_time: Duration,
    ) -> Result<CollectionLock, StoreError> {
        let key = tenant.key("gc/lock");
        let content = random_content(&key)?;
        let now = self.store_time(tenant).await?;
        let renewed = Instant::now();
        let version = match self.control.get_versioned(&key, MAX_LOCK_BYTES).await? {
            None => self
                .control
                .create_versioned(&key, content, MAX_LOCK_BYTES)
                .await?
                .done(),
            Some(current) => {
                let held = self.control.head(&key).await?;
                let is_recent =
                    held.is_some_and(|held| now - held.modified_ms < super::millis(lock_time));
                if current.bytes != FREE.as_slice() && is_recent {
                    None
                } else {
                    // The lock is free, or its holder exited without releasing it.
                    self.control
                        .replace(&key, content, &current.version, MAX_LOCK_BYTES)
                        .await?
                        .done()
                }
            }
        };
        Ok(CollectionLock {
            key,
            held: Mutex::new(Held {
                version: version.ok_or(StoreError::Collecting(lock_time))?,
                renewed,
            }),
            renewing: tokio::sync::Mutex::default(),
            now,
        })
    }

    /// Fails if another process holds the lock or may soon take it over. Renews the lock when
    /// necessary.
    pub(crate) async fn check_lock(&self, lock: &CollectionLock) -> Result<(), StoreError> {
        let held = lock.held().clone();
        let age = held.renewed.elapsed();
        // Stop long before another host may take over the lock: clocks may run at different rates.
        if age > GC_LOCK_TIME / 2 {
            return Err(StoreError::Collecting(GC_LOCK_TIME));
        }
        if age > RENEWAL_TIME {
            // Only one of the concurrent requests renews the lock.
            let _guard = lock.renewing.lock().await;
            let held = lock.held().clone();
            if held.renewed.elapsed() <= RENEWAL_TIME {
                return Ok(());
            }
            let renewed = Instant::now();
            let content = random_content(&lock.key)?;
            let replaced = self.replace_lock(&lock.key, content, &held.version);
            let version = replaced
                .await?
                .done()
                .ok_or(StoreError::Collecting(GC_LOCK_TIME))?;
            *lock.held() = Held { version, renewed };
        }
        Ok(())
    }

    /// Replaces the lock, and repeats the write while the store is unavailable. A write may be
    /// executed although its response is lost. The version then differs from `expected` at the
    /// repetition. `Backend::replace` therefore compares the content as well, and reports success
    /// if it is equal. All free locks have equal content, so a repeated release may find the lock
    /// that another host has released. This is harmless.
    async fn replace_lock(
        &self,
        key: &str,
        content: Bytes,
        expected: &ObjectVersion,
    ) -> Result<Written, StoreError> {
        let start = Instant::now();
        loop {
            let replaced = self
                .control
                .replace(key, content.clone(), expected, MAX_LOCK_BYTES);
            match replaced.await {
                Err(e) if e.is_unavailable() && start.elapsed() < RENEWAL_PATIENCE => {
                    tracing::debug!(error = %e, "repeating the renewal of a collection lock");
                    tokio::time::sleep(RENEWAL_PAUSE).await;
                }
                other => return other,
            }
        }
    }

    /// Releases the lock, unless another process has taken it over.
    pub(crate) async fn unlock_collection(&self, lock: &CollectionLock) -> Result<(), StoreError> {
        let version = lock.held().version.clone();
        let free = Bytes::from_static(&FREE);
        self.replace_lock(&lock.key, free, &version).await.map(drop)
    }
}

impl CollectionLock {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock()
    }
}

fn random_content(key: &str) -> Result<Bytes, StoreError> {
    let bytes = crate::data_keys::random::<LOCK_BYTES>().map_err(StoreError::damaged(key))?;
    Ok(bytes.to_vec().into())
}
