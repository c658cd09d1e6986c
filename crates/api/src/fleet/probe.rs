//! State of the fleet's records and of the store, as operators see it (`jiffy fleet status`). The
//! records are the small objects by which the hosts agree. They are in the store or in etcd.

use super::Fleet;
use super::lost::stays;
use crate::error::ApiError;
use jiffy_api_types::{BackendStatus, HostLoss};
use jiffy_fleet::roster::RosterState;
use jiffy_fleet::{RecordError, RecordKey, SealedRecords};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::{MemberState, Root};
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of listed ids.
const MAX_IDS: usize = 100;

/// Records of the fleet that are read for its status.
#[derive(Debug, Clone)]
pub struct FleetProbe {
    /// Records of the fleet.
    pub records: Arc<SealedRecords>,
    /// Records in the store.
    pub store: Arc<SealedRecords>,
    /// The records are in etcd.
    pub is_etcd: bool,
}

async fn read(records: &SealedRecords, key: &str) -> Result<(), RecordError> {
    let key: RecordKey = key.parse()?;
    match records.get(&key).await {
        // The backend has answered, even if the record is damaged or older than before.
        Ok(_) | Err(RecordError::Regressed { .. } | RecordError::Damaged { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn probe(records: &SealedRecords, kind: &str, key: &str) -> BackendStatus {
    let start = Instant::now();
    let result = read(records, key).await;
    let latency = u64::try_from(start.elapsed().as_millis()).ok();
    BackendStatus {
        kind: kind.to_owned(),
        latency_ms: latency.filter(|_| result.is_ok()),
        error: result.err().map(|error| error.to_string()),
    }
}

impl Fleet {
    /// Adds the records that are read for the status.
    #[must_use]
    pub fn with_probe(mut self, probe: FleetProbe) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Reads records and store once. Returns their state.
    pub(crate) async fn backends(&self) -> (Option<BackendStatus>, Option<BackendStatus>) {
        let Some(it) = &self.probe else {
            return (None, None);
        };
        // The roster of this host, the list of its sandboxes, is always in the store.
        let own = format!("fleet/rosters/{}", self.node.id().0);
        let kind = if it.is_etcd { "etcd" } else { "s3" };
        let (records, store) = tokio::join!(
            probe(&it.records, kind, "fleet/root"),
            probe(&it.store, "s3", &own)
        );
        (Some(records), Some(store))
    }

    /// Checks that a front (a machine that only passes requests to the hosts) has received this
    /// number. If a number was removed before it is assigned, the front that receives it would be
    /// rejected.
    pub(crate) async fn check_front(&self, front: MemberId) -> Result<(), ApiError> {
        let Some(it) = &self.probe else {
            return Ok(());
        };
        let root = async {
            let key: RecordKey = "fleet/root".parse()?;
            it.records.get(&key).await
        };
        let root = root.await;
        let root = root.map_err(|error| ApiError::fleet_unavailable(error.to_string()))?;
        let root = root.and_then(|record| Root::decode(&record.content, None).ok());
        match root {
            // A number below the next one has been assigned.
            Some(root) if front < root.next_member.front() => Ok(()),
            _ => Err(ApiError::not_found(
                "not_found",
                format!("front {front} does not exist: its log and `fleet.toml` have its number"),
            )),
        }
    }

    /// Returns for each lost host how many sandboxes it has in which state.
    pub(crate) fn losses(&self) -> Vec<HostLoss> {
        let members = self.node.members();
        let dead = members.rows.iter();
        let dead = dead.filter(|row| row.state == MemberState::Dead);
        dead.map(|row| {
            let sandboxes = self.lost.of_host(row.id);
            let count = |state| sandboxes.iter().filter(|lost| lost.state == state).count() as u64;
            // No other host has the volumes of these sandboxes.
            let stored = sandboxes.iter();
            let stored = stored.filter(|lost| lost.state == RosterState::Stored);
            let with_volumes = stored.filter(|lost| stays(&lost.record)).count() as u64;
            let unstored = sandboxes.iter();
            let unstored = unstored.filter(|lost| lost.state == RosterState::Paused);
            HostLoss {
                host: row.id.to_string(),
                since_ms: row.dead_since_ms,
                resumable: count(RosterState::Stored) - with_volumes,
                broken: count(RosterState::Running),
                unstored: unstored
                    .map(|lost| lost.record.id().to_owned())
                    .take(MAX_IDS)
                    .collect(),
            }
        })
        .collect()
    }
}
