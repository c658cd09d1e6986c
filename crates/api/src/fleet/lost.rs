//! Sandboxes of lost hosts, and paused sandboxes that drained hosts have given up.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. The *home* is the host that has its files. A *draining* host receives no new
//! sandboxes, and gives up its stored ones. A *member* is a host of the fleet. The *coordinator* is
//! the member that selects the hosts of new sandboxes and declares silent members dead.
//!
//! Each host writes its roster, the list of its sandboxes, to the store. If a host is dead or was
//! removed, the other hosts read its roster and show its sandboxes. A host that resumes or kills
//! one of them removes it from the roster. The right to run a sandbox depends on its head only, not
//! on a roster.

mod tasks;

use super::rows::FleetRows;
use jiffy_fleet::RecordError;
use jiffy_fleet::node::{Members, Node};
use jiffy_fleet::roster::{ReadRoster, Roster, RosterEntry, RosterOf, RosterState, Rosters};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::MemberState;
use jiffy_sandbox_manager::{Sandbox, SandboxState, Sandboxes};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Time from the start of a drain until the host gives up sandboxes. All members must know of the
/// drain by then. They request the states of the members every 2 s.
const NOTICE: Duration = Duration::from_secs(5);
/// Time for which a read of the rosters suffices for calls on unknown sandboxes. A longer time
/// would hide sandboxes that a drained host has just released.
const FRESH: Duration = Duration::from_millis(20);

/// Sandbox whose host is dead or was removed, or has given up the sandbox.
#[derive(Debug, Clone)]
pub(crate) struct LostSandbox {
    /// Record, as it is shown: paused, or broken with the loss of its host.
    pub record: Sandbox,
    /// State at the loss.
    pub state: RosterState,
    /// Lost host. `None` if a drained host has given up the sandbox.
    pub host: Option<MemberId>,
    /// Description of the loss, for messages.
    pub cause: String,
}

/// Roster that was read, with the sandboxes to show.
struct Loaded {
    read: ReadRoster,
    /// Time at which the host was declared dead, in milliseconds since 1970.
    since_ms: Option<u64>,
    /// Sandboxes by id.
    sandboxes: BTreeMap<String, LostSandbox>,
}

/// Sandboxes whose home is lost, or that have no home, as this host knows them.
#[derive(Default)]
pub(crate) struct LostSandboxes {
    rosters: Option<Rosters>,
    /// Rosters of lost members that were read.
    loaded: Mutex<BTreeMap<RosterOf, Loaded>>,
    /// Sandboxes that this host has resumed or killed, and that must be removed from rosters.
    taken: Mutex<BTreeMap<RosterOf, BTreeSet<String>>>,
    /// Notified when `taken` has changed.
    take: Notify,
    /// Time since which this host is draining.
    draining_since: Mutex<Option<Instant>>,
    /// Held while this host gives up sandboxes.
    releasing: tokio::sync::Mutex<()>,
    /// Time of the last read of all rosters.
    reloaded: Mutex<Option<Instant>>,
    /// Notified after a change of this host's sandboxes.
    pub(super) changed: Notify,
}

/// Returns the description of the loss of a host.
pub(super) fn cause_of(host: MemberId, since_ms: Option<u64>) -> String {
    let since = since_ms.and_then(|ms| i64::try_from(ms).ok());
    let since = since.and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    match since {
        Some(time) => format!(
            "host {host} was lost at {}",
            time.strftime("%Y-%m-%d %H:%M:%S UTC")
        ),
        None => format!("host {host} was lost"),
    }
}

impl LostSandboxes {
    pub fn new(rosters: Rosters) -> Self {
        Self {
            rosters: Some(rosters),
            ..Self::default()
        }
    }

    /// Returns whether the fleet has rosters, so that any host can show and resume sandboxes of
    /// lost hosts.
    pub fn has_rosters(&self) -> bool {
        self.rosters.is_some()
    }

    /// Returns a sandbox by its complete id.
    pub fn find(&self, id: &str) -> Option<LostSandbox> {
        let loaded = self.loaded.lock();
        let mut found = loaded.values().filter_map(|host| host.sandboxes.get(id));
        found.next().cloned()
    }

    /// Returns a sandbox by its name and owner.
    pub fn named(&self, owner: Option<&str>, name: &str) -> Option<LostSandbox> {
        let loaded = self.loaded.lock();
        let mut all = loaded.values().flat_map(|host| host.sandboxes.values());
        all.find(|lost| lost.record.name() == Some(name) && lost.record.owner() == owner)
            .cloned()
    }

