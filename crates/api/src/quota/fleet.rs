//! Limits of keys that hold for all hosts of a fleet.
//!
//! A *budget* is one limit of one key on all hosts. The coordinator divides it among the members: a
//! *share* is the part that one member may use. A member admits operations within its shares, and
//! requests a larger share if one is too small. The coordinator then *recalls* unused parts of the
//! shares of other members. A *member* is a host of the fleet. The *coordinator* is the member of
//! the fleet that selects the hosts of new sandboxes and declares silent members dead.

use super::{Denied, Quota};
use crate::error::ApiError;
use crate::keys::{Key, Limits};
use jiffy_fleet::node::{LimitedNeed, Node, ShareRequest};
use jiffy_fleet_core::{BudgetExhausted, BudgetNeed, BudgetOwner, SharedShares};
use jiffy_sandbox_manager::QuotaAmount;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Interval at which the used parts of shares are counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval of counts after sandboxes have ended.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// Number of counts after which the usage of all keys is counted.
const FULL_COUNT: u32 = 30;
/// Pause before a share is requested again while unused shares are recalled.
const RECALL_PAUSE: Duration = Duration::from_millis(250);

/// Resource with a limit for the whole fleet.
struct Resource {
    /// Name of the resource in the owner of its budget (`KEY:NAME`).
    name: &'static str,
    /// Error code of an exhausted limit.
    code: &'static str,
    /// Name and remedy in the error.
    text: (&'static str, &'static str),
    amount: fn(&QuotaAmount) -> u64,
    limit: fn(&Limits) -> Option<u64>,
}

const KILL_OR_PAUSE: &str = "kill or pause a sandbox";

const RESOURCES: [Resource; 6] = [
    Resource {
        name: "sandboxes",
        code: "max_sandboxes",
        text: (
            "maximum number of concurrent running sandboxes",
            KILL_OR_PAUSE,
        ),
        amount: |amount| amount.sandboxes,
        limit: |limits| limits.max_sandboxes.map(u64::from),
    },
    Resource {
        name: "vcpus",
        code: "max_vcpus",
        text: ("maximum number of concurrent vCPUs", KILL_OR_PAUSE),
        amount: |amount| amount.vcpus,
        limit: |limits| limits.max_vcpus.map(u64::from),
    },
    Resource {
        name: "memory",
        code: "max_memory",
        text: ("maximum number of concurrent MiB of memory", KILL_OR_PAUSE),
        amount: |amount| amount.memory_mib,
        limit: |limits| limits.max_memory_mib.map(u64::from),
    },
    Resource {
        name: "paused",
        code: "max_paused",
        text: (
            "maximum number of concurrent sandboxes that are paused or will be paused at their timeout",
            "kill or resume a paused sandbox",
        ),
        amount: |amount| amount.paused,
        limit: |limits| limits.max_paused.map(u64::from),
    },
    Resource {
        name: "snapshots",
        code: "max_snapshots",
        text: ("maximum number of snapshots", "remove a snapshot"),
        amount: |amount| amount.snapshots,
        limit: |limits| limits.max_snapshots.map(u64::from),
    },
    Resource {
        name: "disk",
        code: "max_disk",
        text: (
            "disk quota",
            "remove snapshots, templates or paused sandboxes",
        ),
        amount: |amount| amount.disk_bytes,
        limit: super::refusal::disk_limit,
    },
];

impl Resource {
    fn owner(&self, key: &str) -> BudgetOwner {
        BudgetOwner(format!("{key}:{}", self.name))
    }
}

/// Returns the amounts of limited resources that an operation of a key needs.
pub(crate) fn fleet_needs(key: &str, limits: &Limits, amount: &QuotaAmount) -> Vec<LimitedNeed> {
    let needs = RESOURCES.iter().filter_map(|resource| {
        let limit = (resource.limit)(limits)?;
        let amount = (resource.amount)(amount);
        (amount > 0).then(|| LimitedNeed {
            need: BudgetNeed {
                owner: resource.owner(key),
                amount,
            },
            limit,
        })
    });
    needs.collect()
}

