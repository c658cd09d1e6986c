//! Lock of a tenant's collection: object `gc/lock`. Collections, repairs and repacking hold it.

use crate::StoreError;
use crate::tenant::{SharedStore, Tenant};
use bytes::Bytes;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Age from which on a lock that is not renewed counts as left behind.
pub const GC_LOCK_TIME: Duration = Duration::from_secs(3600);
/// Time after which a holder renews its lock.
const RENEWAL_TIME: Duration = Duration::from_secs(GC_LOCK_TIME.as_secs() / 8);

/// Lock that this process holds.
#[derive(Debug)]
pub(crate) struct CollectionLock {
    key: String,
    content: Bytes,
    renewed: Mutex<Instant>,
    /// Time of the store at which it was taken, in milliseconds since 1970.
    pub now: i64,
}

impl SharedStore {
    /// Time of the store in milliseconds since 1970: that of an object written now.
    pub(super) async fn store_time(&self, tenant: &Tenant) -> Result<i64, StoreError> {
        let probe = tenant.key("gc/clock");
        self.backend.put(&probe, random_content(&probe)?).await?;
        let found = self.backend.head(&probe).await?;
        Ok(found.ok_or(StoreError::Gone(probe))?.modified_ms)
    }

    /// Takes the lock; one that was not renewed for `lock_time` is taken over.
    pub(crate) async fn lock_collection(
        &self,
        tenant: &Tenant,
        lock_time: Duration,
    ) -> Result<CollectionLock, StoreError> {
        let key = tenant.key("gc/lock");
        let content = random_content(&key)?;
        let taken = Instant::now();
        let now = self.store_time(tenant).await?;
        if !self.backend.create(&key, content.clone()).await?
            && self.held_by(&key).await?.as_ref() != Some(&content)
        {
            let held = self.backend.head(&key).await?;
            if held.is_some_and(|held| now - held.modified_ms < super::millis(lock_time)) {
                return Err(StoreError::Collecting(lock_time));
            }
            // Left by a process that was cut off.
            self.backend.delete(&key).await?;
            if !self.backend.create(&key, content.clone()).await? {
                return Err(StoreError::Collecting(lock_time));
            }
        }
        Ok(CollectionLock {
            key,
            content,
            renewed: Mutex::new(taken),
            now,
        })
    }

    /// Content of a lock, if there is one.
    async fn held_by(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        match self.backend.get(key, 64).await {
            Err(StoreError::Missing { .. }) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Fails if another process has the lock, or may have it soon; renews it now and then.
    pub(crate) async fn check_lock(&self, lock: &CollectionLock) -> Result<(), StoreError> {
        let age = lock.renewed().elapsed();
        if age > GC_LOCK_TIME / 2 {
            return Err(StoreError::Collecting(GC_LOCK_TIME));
        }
        if age > RENEWAL_TIME {
            let began = Instant::now();
            if self.held_by(&lock.key).await?.as_ref() != Some(&lock.content) {
                return Err(StoreError::Collecting(GC_LOCK_TIME));
            }
            self.backend.put(&lock.key, lock.content.clone()).await?;
            *lock.renewed.lock().unwrap_or_else(PoisonError::into_inner) = began;
        }
        Ok(())
    }

    /// Ends the lock, unless another process has taken it over.
    pub(crate) async fn unlock_collection(&self, lock: &CollectionLock) -> Result<(), StoreError> {
        if self.held_by(&lock.key).await?.as_ref() == Some(&lock.content) {
            self.backend.delete(&lock.key).await?;
        }
        Ok(())
    }
}

impl CollectionLock {
    fn renewed(&self) -> Instant {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn random_content(key: &str) -> Result<Bytes, StoreError> {
    let bytes = crate::data_keys::random::<16>().map_err(StoreError::damaged(key))?;
    Ok(bytes.to_vec().into())
}