    /// Returns the sandboxes that fulfil a condition, as they are shown.
    pub fn select(&self, condition: impl Fn(&Sandbox) -> bool) -> Vec<Sandbox> {
        let loaded = self.loaded.lock();
        let all = loaded.values().flat_map(|host| host.sandboxes.values());
        all.map(|lost| &lost.record)
            .filter(|record| condition(record))
            .cloned()
            .collect()
    }

    /// Returns the sandboxes of a lost host.
    pub fn of_host(&self, host: MemberId) -> Vec<LostSandbox> {
        let loaded = self.loaded.lock();
        let host = loaded.get(&RosterOf::Host(host));
        host.map_or_else(Vec::new, |host| host.sandboxes.values().cloned().collect())
    }

    /// Removes a sandbox that a host has resumed or killed, also from its roster.
    pub fn remove(&self, id: &str) {
        let mut taken = Vec::new();
        for (of, host) in self.loaded.lock().iter_mut() {
            if host.sandboxes.remove(id).is_some() {
                taken.push(*of);
            }
        }
        for of in taken {
            let mut all = self.taken.lock();
            all.entry(of).or_default().insert(id.to_owned());
            self.take.notify_one();
        }
    }

    /// Reads the rosters for a call on a sandbox that no live host has, unless they were just read.
    ///
    /// # Errors
    /// [`RecordError`] if a roster cannot be read.
    pub async fn refresh(&self, members: &Members) -> Result<(), RecordError> {
        let is_fresh = self.reloaded.lock().is_some_and(|at| at.elapsed() < FRESH);
        if is_fresh {
            return Ok(());
        }
        self.reload(members).await
    }

    /// Reads the rosters of lost hosts, and the roster of released sandboxes.
    ///
    /// # Errors
    /// [`RecordError`] if a roster cannot be read.
    pub async fn reload(&self, members: &Members) -> Result<(), RecordError> {
        let Some(rosters) = &self.rosters else {
            return Ok(());
        };
        let lost = members.rows.iter().filter(|row| !row.state.is_live());
        let mut wanted: BTreeMap<_, _> = lost
            .map(|row| (RosterOf::Host(row.id), row.dead_since_ms))
            .collect();
        // The sandboxes that draining hosts have given up have a roster of their own.
        wanted.insert(RosterOf::Released, None);
        let mut result = Ok(());
        for (of, since_ms) in &wanted {
            match rosters.read(*of).await {
                Ok(read) => self.store(*of, *since_ms, read),
                // The other rosters are read nevertheless.
                Err(error) => result = Err(error),
            }
        }
        self.loaded.lock().retain(|of, _| wanted.contains_key(of));
        if result.is_ok() {
            *self.reloaded.lock() = Some(Instant::now());
        }
        result
    }

    /// Replaces the sandboxes of one lost host by its roster as read from the store. Omits the
    /// sandboxes that this host has taken over meanwhile. Without a roster, removes the host.
    fn store(&self, of: RosterOf, since_ms: Option<u64>, read: Option<ReadRoster>) {
        let mut loaded = self.loaded.lock();
        let Some(read) = read else {
            loaded.remove(&of);
            return;
        };
        // Keep the sandboxes if the roster is unchanged.
        if loaded
            .get(&of)
            .is_some_and(|old| old.read.is_same(&read) && old.since_ms == since_ms)
        {
            return;
        }
        let taken = self.taken.lock();
        let taken = taken.get(&of);
        let entries = read.roster.entries.values();
        let entries = entries.filter(|entry| taken.is_none_or(|taken| !taken.contains(&entry.id)));
        let sandboxes = entries
            .filter_map(|entry| {
                let lost = lost_sandbox(of, since_ms, entry)?;
                Some((entry.id.clone(), lost))
            })
            .collect();
        loaded.insert(
            of,
            Loaded {
                read,
                since_ms,
                sandboxes,
            },
        );
    }

    /// Removes taken sandboxes from their rosters.
    async fn write_taken(&self) -> Result<(), RecordError> {
        let Some(rosters) = &self.rosters else {
            return Ok(());
        };
        let all = self.taken.lock().clone();
        for (of, ids) in all {
            let remove = |roster: &mut Roster| roster.entries.retain(|id, _| !ids.contains(id));
            rosters.update(of, remove).await?;
            let mut taken = self.taken.lock();
            if let Some(left) = taken.get_mut(&of) {
                left.retain(|id| !ids.contains(id));
            }
        }
        Ok(())
    }

