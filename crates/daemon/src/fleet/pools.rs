//! Warm pools of this host. They follow the demand for templates, as seen by the *coordinator*, the
//! member of the fleet that selects the hosts of new sandboxes. A *warm pool* contains guests that
//! were started in advance.

use jiffy_api::Fleet;
use jiffy_fleet_core::PoolDemand;
use jiffy_sandbox_manager::{self as manager, Sandboxes};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// Interval at which the demand is applied again, because the free memory of the host changes, and
/// a failed refill is repeated.
const INTERVAL: Duration = Duration::from_secs(10);

/// Changes the warm pools to each received demand, until its sender is dropped.
pub async fn follow(
    mut demand: watch::Receiver<Vec<PoolDemand>>,
    sandboxes: Sandboxes,
    fleet: Fleet,
) {
    loop {
        let pools = demand.borrow_and_update().clone();
        sandboxes.pool().follow(&known(&pools, &fleet)).await;
        let changed = async {
            if pools.is_empty() {
                return demand.changed().await;
            }
            // A timeout is no error: the same demand is applied again.
            let changed = timeout(INTERVAL, demand.changed()).await;
            changed.unwrap_or(Ok(()))
        };
        if changed.await.is_err() {
            return;
        }
    }
}

/// Returns the demand for templates that are on this host.
fn known(pools: &[PoolDemand], fleet: &Fleet) -> Vec<manager::PoolDemand> {
    let templates = fleet.templates();
    let pools = pools.iter().filter_map(|pool| {
        let (template, size) = templates.sources.get(&pool.template)?;
        Some(manager::PoolDemand {
            template: template.clone(),
            size: *size,
            guests: usize::try_from(pool.guests).ok()?,
        })
    });
    pools.collect()
}
