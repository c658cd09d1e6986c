//! [`StoreCopies`]: the copies of a snapshot in the stores that hosts share. They are a part of the
//! snapshot's record in the journal, so that a later daemon can remove them. A *tenant* is the part
//! of a store that belongs to one owner. The *root* of a copy is its top object, which refers to
//! all others.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.

use serde::{Deserialize, Serialize};

/// Copies of a snapshot in stores.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreCopies {
    /// Number of times that the copies were discarded. The record is a part of each copy, so a
    /// higher number changes the root of the next copy. A root whose removal is in progress is
    /// therefore never written again.
    pub revision: u32,
    /// Place of an upload that has started and has no complete copy yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uploading: Option<StorePlace>,
    /// Complete copies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<StoreCopy>,
}

/// Store and tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorePlace {
    /// Address of the store.
    pub store: String,
    /// Tenant.
    pub tenant: String,
}

/// Complete copy of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreCopy {
    /// Store and tenant.
    #[serde(flatten)]
    pub place: StorePlace,
    /// Hash of the copy's root document, which identifies its content.
    pub root: String,
    /// True if another host is responsible for the removal of the copy. Either that host pushed the
    /// copy and this host only fetched it, or the sandbox has moved to that host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fetched: bool,
}

/// Removal of a copy from a store, which is still to be done.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoreRetraction {
    /// Address of the store.
    pub store: String,
    /// Tenant.
    pub tenant: String,
    /// Id of the snapshot.
    pub id: String,
    /// Root of the copy. `None` for the copy to which the id refers in the store.
    pub root: Option<String>,
    /// True if the content is removed, false if only the name is.
    pub content: bool,
    /// True if `id` is a killed sandbox. Then no copy is removed: the head of the sandbox in the
    /// store is marked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub head: bool,
}

impl StoreCopies {
    /// Returns whether there are neither copies nor an upload, and copies were never discarded.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the root of the copy at `place`.
    pub(crate) fn root(&self, place: &StorePlace) -> Option<&str> {
        let mut copies = self.copies.iter();
        let copy = copies.find(|copy| copy.place == *place);
        copy.map(|copy| copy.root.as_str())
    }

    /// Records the complete copy at `place`.
    pub(crate) fn add(&mut self, place: StorePlace, root: String) {
        self.uploading.take_if(|uploading| *uploading == place);
        // One copy per place: a new copy replaces the name of the old one.
        self.copies.retain(|copy| copy.place != place);
        self.copies.push(StoreCopy {
            place,
            root,
            fetched: false,
        });
    }

    /// Discards all complete copies, so that new ones are uploaded. Returns the removals from
    /// stores.
    pub(crate) fn discard_copies(&mut self, id: &str) -> Vec<StoreRetraction> {
        // `content` is true: the content is removed too, and not only the names.
        let retractions = self.retractions(id, true).collect();
        self.revision += 1;
        self.copies.clear();
        retractions
    }

    /// Returns the removals of the complete copies of snapshot `id`. If `content` is false, only
    /// the names of the copies are removed. Omits copies that another host removes
    /// ([`StoreCopy::fetched`]).
    pub(crate) fn retractions(
        &self,
        id: &str,
        content: bool,
    ) -> impl Iterator<Item = StoreRetraction> {
        let own = self.copies.iter().filter(|copy| !copy.fetched);
        own.map(move |copy| StoreRetraction::new(&copy.place, id, Some(&copy.root), content))
    }

    /// Changes whether this host removes the copies at the end of the snapshot's life. A host
    /// adopts the copies when a sandbox moves to it, even if another host pushed them. The former
    /// host of the sandbox gives the copies up. Returns whether a copy changed.
    pub fn set_adopted(&mut self, adopted: bool) -> bool {
        let others = self.copies.iter_mut();
        let mut changed = false;
        for copy in others.filter(|copy| copy.fetched == adopted) {
            copy.fetched = !adopted;
            changed = true;
        }
        changed
    }

    /// Returns the removals of all copies of snapshot `id`, which was removed from this host.
    pub(crate) fn all_retractions(&self, id: &str) -> impl Iterator<Item = StoreRetraction> {
        // An upload that was interrupted may have stored content that no record names.
        let unfinished = self.uploading.iter();
        let unfinished = unfinished.map(|place| StoreRetraction::new(place, id, None, true));
        self.retractions(id, true).chain(unfinished)
    }
}

impl StoreRetraction {
    /// Creates the removal of the copy at `place`. If `content` is false, only the name of the copy
    /// is removed.
    pub(crate) fn new(place: &StorePlace, id: &str, root: Option<&str>, content: bool) -> Self {
        Self {
            store: place.store.clone(),
            tenant: place.tenant.clone(),
            id: id.to_owned(),
            root: root.map(str::to_owned),
            content,
            head: false,
        }
    }

    /// Creates the change of the head of the killed sandbox `id` of the tenant at `place`.
    pub(crate) fn of_head(place: &StorePlace, id: &str) -> Self {
        Self {
            head: true,
            ..Self::new(place, id, None, false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(tenant: &str) -> StorePlace {
        StorePlace {
            store: "file:///s".into(),
            tenant: tenant.into(),
        }
    }

    #[test]
    fn copies_of_a_sandbox_that_moved_are_removed_by_its_new_host_only() {
        let mut store = StoreCopies::default();
        store.add(place("a"), "root".into());
        let retracted = |store: &StoreCopies| store.all_retractions("s").count();
        assert_eq!(retracted(&store), 1);
        assert!(store.set_adopted(false) && !store.set_adopted(false));
        assert_eq!(retracted(&store), 0);
        assert_eq!(store.root(&place("a")), Some("root"));
        assert!(store.set_adopted(true) && !store.set_adopted(true));
        assert_eq!(retracted(&store), 1);
    }

    #[test]
    fn only_copies_that_this_host_pushed_are_removed() {
        let mut store = StoreCopies {
            uploading: Some(place("a")),
            copies: vec![StoreCopy {
                place: place("b"),
                root: "fetched".into(),
                fetched: true,
            }],
            ..StoreCopies::default()
        };
        let retractions: Vec<_> = store.all_retractions("s").collect();
        assert_eq!((retractions.len(), &retractions[0].root), (1, &None));
        store.add(place("a"), "old".into());
        store.add(place("a"), "new".into());
        assert_eq!(store.root(&place("a")), Some("new"));
        let removed = store.discard_copies("s");
        assert_eq!(removed.len(), 1);
        assert_eq!(removed[0].root.as_deref(), Some("new"));
        assert_eq!((store.revision, store.copies.len()), (1, 0));
        let text = serde_json::to_string(&store).unwrap();
        assert_eq!(serde_json::from_str::<StoreCopies>(&text).unwrap(), store);
    }
}