/// Returns the error of a budget that is exhausted in the whole fleet.
pub(crate) fn fleet_refusal(error: &BudgetExhausted, limits: &Limits) -> ApiError {
    if !error.is_known {
        let message = "the coordinator of the fleet is new, and does not know the usage of all hosts \
                       yet: retry in 12 s";
        return ApiError::fleet_unavailable(message).after(12);
    }
    let name = error.owner.0.rsplit(':').next().unwrap_or_default();
    let resource = RESOURCES.iter().find(|resource| resource.name == name);
    let Some(resource) = resource else {
        return ApiError::internal(error.to_string());
    };
    let (what, remedy) = resource.text;
    let limit = (resource.limit)(limits).unwrap_or(0);
    let message = format!(
        "this key has reached its {what} on all hosts of the fleet together ({limit}); {remedy}, or \
         raise the limit"
    );
    if resource.code == "max_disk" {
        return ApiError::out_of_disk(message);
    }
    ApiError::too_many(resource.code, message).permanent()
}

/// Shares of this member.
#[derive(Debug, Default)]
pub(super) struct FleetShares(OnceLock<Node>);

impl FleetShares {
    /// Admits an operation within the shares of this host. `before` is the usage without it.
    ///
    /// # Errors
    /// The amounts by which shares are too small.
    pub fn admit(
        &self,
        key: &str,
        limits: &Limits,
        before: QuotaAmount,
        amount: QuotaAmount,
    ) -> Result<(), Vec<LimitedNeed>> {
        let Some(node) = self.0.get() else {
            return Ok(());
        };
        let (now, shares) = (node.now(), node.shares());
        let mut shares = shares.lock();
        let mut missing = Vec::new();
        for LimitedNeed { mut need, limit } in fleet_needs(key, limits, &amount) {
            let resource = RESOURCES
                .iter()
                .find(|resource| resource.owner(key) == need.owner);
            let used = resource.map_or(0, |resource| (resource.amount)(&before));
            shares.set_in_use(now, &need.owner, used);
            if !shares.admit(now, &need.owner, need.amount) {
                let (share, used) = shares.share(&need.owner);
                // `admit` also fails if this host already reports the maximum number of owners. The
                // share may suffice then, so the missing amount is at least 1.
                need.amount = used
                    .saturating_add(need.amount)
                    .saturating_sub(share)
                    .max(1);
                missing.push(LimitedNeed { need, limit });
            }
        }
        if missing.is_empty() {
            Ok(())
        } else {
            Err(missing)
        }
    }

    /// Returns the disk space that the share of this host permits beyond the usage `before`. `None`
    /// if the key has no limit, or this host is in no fleet.
    pub fn free_disk(&self, key: &str, limits: &Limits, before: QuotaAmount) -> Option<u64> {
        let node = self.0.get()?;
        super::refusal::disk_limit(limits)?;
        let owner = BudgetOwner(format!("{key}:disk"));
        let (share, _) = node.shares().lock().share(&owner);
        Some(share.saturating_sub(before.disk_bytes))
    }

    /// Requests larger shares.
    ///
    /// # Errors
    /// An error if they cannot be granted. The flag is true if a retry may succeed at once.
    pub async fn request(
        &self,
        limits: &Limits,
        missing: Vec<LimitedNeed>,
    ) -> Result<(), (ApiError, bool)> {
        let Some(node) = self.0.get() else {
            return Ok(());
        };
        let request = ShareRequest { needs: missing };
        let Some(shares) = node.request_shares(request).await else {
            let message = "the shares of this host in the limits of the key are used up, and no \
                           coordinator is available for larger ones";
            return Err((ApiError::fleet_unavailable(message), false));
        };
        match shares.exhausted {
            None => Ok(()),
            Some(error) => {
                let may_retry = error.is_known && error.is_unused_elsewhere;
                Err((fleet_refusal(&error, limits), may_retry))
            }
        }
    }
}

impl Quota {
    /// Divides the limits of keys among the members of a fleet. `released` is notified when a
    /// sandbox no longer runs.
    pub fn join_fleet(self: &Arc<Self>, node: Node, released: Arc<Notify>) {
        // Only the first call has an effect.
        if self.fleet.0.set(node.clone()).is_ok() {
            tokio::spawn(count(Arc::downgrade(self), node, released));
        }
    }

