//! [`EntryIndexes`]: in-memory indexes over the records of all sandboxes: by name, owner, age,
//! deadline and snapshot. Each change of a record updates them, so that no call reads all records.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use super::id_groups::{IdGroups, SnapshotUsers};
use super::idle_checks::IdleChecks;
use super::list_order::SharedPosition;
use super::member_addresses::MemberAddresses;
use super::names::SandboxNames;
use super::observer::ObserverSlot;
use super::owner_ages::OwnerAges;
use crate::sandbox::Sandbox;
use crate::usage_ledger::UsageLedger;
use jiffy_api_types::SandboxState;
use parking_lot::Mutex;
use smol_str::SmolStr;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

/// Indexes over the records of sandboxes. Each has a lock of its own, under which no other lock is
/// taken.
#[derive(Debug, Default)]
pub(crate) struct EntryIndexes {
    /// Sandboxes that need each snapshot.
    pub users: SnapshotUsers,
    /// Sandboxes that were created from each snapshot.
    pub started: SnapshotUsers,
    /// Names of the sandboxes that are not killed.
    pub names: SandboxNames,
    /// Addresses that sandboxes have in private networks. Killed sandboxes have none.
    pub members: MemberAddresses,
    /// All sandboxes by time of creation, in milliseconds since 1970, and id. Locked after the
    /// entries.
    pub ages: Mutex<BTreeSet<SharedPosition>>,
    /// Running sandboxes that have a deadline, by deadline, in milliseconds since 1970, and id.
    pub deadlines: Mutex<BTreeSet<SharedPosition>>,
    /// Killed sandboxes by the time of the kill, in milliseconds since 1970, and id.
    pub killed: Mutex<BTreeSet<SharedPosition>>,
    /// Running sandboxes.
    pub running: Mutex<BTreeSet<SmolStr>>,
    /// Sandboxes that have an owner and are not killed, by owner and age.
    pub owners: Mutex<OwnerAges>,
    /// Number of sandboxes by the name of their state.
    pub states: Mutex<BTreeMap<&'static str, usize>>,
    /// Next checks of running sandboxes with an idle timeout.
    pub idle_checks: IdleChecks,
    /// Receiver of changes.
    pub observer: ObserverSlot,
    /// Counts the usage of running sandboxes.
    pub usage: OnceLock<UsageLedger>,
}

