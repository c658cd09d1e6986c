//! Comparison of this host's volumes with their rows in the table of the fleet. Calls on volumes
//! change both. This task completes the calls that a crash or a failure has interrupted, and adds
//! the volumes that the host had before it joined the fleet.

use super::Fleet;
use super::volume_table::{HomedVolume, VolumeTableError};
use super::volumes::FleetVolumes;
use crate::app::App;
use jiffy_fleet_core::MemberId;
use jiffy_volumes::{HostVolumes, Volume};
use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::sleep;

/// Interval of the comparisons.
const INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the first comparison waits for the table.
const LOAD_INTERVAL: Duration = Duration::from_millis(500);

/// Starts the task. It ends when the volumes of the host are dropped.
pub(super) fn watch(app: &App, fleet: &Fleet) {
    let (Some(host), Some(shared)) = (&app.volumes, &fleet.volumes) else {
        return;
    };
    let own = fleet.node.id();
    tokio::spawn(compare(Arc::downgrade(host), shared.clone(), own));
}

async fn compare(host: Weak<HostVolumes>, shared: FleetVolumes, own: MemberId) {
    loop {
        let Some(host) = host.upgrade() else {
            return;
        };
        // Before the table is loaded, no row is known.
        if !shared.table.is_loaded() {
            drop(host);
            sleep(LOAD_INTERVAL).await;
            continue;
        }
        // The rows are read before `creating`, and `creating` before the volumes of the host: a row
        // is added before its volume is created, and removed after its volume.
        let rows = shared.table.all();
        let creating = shared.creating.lock().clone();
        let local = tokio::task::spawn_blocking(move || host.volumes().all()).await;
        match local {
            Ok(Ok(local)) => {
                let ids = abandoned(&rows, &local, &creating, own);
                if !ids.is_empty()
                    && let Err(error) = shared.table.remove(ids).await
                {
                    tracing::debug!(%error, "cannot remove rows of volumes");
                }
                publish(&rows, local, &shared, own).await;
            }
            // Rows are not removed on missing data.
            Ok(Err(error)) => tracing::warn!(%error, "cannot read the volumes of this host"),
            Err(_) => return,
        }
        sleep(INTERVAL).await;
    }
}

/// Returns the ids of rows of this host without a volume.
fn abandoned(
    rows: &[HomedVolume],
    local: &[Volume],
    creating: &HashSet<String>,
    own: MemberId,
) -> Vec<String> {
    let existing: HashSet<_> = local.iter().map(|volume| &volume.id).collect();
    let rows = rows.iter().filter(|row| row.home == own);
    let ids = rows.map(|row| &row.volume.id);
    ids.filter(|id| !existing.contains(id) && !creating.contains(*id))
        .cloned()
        .collect()
}

/// Adds rows for volumes of this host that have none.
async fn publish(rows: &[HomedVolume], local: Vec<Volume>, shared: &FleetVolumes, own: MemberId) {
    let known: HashSet<_> = rows.iter().map(|row| &row.volume.id).collect();
    for volume in local {
        // The row may have been added since the rows were read.
        if known.contains(&volume.id) || shared.table.by_id(&volume.id).is_some() {
            continue;
        }
        let (id, name) = (volume.id.clone(), volume.name.clone());
        let mut row = HomedVolume { volume, home: own };
        let mut added = shared.table.add(row.clone()).await;
        if matches!(added, Err(VolumeTableError::Exists(_))) {
            tracing::warn!(
                volume = id,
                name,
                "the name of a volume is taken in the fleet: it is found by its id"
            );
            row.volume.name = id.clone();
            added = shared.table.add(row).await;
        }
        match added {
            Ok(()) => tracing::info!(
                volume = id,
                name,
                "added a volume of this host to the fleet"
            ),
            Err(error) => {
                tracing::warn!(volume = id, name, %error, "cannot add a volume to the fleet");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_this_host_without_a_volume_are_abandoned_unless_it_is_being_created() {
        let volume = |id: &str| Volume {
            id: id.to_owned(),
            owner: String::new(),
            name: id.to_owned(),
            bytes: 1,
            files: 1,
            created_ms: 1,
        };
        let row = |id: &str, home| HomedVolume {
            volume: volume(id),
            home: MemberId(home),
        };
        let rows = [row("a", 1), row("b", 1), row("c", 1), row("d", 2)];
        let creating = HashSet::from(["b".to_owned()]);
        let ids = abandoned(&rows, &[volume("a")], &creating, MemberId(1));
        assert_eq!(ids, ["c"]);
    }
}
