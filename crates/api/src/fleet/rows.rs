//! Reports this host's sandboxes to the fleet's directory. A row contains the hash of an id, a name
//! or an idempotency key, and states that this host has the sandbox.
//!
//! A *row* is the entry of a sandbox or of a name in the directory of the fleet.

use super::lost::LostSandboxes;
use jiffy_fleet::node::{Node, row_hash};
use jiffy_fleet_core::{Revision, Row, RowChange, RowState, SandboxHash};
use jiffy_sandbox_manager::{Sandbox, SandboxObserver, SandboxState};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::Notify;

/// Kinds of rows. A kind is part of the hash of a row, so that an id and an equal name have
/// different rows.
pub(super) const ID: &str = "id";
pub(super) const NAME: &str = "name";
pub(super) const IDEMPOTENCY: &str = "idempotency";
pub(super) const NETWORK: &str = "network";

/// The head of a sandbox (the record in the store that decides which host may run it), as this host
/// wrote or read it last.
#[derive(Debug, Clone, Default)]
struct Head {
    /// Number of replacements of the record.
    revision: u64,
    /// Snapshot of the stored pause, if any.
    stored: Option<String>,
}

/// Reports the rows of all sandboxes to the node.
pub(super) struct FleetRows {
    node: Node,
    secret: Arc<[u8; 32]>,
    /// Heads of stored sandboxes.
    heads: Mutex<HashMap<String, Head>>,
    /// Sandboxes by the hash of their idempotency key.
    created: Mutex<HashMap<SandboxHash, String>>,
    /// Sandboxes by the hash of their private network, except killed ones. A network has one row as
    /// long as it has sandboxes.
    networks: Mutex<HashMap<SandboxHash, HashSet<String>>>,
    lost: Arc<LostSandboxes>,
    /// Notified when a sandbox no longer runs, or is removed.
    released: Arc<Notify>,
}

impl FleetRows {
    pub fn new(node: Node, secret: Arc<[u8; 32]>, lost: Arc<LostSandboxes>) -> Self {
        Self {
            node,
            secret,
            heads: Mutex::default(),
            created: Mutex::default(),
            networks: Mutex::default(),
            lost,
            released: Arc::default(),
        }
    }

    /// Returns the notification that a sandbox no longer uses its part of a budget.
    pub fn released(&self) -> Arc<Notify> {
        self.released.clone()
    }

    /// Returns the sandbox that was created with an idempotency key.
    pub fn created_with(&self, hash: SandboxHash) -> Option<String> {
        self.created.lock().get(&hash).cloned()
    }

    fn hash(&self, kind: &str, parts: &[&str]) -> SandboxHash {
        row_hash(&self.secret, kind, parts)
    }

    fn idempotency_hash(&self, sandbox: &Sandbox) -> Option<SandboxHash> {
        let creation = sandbox.settings().creation.as_ref()?;
        Some(self.hash(IDEMPOTENCY, &[sandbox.owner().unwrap_or(""), &creation.key]))
    }

    fn network_hash(&self, sandbox: &Sandbox) -> Option<SandboxHash> {
        let network = sandbox.settings().network.join.as_deref()?;
        let is_alive = *sandbox.state() != SandboxState::Killed;
        is_alive.then(|| self.hash(NETWORK, &[sandbox.owner().unwrap_or(""), network]))
    }

    /// Adds or removes the row of a private network with its first or last sandbox.
    fn change_network(&self, before: Option<&Sandbox>, now: Option<&Sandbox>) {
        let hash = |sandbox: Option<&Sandbox>| sandbox.and_then(|s| self.network_hash(s));
        let (former, current) = (hash(before), hash(now));
        let Some(id) = now
            .or(before)
            .map(Sandbox::id)
            .filter(|_| former != current)
        else {
            return;
        };
        // Held until the changes are queued, so that they are in the order of the sandboxes.
        let mut networks = self.networks.lock();
        if let Some(hash) = former
            && let Some(ids) = networks.get_mut(&hash)
        {
            ids.remove(id);
            if ids.is_empty() {
                networks.remove(&hash);
                self.node.change_row(RowChange::Removed(hash));
            }
        }
        if let Some(hash) = current {
            networks.entry(hash).or_default().insert(id.to_owned());
            self.node.change_row(RowChange::Put(Row {
                hash,
                // A network has no head.
                revision: Revision(0),
                state: RowState::Running,
            }));
        }
    }

