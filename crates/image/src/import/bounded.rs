//! Bounded lists and maps in untrusted JSON documents. A document of a few MiB can contain more
//! than a million entries, which would need many times its size in memory.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// Maximum number of entries.
const MAX_ENTRIES: usize = 4096;

/// List of at most [`MAX_ENTRIES`] entries. The limit applies while the list is read.
struct BoundedList<T>(Vec<T>);
/// Map of at most [`MAX_ENTRIES`] entries. The limit applies while the map is read.
struct BoundedMap<T>(BTreeMap<String, T>);

fn too_many<E: Error>() -> E {
    E::custom(format_args!("a list of more than {MAX_ENTRIES} entries"))
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Reads a list with a bounded number of elements.
        struct List<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = list.next_element()? {
                    if entries.len() == MAX_ENTRIES {
                        return Err(too_many());
                    }
                    entries.push(entry);
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_seq(List(PhantomData)).map(Self)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Reads a map with a bounded number of entries.
        struct Map<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Map<T> {
            type Value = BTreeMap<String, T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((name, value)) = map.next_entry()? {
                    if entries.len() == MAX_ENTRIES {
                        return Err(too_many());
                    }
                    entries.insert(name, value);
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Map(PhantomData)).map(Self)
    }
}

/// Reads a list.
pub(super) fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    BoundedList::deserialize(deserializer).map(|few| few.0)
}

/// Reads a list or `null`.
pub(super) fn list_or_null<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let few: Option<BoundedList<T>> = Option::deserialize(deserializer)?;
    Ok(few.map(|few| few.0))
}

/// Reads a map.
pub(super) fn map<'de, D, T>(deserializer: D) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    BoundedMap::deserialize(deserializer).map(|few| few.0)
}

/// Reads a map or `null`.
pub(super) fn map_or_null<'de, D, T>(
    deserializer: D,
) -> Result<Option<BTreeMap<String, T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let few: Option<BoundedMap<T>> = Option::deserialize(deserializer)?;
    Ok(few.map(|few| few.0))
}