    /// Requests the missing shares of an operation. Waits while unused shares of other hosts are
    /// recalled.
    pub(super) async fn request_shares(
        &self,
        key: &Key,
        missing: Vec<LimitedNeed>,
        deadline: Instant,
    ) -> Result<(), ApiError> {
        let limits = self.limits_of(key);
        let mut is_first = true;
        loop {
            match self.fleet.request(&limits, missing.clone()).await {
                Ok(()) => return Ok(()),
                Err((error, may_retry)) => {
                    if !(may_retry || is_first) || Instant::now() + RECALL_PAUSE >= deadline {
                        return Err(error);
                    }
                }
            }
            // Shares of sandboxes that have just ended are reported meanwhile.
            is_first = false;
            tokio::time::sleep(RECALL_PAUSE).await;
        }
    }

    /// Sends changed limits of a key to the coordinator, which recalls shares that exceed them. A
    /// failure is ignored: the next operation of the key sends the limits as well.
    pub async fn announce_limits(&self, key: &Key) {
        let limits = self.limits_of(key);
        // The amounts are zero: only the limit of each resource is sent.
        let needs = RESOURCES.iter().filter_map(|resource| {
            Some(LimitedNeed {
                need: BudgetNeed {
                    owner: resource.owner(&key.id),
                    amount: 0,
                },
                limit: (resource.limit)(&limits)?,
            })
        });
        let needs = needs.collect();
        if let Some(node) = self.fleet.0.get() {
            node.request_shares(ShareRequest { needs }).await;
        }
    }

    /// Counts the used parts of the shares of keys. With `is_full`, keys with limits but without a
    /// share are counted as well.
    fn count_shares(&self, node: &Node, shares: &SharedShares, is_full: bool) {
        let mut keys: BTreeSet<String> = {
            let shares = shares.lock();
            let owners = shares.owners().filter_map(|owner| owner.0.rsplit_once(':'));
            owners.map(|(key, _)| key.to_owned()).collect()
        };
        if is_full {
            let all = self.keys.list().unwrap_or_default();
            let limited = all.iter().filter(|key| {
                let limits = self.limits_of(key);
                RESOURCES.iter().any(|r| (r.limit)(&limits).is_some())
            });
            keys.extend(limited.map(|key| key.id.clone()));
        }
        for key in keys {
            let limits = match self.keys.in_force(&key) {
                Ok(found) => found.map(|key| self.limits_of(&key)).unwrap_or_default(),
                Err(_) => continue,
            };
            // Operations that are admitted meanwhile wait for this lock.
            let ledger = self.ledger.lock();
            let Ok(usage) = self.usage_of(&key) else {
                continue;
            };
            let used = usage.amount() + ledger.reserved(&key);
            let mut shares = shares.lock();
            for resource in &RESOURCES {
                let owner = resource.owner(&key);
                // Without a limit, the share is returned.
                let used = (resource.limit)(&limits).map_or(0, |_| (resource.amount)(&used));
                shares.set_in_use(node.now(), &owner, used);
            }
        }
        if is_full {
            // The sandboxes that former processes started are counted now.
            shares.lock().set_complete(true);
        }
    }
}

/// Counts the used parts of shares until the quotas are dropped.
async fn count(quota: Weak<Quota>, node: Node, released: Arc<Notify>) {
    let shares = node.shares();
    let (mut number, mut has_released) = (0, false);
    loop {
        let Some(strong) = quota.upgrade() else {
            return;
        };
        let node_of_host = &node;
        let (node, shares) = (node.clone(), shares.clone());
        let is_full = number % FULL_COUNT == 0;
        let counted = tokio::task::spawn_blocking(move || {
            strong.count_shares(&node, &shares, is_full);
        });
        // The task does not panic.
        let _ = counted.await;
        // The coordinator may place further sandboxes here.
        if std::mem::take(&mut has_released) {
            node_of_host.hasten_heartbeat();
        }
        tokio::time::sleep(MIN_INTERVAL).await;
        tokio::select! {
            () = released.notified() => {
                // Such a count does not advance `number`, and must not repeat the full count of the
                // start.
                number = number.max(1);
                has_released = true;
            }
            () = tokio::time::sleep(COUNT_INTERVAL) => number += 1,
        }
    }
}

impl From<(ApiError, bool)> for Denied {
    fn from((error, is_in_flight): (ApiError, bool)) -> Self {
        if is_in_flight {
            Self::InFlight(error)
        } else {
            Self::Final(error)
        }
    }
}
