//! Names that people give to sandboxes, each unique among those of one owner.

use super::id_groups::sort_by_text;
use super::{OperationError, Sandboxes, SandboxesInner};
use crate::sandbox::Sandbox;
use jiffy_api_types::{MAX_SANDBOX_NAME, SandboxState};
use jiffy_engine_api::is_reserved;
use parking_lot::Mutex;
use smol_str::SmolStr;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sandboxes by owner, name or token.
#[derive(Clone, Copy)]
pub struct SandboxIndex<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Sandboxes by owner, name or token.
    pub fn index(&self) -> SandboxIndex<'_> {
        SandboxIndex(&self.0)
    }
}

/// Owner of a sandbox; none: the host's.
type Owner = Option<String>;

/// A name, and the owner of the sandbox that has it.
type NameKey = (SmolStr, Option<SmolStr>);

/// Sandboxes that are not killed, by name and owner.
#[derive(Debug, Default)]
pub(crate) struct SandboxNames(Mutex<BTreeMap<NameKey, SmolStr>>);

fn key(owner: &Owner, name: &str) -> NameKey {
    (SmolStr::new(name), owner.as_deref().map(SmolStr::new))
}

impl<'a> FromIterator<(&'a str, &'a Owner, &'a SmolStr)> for SandboxNames {
    /// Names that were unique when they were given.
    fn from_iter<T>(named: T) -> Self
    where
        T: IntoIterator<Item = (&'a str, &'a Owner, &'a SmolStr)>,
    {
        let named = named.into_iter();
        let named = named.map(|(name, owner, id)| (key(owner, name), id.clone()));
        let mut named: Vec<_> = named.collect();
        sort_by_text(&mut named, |((name, _), _)| name);
        Self(Mutex::new(named.into_iter().collect()))
    }
}

impl SandboxNames {
    /// Gives `name` to sandbox `id` of `owner`, unless another one of that owner has it, whose id
    /// is returned.
    pub fn claim(&self, owner: &Owner, name: &str, id: &str) -> Result<(), String> {
        let mut names = self.0.lock();
        let key = key(owner, name);
        match names.get(&key) {
            Some(holder) if **holder != *id => Err(holder.to_string()),
            _ => {
                names.insert(key, SmolStr::new(id));
                Ok(())
            }
        }
    }

    /// Takes `name` from sandbox `id` of `owner`, if it has it.
    pub fn release(&self, owner: &Owner, name: &str, id: &str) {
        let mut names = self.0.lock();
        let key = key(owner, name);
        if names.get(&key).is_some_and(|holder| **holder == *id) {
            names.remove(&key);
        }
    }

    /// Ids of the sandboxes with this name.
    fn ids(&self, name: &str) -> Vec<String> {
        let names = self.0.lock();
        let from = names.range(key(&None, name)..);
        let holders = from.take_while(|((other, _), _)| **other == *name);
        holders.map(|(_, id)| id.to_string()).collect()
    }
}

/// Refuses what cannot be a name, because it could not be typed or reads as an id.
fn check(name: &str) -> Result<(), OperationError> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let sound = name.len() <= MAX_SANDBOX_NAME
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(good)
        && !is_reserved(name);
    match sound {
        true => Ok(()),
        false => Err(OperationError::BadName),
    }
}

impl Sandboxes {
    /// Gives `name` to a sandbox that is being made, or to none of `owner` if another has it.
    pub(super) fn claim_name(
        &self,
        owner: &Owner,
        name: &str,
        id: &str,
    ) -> Result<(), OperationError> {
        check(name)?;
        let claimed = self.0.indexes.names.claim(owner, name, id);
        claimed.map_err(|holder| OperationError::NameTaken {
            name: name.to_owned(),
            holder,
        })
    }

    /// Gives a sandbox another name, or none.
    pub async fn rename(&self, id: &str, name: Option<String>) -> Result<Sandbox, OperationError> {
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("rename", &entry.id(), async move {
            let _op_guard = entry.op_lock().lock().await;
            let mut record = entry.record();
            if record.state == SandboxState::Killed {
                return Err(entry.refuse("rename"));
            }
            if record.name == name {
                return Ok(record);
            }
            let owner = record.settings.owner.clone();
            if let Some(name) = &name {
                this.claim_name(&owner, name, &record.id)?;
            }
            record.name = name;
            // The name that it has no longer is released with the record in memory.
            if let Err(e) = this.commit(&entry, record.clone(), &[]) {
                if let Some(name) = &record.name {
                    this.0.indexes.names.release(&owner, name, &record.id);
                }
                return Err(e.into());
            }
            Ok(record)
        })
        .await
    }
}

impl SandboxIndex<'_> {
    /// Sandboxes with this name that are not killed, at most one of each owner.
    pub fn named(self, name: &str) -> Vec<Sandbox> {
        let ids = self.0.indexes.names.ids(name);
        ids.iter()
            .filter_map(|id| Sandboxes(self.0.clone()).find(id))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_names_are_unique_per_owner() {
        let names = SandboxNames::default();
        let (mine, yours) = (None, Some("k".to_owned()));
        names.claim(&mine, "web", "a").unwrap();
        names.claim(&mine, "web", "a").unwrap();
        names.claim(&yours, "web", "b").unwrap();
        assert_eq!(names.claim(&mine, "web", "c"), Err("a".to_owned()));
        assert_eq!(names.ids("web"), ["a", "b"]);
        // One that has it no longer cannot take it from its heir.
        names.release(&mine, "web", "a");
        names.claim(&mine, "web", "c").unwrap();
        names.release(&mine, "web", "a");
        assert_eq!(names.ids("web"), ["c", "b"]);
        names.release(&mine, "web", "c");
        names.release(&yours, "web", "b");
        assert!(names.0.lock().is_empty());
    }

    #[test]
    fn untypable_names_and_ids_are_refused_as_names() {
        for good in ["web", "Web-1", "a.b_c", "0", &"a".repeat(63)] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", "-x", ".x", "a b", "a/b", "a:b", "ä", &"a".repeat(64)] {
            assert!(check(bad).is_err(), "{bad}");
        }
        assert!(check(&jiffy_engine_api::new_id().unwrap()).is_err());
    }
}
