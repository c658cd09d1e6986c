//! Items of lists: records of sandboxes or snapshots, with their state in the shared store.

use jiffy_api_types::StoreState;
use serde::{Deserialize, Serialize};
use std::ops::Deref;

/// Record of a sandbox or a snapshot in a list.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(from = "ListItem<T>")]
pub struct Listed<T: Clone> {
    /// Record of the sandbox or snapshot.
    #[serde(flatten)]
    pub record: T,
    /// Upload state of the snapshot, or of the snapshot of a paused sandbox. `None` without a
    /// snapshot or a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_state: Option<StoreState>,
}

#[derive(Deserialize)]
struct ListItem<T> {
    #[serde(rename = "jiffy")]
    record: T,
    #[serde(rename = "storeState", default)]
    store_state: Option<StoreState>,
}

impl<T: Clone> From<ListItem<T>> for Listed<T> {
    fn from(item: ListItem<T>) -> Self {
        Self {
            record: item.record,
            store_state: item.store_state,
        }
    }
}

impl<T: Clone> Deref for Listed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.record
    }
}
