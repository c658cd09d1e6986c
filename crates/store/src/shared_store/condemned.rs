//! List of condemned objects. Pushes read it to avoid these objects, and collections replace it.
//!
//! A *collection* removes objects that no snapshot needs. It first *condemns* an object, and a
//! later collection removes the object.
//!
//! `gc/condemned` is the list. A list of more than [`MAX_SINGLE`] entries is divided into
//! [`PARTS`] parts `gc/condemned-parts/<number>` by the hash of the entries' keys. A push then
//! reads the parts of its own objects only. `gc/condemned` states that the list is divided.
//! A divided list stays divided, because a push may read a part after it has read `gc/condemned`.

use crate::StoreError;
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Objects that a collection will remove, with the time of their condemnation (store's clock, ms).
pub(crate) type Condemned = BTreeMap<String, i64>;

/// Maximum number of entries of a list that is not divided.
const MAX_SINGLE: usize = 8192;
/// Number of parts of a divided list.
const PARTS: u16 = 1024;
/// Key of the list.
const LIST: &str = "gc/condemned";
/// Prefix of the keys of the parts.
const PART_FOLDER: &str = "gc/condemned-parts";

/// Content of `gc/condemned`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum CondemnedList {
    Single(Condemned),
    Divided(Divided),
}

/// Statement that the list is divided. Earlier versions of Jiffy cannot read it, and then neither
/// push nor collect.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Divided {
    /// Number of parts, written as an array: a plain number would be read as an entry of
    /// [`CondemnedList::Single`].
    divided_into: (u16,),
}

/// Condemned objects as a collection read them.
#[derive(Debug, Default)]
pub(crate) struct ReadCondemned {
    pub all: Condemned,
    /// True if the list in the store is divided into parts.
    is_divided: bool,
}

/// Returns the part of the list for an object.
fn part_of(key: &str) -> u16 {
    let hash = blake3::hash(key.as_bytes());
    let [first, second, ..] = *hash.as_bytes();
    u16::from_le_bytes([first, second]) % PARTS
}

fn part_key(tenant: &Tenant, part: u16) -> String {
    tenant.key(&format!("{PART_FOLDER}/{part:04}"))
}

fn divide(all: &Condemned) -> BTreeMap<u16, BTreeMap<&str, i64>> {
    let mut parts: BTreeMap<u16, BTreeMap<&str, i64>> = BTreeMap::new();
    for (key, since) in all {
        parts.entry(part_of(key)).or_default().insert(key, *since);
    }
    parts
}

impl SharedStore {
    /// Returns the condemned objects among `keys`.
    pub(crate) async fn condemned_among(
        &self,
        tenant: &Tenant,
        keys: &BTreeSet<String>,
    ) -> Result<HashSet<String>, StoreError> {
        let mut found = match self.read_list(tenant, &tenant.key(LIST)).await? {
            None => return Ok(HashSet::new()),
            Some(CondemnedList::Single(all)) => all,
            Some(CondemnedList::Divided(_)) => {
                let parts: BTreeSet<u16> = keys.iter().map(|key| part_of(key)).collect();
                self.condemned_parts(tenant, parts).await?
            }
        };
        found.retain(|key, _| keys.contains(key));
        Ok(found.into_keys().collect())
    }

    /// Reads these parts of the list of condemned objects.
    async fn condemned_parts(
        &self,
        tenant: &Tenant,
        parts: impl IntoIterator<Item = u16>,
    ) -> Result<Condemned, StoreError> {
        let all = Mutex::new(Condemned::new());
        let read = async |part: u16| {
            let key = part_key(tenant, part);
            let part: Option<Condemned> = self.read_list(tenant, &key).await?;
            all.lock().extend(part.unwrap_or_default());
            Ok(())
        };
        self.backend.each(parts, read).await?;
        Ok(all.into_inner())
    }