impl EntryIndexes {
    /// Builds the indexes of all records. Sorts once, which is faster than separate insertions.
    pub fn of<'a>(records: impl Iterator<Item = (&'a SmolStr, &'a Sandbox)> + Clone) -> Self {
        let positions = |at: fn(&Sandbox) -> Option<u64>| {
            let records = records.clone();
            let records = records.filter_map(|(id, r)| Some((at(r)?, id.clone())));
            Mutex::new(records.collect())
        };
        let groups = |key: fn(&Sandbox) -> Option<&str>| -> IdGroups {
            records.clone().map(|(id, r)| (key(r), id)).collect()
        };
        let named = records.clone();
        let named = named.filter_map(|(id, r)| Some((claimed_name(r)?, &r.settings.owner, id)));
        let running = records.clone().filter(|(_, r)| is_running(r));
        let owned = records.clone();
        let owned = owned.map(|(id, r)| (current_owner(r), r.created_ms, id));
        let mut states = BTreeMap::new();
        for (_, record) in records.clone() {
            *states.entry(record.state.name()).or_insert(0) += 1;
        }
        Self {
            users: SnapshotUsers::new(groups(needed_snapshot)),
            started: SnapshotUsers::new(groups(origin_snapshot)),
            names: named.collect(),
            members: records.clone().collect(),
            ages: positions(|r| Some(r.created_ms)),
            deadlines: positions(running_deadline),
            killed: positions(killed_at),
            running: Mutex::new(running.map(|(id, _)| id.clone()).collect()),
            owners: Mutex::new(owned.collect()),
            states: Mutex::new(states),
            // The first checks are scheduled when the guests of the running sandboxes are adopted.
            idle_checks: IdleChecks::default(),
            observer: ObserverSlot::default(),
            usage: OnceLock::new(),
        }
    }

    /// Adds a sandbox. Its name and its address in a private network, if it has them, must be
    /// claimed before.
    pub fn add(&self, id: &SmolStr, record: &Sandbox) {
        self.users.change(id, None, needed_snapshot(record));
        self.started.change(id, None, origin_snapshot(record));
        self.ages.lock().insert((record.created_ms, id.clone()));
        move_position(&self.deadlines, id, None, running_deadline(record));
        move_position(&self.killed, id, None, killed_at(record));
        if is_running(record) {
            self.running.lock().insert(id.clone());
        }
        self.owners
            .lock()
            .add(current_owner(record), record.created_ms, id);
        self.count_state(None, Some(record.state.name()));
        self.observer.changed(None, Some(record));
    }

    /// Updates the indexes for a changed record. A new name must be claimed before.
    pub fn change(&self, id: &SmolStr, before: &Sandbox, now: &Sandbox) {
        self.users
            .change(id, needed_snapshot(before), needed_snapshot(now));
        self.started
            .change(id, origin_snapshot(before), origin_snapshot(now));
        // The new name was claimed before the change, so only the former one is released.
        let name = claimed_name(before);
        if let Some(name) = name.filter(|_| name != claimed_name(now)) {
            self.names.release(&before.settings.owner, name, id);
        }
        self.members.change(id, before, Some(now));
        // `ages` needs no update: the time of creation of a sandbox never changes.
        move_position(
            &self.deadlines,
            id,
            running_deadline(before),
            running_deadline(now),
        );
        move_position(&self.killed, id, killed_at(before), killed_at(now));
        match (is_running(before), is_running(now)) {
            (false, true) => drop(self.running.lock().insert(id.clone())),
            (true, false) => {
                self.running.lock().remove(id);
                self.idle_checks.remove(id);
            }
            _ => {}
        }
        // The owner of a sandbox never changes, but a sandbox that is killed leaves this index.
        if current_owner(before) != current_owner(now) {
            let mut owners = self.owners.lock();
            owners.take(current_owner(before), before.created_ms, id);
            owners.add(current_owner(now), now.created_ms, id);
        }
        self.count_state(Some(before.state.name()), Some(now.state.name()));
        self.observer.changed(Some(before), Some(now));
    }

    /// Removes a sandbox.
    pub fn remove(&self, id: &SmolStr, record: &Sandbox) {
        self.users.change(id, needed_snapshot(record), None);
        self.started.change(id, origin_snapshot(record), None);
        if let Some(name) = claimed_name(record) {
            self.names.release(&record.settings.owner, name, id);
        }
        self.members.change(id, record, None);
        self.ages.lock().remove(&(record.created_ms, id.clone()));
        move_position(&self.deadlines, id, running_deadline(record), None);
        move_position(&self.killed, id, killed_at(record), None);
        if is_running(record) {
            self.running.lock().remove(id);
            self.idle_checks.remove(id);
        }
        self.owners
            .lock()
            .take(current_owner(record), record.created_ms, id);
        self.count_state(Some(record.state.name()), None);
        self.observer.changed(Some(record), None);
    }

    /// Updates the numbers of sandboxes by state, after one has changed its state, appeared
    /// (`before` is `None`) or disappeared.
    fn count_state(&self, before: Option<&'static str>, now: Option<&'static str>) {
        if before == now {
            return;
        }
        let mut states = self.states.lock();
        if let Some(count) = before.and_then(|name| states.get_mut(name)) {
            // Counts of 0 stay in the map: there are only a few states.
            *count = count.saturating_sub(1);
        }
        if let Some(name) = now {
            *states.entry(name).or_insert(0) += 1;
        }
    }
}

