//! Items of lists: records of sandboxes or snapshots, with their host and their state in the shared
//! store.
//!
//! The API nests the record of Jiffy in the field `jiffy`, because the other fields of an item have
//! the format of E2B. The output of commands (`--json`) has the fields of the record and the two
//! additional fields at the same level. [`Listed`] is read in the first format and written in the
//! second.

use jiffy_api_types::StoreState;
use serde::{Deserialize, Serialize};
use std::ops::Deref;

/// Record of a sandbox or a snapshot in a list. Serialised in the format of the commands' output.
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
    /// Host of the fleet that has the sandbox. `None` without a fleet, for sandboxes of lost hosts,
    /// and for snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// Item of a list in the format of the API. The fields for E2B's clients are ignored.
#[derive(Deserialize)]
struct ListItem<T> {
    #[serde(rename = "jiffy")]
    record: T,
    #[serde(rename = "storeState", default)]
    store_state: Option<StoreState>,
    #[serde(default)]
    host: Option<String>,
}

impl<T: Clone> From<ListItem<T>> for Listed<T> {
    fn from(item: ListItem<T>) -> Self {
        Self {
            record: item.record,
            store_state: item.store_state,
            host: item.host,
        }
    }
}

impl<T: Clone> Deref for Listed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.record
    }
}