    /// Reads the whole list.
    pub(crate) async fn condemned(&self, tenant: &Tenant) -> Result<ReadCondemned, StoreError> {
        Ok(match self.read_list(tenant, &tenant.key(LIST)).await? {
            None => ReadCondemned::default(),
            Some(CondemnedList::Single(all)) => ReadCondemned {
                all,
                is_divided: false,
            },
            Some(CondemnedList::Divided(_)) => ReadCondemned {
                all: self.condemned_parts(tenant, 0..PARTS).await?,
                is_divided: true,
            },
        })
    }

    /// Replaces the list `before`, and then sets `before` to the new one. The caller must hold the
    /// lock of the collection.
    pub(crate) async fn write_condemned(
        &self,
        tenant: &Tenant,
        before: &mut ReadCondemned,
        condemned: &Condemned,
    ) -> Result<(), StoreError> {
        let key = tenant.key(LIST);
        if !before.is_divided && condemned.len() <= MAX_SINGLE {
            self.write_list(tenant, &key, condemned).await?;
            before.all.clone_from(condemned);
            return Ok(());
        }
        {
            let (old, new) = (divide(&before.all), divide(condemned));
            let empty = BTreeMap::new();
            // If the list was not divided, an interrupted division may have left any part.
            let is_divided = before.is_divided;
            let changed = (0..PARTS).filter(|part| !is_divided || old.get(part) != new.get(part));
            let write = async |part: u16| {
                let list = new.get(&part).unwrap_or(&empty);
                self.write_list(tenant, &part_key(tenant, part), list).await
            };
            self.backend.each(changed, write).await?;
        }
        if !before.is_divided {
            // All parts exist by now, so a push that reads this object finds them.
            let divided = Divided {
                divided_into: (PARTS,),
            };
            let list = CondemnedList::Divided(divided);
            self.write_list(tenant, &key, &list).await?;
        }
        before.is_divided = true;
        before.all.clone_from(condemned);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, BackendSettings, Keyring};
    use object_store::memory::InMemory;
    use std::sync::Arc;

    #[tokio::test]
    async fn a_long_list_is_read_in_the_parts_of_the_wanted_objects() {
        let key = "1".repeat(64);
        let keys = format!("locator = \"{key}\"\ncurrent = \"k\"\n[keys]\nk = \"{key}\"\n");
        let backend = Backend::new(
            Arc::new(InMemory::new()),
            object_store::path::Path::default(),
            BackendSettings::default(),
        );
        let store = SharedStore::new(backend, Keyring::parse(&keys).unwrap());
        let tenant = store.tenant("alice").await.unwrap();
        let list = |numbers: std::ops::Range<i64>| -> Condemned {
            numbers
                .map(|number| (format!("object-{number}"), number))
                .collect()
        };
        let wanted: BTreeSet<String> = ["object-7", "object-9", "other"].map(str::to_owned).into();
        let mut read = store.condemned(&tenant).await.unwrap();
        let among = async || {
            let found = store.condemned_among(&tenant, &wanted).await.unwrap();
            found.into_iter().collect::<BTreeSet<_>>()
        };
        assert_eq!(among().await, BTreeSet::new());
        let long = MAX_SINGLE as i64 + 1;
        for (numbers, divided) in [
            (0..9, false),
            (0..long, true),
            (8..long, true),
            (9..10, true),
        ] {
            let list = list(numbers);
            store
                .write_condemned(&tenant, &mut read, &list)
                .await
                .unwrap();
            assert_eq!((read.is_divided, &read.all), (divided, &list));
            let again = store.condemned(&tenant).await.unwrap();
            assert_eq!((again.is_divided, &again.all), (divided, &list));
            let expected = wanted.iter().filter(|key| list.contains_key(*key));
            let before = store.backend.traffic().gets;
            assert_eq!(among().await, expected.cloned().collect());
            assert!(store.backend.traffic().gets - before <= 1 + wanted.len() as u64);
        }
    }
}