/// Changes the position of a sandbox in a sorted index. `None` means that it has none.
fn move_position(
    positions: &Mutex<BTreeSet<SharedPosition>>,
    id: &SmolStr,
    before: Option<u64>,
    now: Option<u64>,
) {
    if before == now {
        return;
    }
    let mut positions = positions.lock();
    if let Some(before) = before {
        positions.remove(&(before, id.clone()));
    }
    if let Some(now) = now {
        positions.insert((now, id.clone()));
    }
}

fn is_running(record: &Sandbox) -> bool {
    record.state == SandboxState::Running
}

fn is_alive(record: &Sandbox) -> bool {
    record.state != SandboxState::Killed
}

/// Returns the deadline of a running sandbox.
pub(super) fn running_deadline(record: &Sandbox) -> Option<u64> {
    record.deadline_ms.filter(|_| is_running(record))
}

/// Returns the time at which a sandbox was killed last.
fn killed_at(record: &Sandbox) -> Option<u64> {
    // The record of a killed sandbox changes only if the sandbox is killed again.
    (!is_alive(record)).then_some(record.changed_ms)
}

/// Returns the name that no other sandbox of the owner may have.
fn claimed_name(record: &Sandbox) -> Option<&str> {
    record.name.as_deref().filter(|_| is_alive(record))
}

/// Returns the snapshot that a sandbox needs.
fn needed_snapshot(record: &Sandbox) -> Option<&str> {
    record.snapshot.as_deref().filter(|_| is_alive(record))
}

/// Returns the snapshot from which a sandbox that is not killed was created.
fn origin_snapshot(record: &Sandbox) -> Option<&str> {
    record.started_from.as_deref().filter(|_| is_alive(record))
}

/// Returns the owner of a sandbox that is not killed.
fn current_owner(record: &Sandbox) -> Option<&str> {
    let owner = record.settings.owner.as_deref();
    owner.filter(|_| is_alive(record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox_settings::SandboxSettings;
    use jiffy_engine_api::SandboxSize;

    fn record(id: &str, state: SandboxState) -> Sandbox {
        Sandbox {
            id: id.to_owned(),
            name: Some(format!("name-of-{id}")),
            state,
            template: "base".to_owned(),
            size: SandboxSize::default(),
            env: BTreeMap::new(),
            settings: SandboxSettings {
                owner: Some("k".to_owned()),
                ..SandboxSettings::default()
            },
            deadline_ms: Some(7),
            agent_token: None,
            traffic_token: None,
            snapshot: Some("s".to_owned()),
            forked_from: None,
            started_from: Some("o".to_owned()),
            rollbacks: Vec::new(),
            pause_cause: None,
            boot_mode: None,
            engine: None,
            boot_ms: None,
            created_ms: 1,
            changed_ms: 2,
        }
    }

    /// Returns the content of the indexes without unused states.
    fn shown(indexes: &EntryIndexes) -> String {
        indexes.states.lock().retain(|_, count| *count > 0);
        format!("{indexes:?}")
    }

    #[test]
    fn indexes_depend_only_on_the_present_records() {
        use SandboxState::{Killed, Paused, Running};
        let id = SmolStr::new("a");
        let address = EntryIndexes::default()
            .members
            .claim(None, "lab", &id)
            .unwrap();
        let in_network = |mut record: Sandbox| {
            record.settings.network.join = Some("lab".to_owned());
            record.settings.network.address = Some(address.to_string());
            record
        };
        for state in [Running, Paused, Killed, SandboxState::broken("why")] {
            let expected = in_network(record("a", state.clone()));
            let at_once = EntryIndexes::of([(&id, &expected)].into_iter());
            for from in [Running, Paused, SandboxState::broken("why")] {
                let before = in_network(record("a", from));
                let changed = EntryIndexes::default();
                let owner = Some("k".to_owned());
                changed.names.claim(&owner, "name-of-a", &id).unwrap();
                changed.members.claim(owner.as_deref(), "lab", &id).unwrap();
                changed.add(&id, &before);
                changed.change(&id, &before, &expected);
                assert_eq!(shown(&changed), shown(&at_once));
                changed.remove(&id, &expected);
                assert_eq!(shown(&changed), shown(&EntryIndexes::default()));
            }
        }
    }
}
