//! Lock of a tenant's collection: object `gc/lock`. Collections, repairs and repacking hold it.
//!
//! The object changes by conditional writes only, so that at most one of several hosts takes or
//! renews it. Each version has random bytes: equal content would have the same ETag. A free lock
//! has zeroes and stays: a removal without a condition could remove the lock of another host.

use crate::StoreError;
use crate::tenant::{SharedStore, Tenant};
use bytes::Bytes;
use object_store::UpdateVersion;
use parking_lot::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Age from which on a lock that is not renewed counts as left behind.
pub const GC_LOCK_TIME: Duration = Duration::from_secs(3600);
/// Time after which a holder renews its lock.
const RENEWAL_TIME: Duration = Duration::from_secs(GC_LOCK_TIME.as_secs() / 8);
const LOCK_BYTES: usize = 32;
/// Content of a lock that no host holds.
const FREE: [u8; LOCK_BYTES] = [0; LOCK_BYTES];

/// Lock that this process holds.
#[derive(Debug)]
pub(crate) struct CollectionLock {
    key: String,
    held: Mutex<Held>,
    renewing: tokio::sync::Mutex<()>,
    /// Time of the store at which it was taken, in milliseconds since 1970.
    pub now: i64,
}

/// Version of the lock that this process wrote last.
#[derive(Debug, Clone)]
struct Held {
    version: UpdateVersion,
    /// Time before the write.
    renewed: Instant,
}

impl SharedStore {
    /// Time of the store in milliseconds since 1970: that of an object written now.
    pub(super) async fn store_time(&self, tenant: &Tenant) -> Result<i64, StoreError> {
        let probe = tenant.key("gc/clock");
        self.backend.put(&probe, random_content(&probe)?).await?;
        let found = self.backend.head(&probe).await?;
        Ok(found.ok_or(StoreError::Gone(probe))?.modified_ms)
    }

    /// Takes the lock. A lock that was not renewed for `lock_time` is taken over.
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
        let version = match self.backend.get_versioned(&key, LOCK_BYTES as u64).await? {
            None => self.create_lock(&key, content).await?,
            Some(found) => {
                let held = self.backend.head(&key).await?;
                let is_recent =
                    held.is_some_and(|held| now - held.modified_ms < super::millis(lock_time));
                match found.bytes != FREE.as_slice() && is_recent {
                    true => None,
                    // Free, or left by a process that was cut off.
                    false => self.backend.replace(&key, content, &found.version).await?,
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

    /// Creates the object of the lock. `None` if another host was first.
    async fn create_lock(
        &self,
        key: &str,
        content: Bytes,
    ) -> Result<Option<UpdateVersion>, StoreError> {
        // If the object exists, an earlier attempt may have created it.
        self.backend.create(key, content.clone()).await?;
        let found = self.backend.get_versioned(key, LOCK_BYTES as u64).await?;
        Ok(found
            .filter(|found| found.bytes == content)
            .map(|found| found.version))
    }

    /// Fails if another process has the lock, or may have it soon. Renews it now and then.
    pub(crate) async fn check_lock(&self, lock: &CollectionLock) -> Result<(), StoreError> {
        let held = lock.held().clone();
        let age = held.renewed.elapsed();
        if age > GC_LOCK_TIME / 2 {
            return Err(StoreError::Collecting(GC_LOCK_TIME));
        }
        if age > RENEWAL_TIME {
            // One of the requests that run at once renews it.
            let _turn = lock.renewing.lock().await;
            let held = lock.held().clone();
            if held.renewed.elapsed() <= RENEWAL_TIME {
                return Ok(());
            }
            let renewed = Instant::now();
            let content = random_content(&lock.key)?;
            let replaced = self.backend.replace(&lock.key, content, &held.version);
            let version = replaced.await?;
            let version = version.ok_or(StoreError::Collecting(GC_LOCK_TIME))?;
            *lock.held() = Held { version, renewed };
        }
        Ok(())
    }

    /// Frees the lock, unless another process has taken it over.
    pub(crate) async fn unlock_collection(&self, lock: &CollectionLock) -> Result<(), StoreError> {
        let version = lock.held().version.clone();
        let free = Bytes::from_static(&FREE);
        self.backend.replace(&lock.key, free, &version).await?;
        Ok(())
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
