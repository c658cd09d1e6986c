//! Items of lists, with their state in the store that hosts share.

use jiffy_api_types::StoreState;
use serde::{Deserialize, Serialize};
use std::ops::Deref;

/// Record of a sandbox or a snapshot as a list shows it.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(from = "Answer<T>")]
pub struct Listed<T: Clone> {
    /// All about it.
    #[serde(flatten)]
    pub record: T,
    /// State of the snapshot, or of the one that the sandbox sleeps in; none: it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_state: Option<StoreState>,
}

#[derive(Deserialize)]
struct Answer<T> {
    #[serde(rename = "jiffy")]
    record: T,
    #[serde(rename = "storeState", default)]
    store_state: Option<StoreState>,
}

impl<T: Clone> From<Answer<T>> for Listed<T> {
    fn from(answer: Answer<T>) -> Self {
        Self {
            record: answer.record,
            store_state: answer.store_state,
        }
    }
}

impl<T: Clone> Deref for Listed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.record
    }
}