    /// Returns whether the pause of a sandbox is stored.
    pub fn is_stored(&self, sandbox: &Sandbox) -> bool {
        let heads = self.heads.lock();
        let head = heads.get(sandbox.id());
        head.is_some_and(|head| {
            head.stored.is_some() && head.stored.as_deref() == sandbox.snapshot()
        })
    }

    /// Returns the rows of a sandbox for the directory: of its id, its name and its idempotency
    /// key.
    fn rows(&self, sandbox: &Sandbox) -> Vec<Row> {
        let is_stored = self.is_stored(sandbox);
        let head = self.heads.lock().get(sandbox.id()).cloned();
        let head = head.unwrap_or_default();
        let state = match sandbox.state() {
            SandboxState::Paused if is_stored => RowState::Stored,
            SandboxState::Paused => RowState::Paused,
            _ => RowState::Running,
        };
        let is_alive = *sandbox.state() != SandboxState::Killed;
        let id = is_alive.then(|| self.hash(ID, &[sandbox.id()]));
        let name = sandbox.name().filter(|_| is_alive);
        let name = name.map(|name| self.hash(NAME, &[sandbox.owner().unwrap_or(""), name]));
        // The row of the idempotency key remains when the sandbox is killed: a repeated create
        // finds the sandbox as long as its record exists.
        let hashes = [id, name, self.idempotency_hash(sandbox)];
        let row = |hash| Row {
            hash,
            revision: Revision(head.revision),
            state,
        };
        hashes.into_iter().flatten().map(row).collect()
    }

    /// Reports the difference between two lists of rows to the directory of the fleet.
    fn replace(&self, before: &[Row], now: &[Row]) {
        for row in before {
            if !now.iter().any(|other| other.hash == row.hash) {
                self.node.change_row(RowChange::Removed(row.hash));
            }
        }
        for row in now {
            self.node.change_row(RowChange::Put(*row));
        }
    }
}

impl SandboxObserver for FleetRows {
    fn changed(&self, before: Option<&Sandbox>, now: Option<&Sandbox>) {
        let rows = |sandbox: Option<&Sandbox>| sandbox.map_or_else(Vec::new, |s| self.rows(s));
        self.replace(&rows(before), &rows(now));
        self.change_network(before, now);
        self.lost.changed.notify_one();
        let is_running = |sandbox: Option<&Sandbox>| {
            sandbox.is_some_and(|s| *s.state() == SandboxState::Running)
        };
        // The resources that the sandbox has used can be reported as free.
        if before.is_some() && !is_running(now) {
            self.released.notify_one();
        }
        match (before, now) {
            (_, Some(now)) => {
                if let Some(hash) = self.idempotency_hash(now) {
                    self.created.lock().insert(hash, now.id().to_owned());
                }
            }
            (Some(before), None) => {
                self.heads.lock().remove(before.id());
                if let Some(hash) = self.idempotency_hash(before) {
                    self.created.lock().remove(&hash);
                }
            }
            (None, None) => {}
        }
    }

    fn head_changed(&self, sandbox: &Sandbox, revision: u64, stored: Option<&str>) {
        let head = Head {
            revision,
            stored: stored.map(str::to_owned),
        };
        self.heads.lock().insert(sandbox.id().to_owned(), head);
        self.replace(&[], &self.rows(sandbox));
        self.lost.changed.notify_one();
    }
}
