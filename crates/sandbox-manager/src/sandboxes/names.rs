//! [`SandboxNames`]: index of the names of sandboxes, which are unique per owner.

use super::id_groups::sort_by_text;
use super::{OperationError, Sandboxes};
use crate::sandbox::Sandbox;
use jiffy_api_types::{EventType, MAX_SANDBOX_NAME, SandboxState};
use jiffy_engine_api::is_reserved;
use parking_lot::Mutex;
use smol_str::SmolStr;
use std::collections::BTreeMap;

/// API key of a sandbox's owner. `None` for the host's owner.
type Owner = Option<String>;

/// Name and owner of a sandbox.
type NameKey = (SmolStr, Option<SmolStr>);

/// Sandboxes that are not killed, by name and owner.
#[derive(Debug, Default)]
pub(crate) struct SandboxNames(Mutex<BTreeMap<NameKey, SmolStr>>);

fn key(owner: &Owner, name: &str) -> NameKey {
    (SmolStr::new(name), owner.as_deref().map(SmolStr::new))
}

impl<'a> FromIterator<(&'a str, &'a Owner, &'a SmolStr)> for SandboxNames {
    /// Builds the index. The names must be unique per owner.
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
    /// Assigns `name` to sandbox `id` of `owner`.
    ///
    /// # Errors
    /// Fails if the name is invalid, or if another sandbox of the owner has it.
    pub fn claim(&self, owner: &Owner, name: &str, id: &str) -> Result<(), OperationError> {
        check(name)?;
        let mut names = self.0.lock();
        let key = key(owner, name);
        match names.get(&key) {
            // Claiming a name again for the same sandbox succeeds.
            Some(holder) if **holder != *id => Err(OperationError::NameTaken {
                name: name.to_owned(),
                holder: holder.to_string(),
            }),
            _ => {
                names.insert(key, SmolStr::new(id));
                Ok(())
            }
        }
    }

    /// Releases `name` if sandbox `id` of `owner` has it.
    pub fn release(&self, owner: &Owner, name: &str, id: &str) {
        let mut names = self.0.lock();
        let key = key(owner, name);
        if names.get(&key).is_some_and(|holder| **holder == *id) {
            names.remove(&key);
        }
    }

    /// Returns the ids of the sandboxes with this name, at most one of each owner.
    pub fn ids(&self, name: &str) -> Vec<String> {
        let names = self.0.lock();
        // The key without an owner is the first key of each name.
        let from = names.range(key(&None, name)..);
        let holders = from.take_while(|((other, _), _)| **other == *name);
        holders.map(|(_, id)| id.to_string()).collect()
    }
}

/// Rejects a name that is hard to type, or that looks like an id.
fn check(name: &str) -> Result<(), OperationError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_valid = name.len() <= MAX_SANDBOX_NAME
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_allowed)
        && !is_reserved(name);
    if is_valid {
        Ok(())
    } else {
        Err(OperationError::BadName)
    }
}

impl Sandboxes {
    /// Changes or removes the name of a sandbox.
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
                this.0.indexes.names.claim(&owner, name, &record.id)?;
            }
            let before = record.network_rules();
            record.name = name;
            // The name is also the name in a private network. Other rules do not contain it.
            let guest = entry.guest().filter(|_| record.network_rules() != before);
            if let Some(guest) = &guest
                && let Err(e) = guest.set_network(&record.network_rules()).await
            {
                if let Some(name) = &record.name {
                    this.0.indexes.names.release(&owner, name, &record.id);
                }
                return Err(OperationError::engine("rename the sandbox in its network")(
                    e,
                ));
            }
            // `commit` changes the record in memory, which releases the earlier name.
            if let Err(e) = this.commit(&entry, record.clone(), &[]) {
                if let Some(name) = &record.name {
                    this.0.indexes.names.release(&owner, name, &record.id);
                }
                if let Some(guest) = &guest {
                    // Ignore the error: the caller receives the error of the journal.
                    let _ = guest.set_network(&before).await;
                }
                return Err(e.into());
            }
            this.report(EventType::SandboxRenamed, &record);
            Ok(record)
        })
        .await
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
        let error = names.claim(&mine, "web", "c").unwrap_err();
        assert!(matches!(error, OperationError::NameTaken { holder, .. } if holder == "a"));
        assert_eq!(names.ids("web"), ["a", "b"]);
        // A sandbox that has released a name cannot release it for its new holder.
        names.release(&mine, "web", "a");
        names.claim(&mine, "web", "c").unwrap();
        names.release(&mine, "web", "a");
        assert_eq!(names.ids("web"), ["c", "b"]);
        names.release(&mine, "web", "c");
        names.release(&yours, "web", "b");
        assert!(names.0.lock().is_empty());
    }

    #[test]
    fn invalid_names_and_ids_are_rejected() {
        for good in ["web", "Web-1", "a.b_c", "0", &"a".repeat(63)] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", "-x", ".x", "a b", "a/b", "a:b", "ä", &"a".repeat(64)] {
            assert!(check(bad).is_err(), "{bad}");
        }
        assert!(check(&jiffy_engine_api::new_id().unwrap()).is_err());
    }
}