    /// Adds paused sandboxes that this host gives up to the roster of released sandboxes.
    ///
    /// # Errors
    /// [`RecordError`] if the roster cannot be written: the host must not give them up.
    async fn release(&self, entries: &[RosterEntry]) -> Result<(), RecordError> {
        let Some(rosters) = &self.rosters else {
            return Ok(());
        };
        let add = |roster: &mut Roster| {
            let entries = entries.iter().cloned();
            roster
                .entries
                .extend(entries.map(|entry| (entry.id.clone(), entry)));
        };
        rosters.update(RosterOf::Released, add).await?;
        let read = rosters.read(RosterOf::Released).await?;
        self.store(RosterOf::Released, None, read);
        Ok(())
    }

    /// Returns whether this host is draining, and all members with contact to the coordinator know
    /// it: they find its sandboxes in the roster of released sandboxes.
    fn may_release(&self, node: &Node) -> bool {
        let mut since = self.draining_since.lock();
        if !is_draining(node) {
            *since = None;
            return false;
        }
        since.get_or_insert_with(Instant::now).elapsed() >= NOTICE
    }

    /// Gives up all stored paused sandboxes of this host, which is draining. Other hosts show and
    /// resume them. Sandboxes with volumes stay, because no other host can resume them.
    ///
    /// # Errors
    /// [`RecordError`] if they could not be released: they stay on this host.
    pub(super) async fn release_stored(
        &self,
        node: &Node,
        rows: &FleetRows,
        sandboxes: &Sandboxes,
    ) -> Result<(), RecordError> {
        if self.rosters.is_none() || !self.may_release(node) {
            return Ok(());
        }
        let _releasing = self.releasing.lock().await;
        let all = sandboxes.list();
        let movable = all.iter().filter(|sandbox| !stays(sandbox));
        let entries = movable.filter_map(|sandbox| entry_of(rows, sandbox));
        let entries: Vec<_> = entries
            .filter(|entry| entry.state == RosterState::Stored)
            .collect();
        if entries.is_empty() {
            return Ok(());
        }
        self.release(&entries).await?;
        for entry in &entries {
            // The sandbox may have been resumed meanwhile. It then stays on this host, and is
            // removed from the roster.
            if !sandboxes.give_up(&entry.id).await {
                self.remove(&entry.id);
            }
        }
        Ok(())
    }
}

/// Returns whether a sandbox can run on its host only, because this host has its volumes.
pub(super) fn stays(sandbox: &Sandbox) -> bool {
    !sandbox.settings().volumes.is_empty()
}

/// Returns the sandbox of a roster, as it is shown.
fn lost_sandbox(of: RosterOf, since_ms: Option<u64>, entry: &RosterEntry) -> Option<LostSandbox> {
    let record = match Sandbox::from_text(&entry.record) {
        Ok(record) if record.id() == entry.id => record,
        // The entry is about another sandbox.
        Ok(_) => return None,
        Err(error) => {
            tracing::warn!(id = entry.id, error, "cannot read a sandbox of a lost host");
            return None;
        }
    };
    let (host, cause) = match of {
        RosterOf::Host(host) => (Some(host), cause_of(host, since_ms)),
        RosterOf::Released => (None, "its host was drained".to_owned()),
    };
    let record = match entry.state {
        RosterState::Stored => record,
        RosterState::Running => record.lost(cause.clone()),
        RosterState::Paused => record.lost(format!("{cause}, and its pause was not stored")),
    };
    Some(LostSandbox {
        record,
        state: entry.state,
        host,
        cause,
    })
}

/// Returns the entry of a sandbox. `None` if it is killed, or its creation has not finished.
pub(super) fn entry_of(rows: &FleetRows, sandbox: &Sandbox) -> Option<RosterEntry> {
    let state = match sandbox.state() {
        SandboxState::Killed | SandboxState::Creating => return None,
        SandboxState::Paused if rows.is_stored(sandbox) => RosterState::Stored,
        SandboxState::Paused => RosterState::Paused,
        SandboxState::Running | SandboxState::Broken { .. } => RosterState::Running,
    };
    match sandbox.to_text() {
        Ok(record) => Some(RosterEntry {
            id: sandbox.id().to_owned(),
            state,
            record,
        }),
        Err(error) => {
            tracing::warn!(
                id = sandbox.id(),
                error,
                "cannot add a sandbox to the roster of this host"
            );
            None
        }
    }
}

/// Returns whether this host receives no more sandboxes and gives up its stored sandboxes. A host
/// gives up sandboxes only while it is certain of their heads.
pub(super) fn is_draining(node: &Node) -> bool {
    let members = node.members();
    let row = members.row(node.id());
    // This host has compared its sandboxes with their heads, and its registration is in force.
    row.is_some_and(|row| row.state == MemberState::Draining)
        && node.view().is_ready()
        && node.authority().is_some()
}
