//! Background tasks for rosters. The *roster* of a host is the list of its sandboxes in the store,
//! which the other hosts read after its loss. The tasks are:
//! - `write_own` writes the roster of this host
//! - `read_lost` reads the rosters of lost hosts
//! - `release_while_draining` gives up sandboxes while this host is draining
//! - `write_taken` removes sandboxes that this host has resumed or killed from the rosters of lost
//!   hosts
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.

use super::{LostSandboxes, entry_of, is_draining};
use crate::fleet::rows::FleetRows;
use jiffy_fleet::node::Node;
use jiffy_fleet::roster::{Roster, RosterOf};
use jiffy_fleet_core::record::{MemberRow, MemberState};
use jiffy_sandbox_manager::{Sandboxes, WeakSandboxes};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Delay between a change of a sandbox and the write of the roster.
const WRITE_DELAY: Duration = Duration::from_millis(500);
/// Minimum interval of writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(3);
/// Interval at which the rosters of lost hosts are read again.
const READ_INTERVAL: Duration = Duration::from_secs(10);
/// Delay after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Interval of reads and releases while a host is draining.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);

impl LostSandboxes {
    /// Starts the tasks. They end when the control plane is dropped.
    pub(in crate::fleet) fn start(
        self: &Arc<Self>,
        node: &Node,
        rows: &Arc<FleetRows>,
        sandboxes: &Sandboxes,
    ) {
        if self.rosters.is_none() {
            return;
        }
        let weak = Arc::downgrade(self);
        tokio::spawn(write_own(
            weak.clone(),
            node.clone(),
            Arc::downgrade(rows),
            sandboxes.downgrade(),
        ));
        tokio::spawn(read_lost(weak.clone(), node.clone()));
        tokio::spawn(release_while_draining(
            weak.clone(),
            node.clone(),
            Arc::downgrade(rows),
            sandboxes.downgrade(),
        ));
        tokio::spawn(write_taken(weak));
    }
}

/// Writes the roster of this host after changes.
async fn write_own(
    lost: Weak<LostSandboxes>,
    node: Node,
    rows: Weak<FleetRows>,
    sandboxes: WeakSandboxes,
) {
    // True if the roster must be written without a further change.
    let mut is_due = true;
    loop {
        {
            let Some(lost) = lost.upgrade() else { return };
            if !is_due {
                // After the timeout, check again whether this host may write: it may have been
                // declared dead meanwhile.
                let _ = timeout(READ_INTERVAL, lost.changed.notified()).await;
            }
        }
        sleep(WRITE_DELAY).await;
        // A host that was declared dead must not write yet: other hosts may have changed its
        // roster. It registers again, and compares its sandboxes with their heads first.
        if node.authority().is_none() || !node.view().is_ready() {
            is_due = true;
            sleep(RETRY_DELAY).await;
            continue;
        }
        let (Some(lost), Some(rows)) = (lost.upgrade(), rows.upgrade()) else {
            return;
        };
        let Some(sandboxes) = sandboxes.upgrade() else {
            return;
        };
        let Some(rosters) = lost.rosters.clone() else {
            return;
        };
        let all = sandboxes.list();
        let roster = Roster::new(all.iter().filter_map(|sandbox| entry_of(&rows, sandbox)));
        drop((lost, rows, sandboxes));
        let of = RosterOf::Host(node.id());
        let written = rosters.update(of, |now| *now = roster.clone()).await;
        is_due = written.is_err();
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write the roster of this host, retrying");
        }
        sleep(WRITE_INTERVAL).await;
    }
}

/// Reads the rosters of lost hosts.
async fn read_lost(lost: Weak<LostSandboxes>, node: Node) {
    let mut known = node.members();
    loop {
        let is_draining = |row: &MemberRow| row.state == MemberState::Draining;
        let mut delay = if known.rows.iter().any(is_draining) {
            DRAIN_INTERVAL
        } else {
            READ_INTERVAL
        };
        {
            let Some(lost) = lost.upgrade() else { return };
            if let Err(error) = lost.reload(&known).await {
                tracing::warn!(%error, "cannot read the sandboxes of lost hosts, retrying");
                delay = RETRY_DELAY;
            }
        }
        // Wait for a change of the members, at most for `delay`. The next iteration reloads the
        // sandboxes in any case: other hosts may have taken some of them.
        known = match timeout(delay, node.members_changed(&known)).await {
            Ok(changed) => changed,
            Err(_) => node.members(),
        };
    }
}

/// Gives up stored paused sandboxes while this host is draining.
async fn release_while_draining(
    lost: Weak<LostSandboxes>,
    node: Node,
    rows: Weak<FleetRows>,
    sandboxes: WeakSandboxes,
) {
    loop {
        let known = node.members();
        let is_draining = is_draining(&node);
        {
            let (Some(lost), Some(rows), Some(sandboxes)) =
                (lost.upgrade(), rows.upgrade(), sandboxes.upgrade())
            else {
                return;
            };
            if is_draining && let Err(error) = lost.release_stored(&node, &rows, &sandboxes).await {
                tracing::warn!(%error, "cannot give up paused sandboxes, retrying");
            }
        }
        if is_draining {
            sleep(DRAIN_INTERVAL).await;
        } else {
            let _ = timeout(READ_INTERVAL, node.members_changed(&known)).await;
        }
    }
}

/// Removes sandboxes that this host has resumed or killed from the rosters of lost hosts.
async fn write_taken(lost: Weak<LostSandboxes>) {
    loop {
        {
            let Some(lost) = lost.upgrade() else { return };
            let _ = timeout(READ_INTERVAL, lost.take.notified()).await;
            if let Err(error) = lost.write_taken().await {
                tracing::warn!(%error, "cannot change the roster of a lost host, retrying");
                lost.take.notify_one();
            }
        }
        // Several changes are written together.
        sleep(WRITE_DELAY).await;
    }
}
