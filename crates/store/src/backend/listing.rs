//! Listings of the objects in a store, bounded in length and time.

use super::{Backend, MAX_OBJECT_BYTES, time_of};
use crate::StoreError;
use crate::request_error::generic;
use crate::traffic::add;
use futures_util::TryStreamExt;
use object_store::ObjectMeta;

/// Minimum rate in keys per second of a listing that takes longer than the deadline.
const MIN_LISTED_PER_SECOND: u64 = 100;
/// Number of keys in a page of a listing. Each page is a request.
const PAGE_KEYS: usize = 1000;
/// Maximum length in bytes of the keys that Jiffy writes, without the store's prefix.
const MAX_KEY_BYTES: usize = 256;

/// Object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Key without the store's prefix.
    pub key: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Time of the last change by the store's clock, milliseconds since 1970.
    pub modified_ms: i64,
}

impl Backend {
    /// Lists all objects below `prefix`. Omits objects whose keys are longer than any key that
    /// Jiffy writes.
    ///
    /// # Errors
    /// [`StoreError::TooMany`] if there are more than [`max_listed`] objects.
    ///
    /// [`max_listed`]: crate::BackendSettings::max_listed
    pub async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let limit = self.settings.max_listed;
        let listed = self.list_some(prefix, limit).await?;
        listed.ok_or_else(|| StoreError::TooMany {
            prefix: prefix.to_owned(),
            limit,
        })
    }

    /// Checks that the store is reachable and permits requests. Reads at most one page of a
    /// listing.
    pub async fn probe(&self, prefix: &str) -> Result<(), StoreError> {
        self.list_some(prefix, 0).await.map(drop)
    }

    /// Lists at most `limit` objects below `prefix` in ascending order, after the key `after`.
    pub async fn list_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Listed>, StoreError> {
        let path = self.path(prefix);
        // The offset is exclusive. The prefix serves as the first offset, because it sorts before
        // all keys below it.
        let after = after.map_or_else(|| path.clone(), |after| self.path(after));
        let clock = &self.clock(0);
        self.attempt(prefix, clock, || async {
            add(&self.counters.lists, 1);
            // In contrast to `list`, a listing with an offset is in order for all kinds of stores.
            let mut objects = self.store.list_with_offset(Some(&path), &after);
            let mut listed: Vec<Listed> = Vec::new();
            while listed.len() < limit {
                let Some(meta) = objects.try_next().await? else {
                    break;
                };
                clock.tick(time_of(1, MIN_LISTED_PER_SECOND));
                if !meta.location.prefix_matches(&path) {
                    return Err(generic("the listing contains a key outside its prefix"));
                }
                let is_next = |last: &Listed| self.path(&last.key) < meta.location;
                if !listed.last().is_none_or(is_next) {
                    return Err(generic("the listing is not in ascending order"));
                }
                listed.extend(self.listed(&meta));
            }
            Ok(listed)
        })
        .await
    }

    /// Lists the objects below `prefix`. `None` if there are more than `limit`.
    async fn list_some(
        &self,
        prefix: &str,
        limit: usize,
    ) -> Result<Option<Vec<Listed>>, StoreError> {
        let path = self.path(prefix);
        let clock = &self.clock(0);
        self.attempt(prefix, clock, || async {
            add(&self.counters.lists, 1);
            let mut pages = self.store.list(Some(&path));
            let (mut number, mut listed) = (0, Vec::new());
            while let Some(meta) = pages.try_next().await? {
                clock.tick(time_of(1, MIN_LISTED_PER_SECOND));
                number += 1;
                if number % PAGE_KEYS == 0 {
                    add(&self.counters.lists, 1);
                }
                if number > limit {
                    return Ok(None);
                }
                if !meta.location.prefix_matches(&path) {
                    return Err(generic("the listing contains a key outside its prefix"));
                }
                listed.extend(self.listed(&meta));
            }
            Ok(Some(listed))
        })
        .await
    }

    /// Returns the object of a listing. `None` if its key is longer than the keys that Jiffy
    /// writes.
    fn listed(&self, meta: &ObjectMeta) -> Option<Listed> {
        let skipped = match self.prefix.as_ref().len() {
            0 => 0,
            length => length + 1,
        };
        let key = meta.location.as_ref().get(skipped..).unwrap_or("");
        (key.len() <= MAX_KEY_BYTES).then(|| Listed {
            key: key.to_owned(),
            bytes: meta.size.min(MAX_OBJECT_BYTES),
            modified_ms: meta.last_modified.timestamp_millis(),
        })
    }
}
