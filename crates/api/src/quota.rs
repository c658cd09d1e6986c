//! Quotas of keys: their usage, and reservations within their limits.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream. A *permit*
//! counts towards a limit until it is dropped. In a fleet, each host has a *share* of each limit of
//! a key, and admits operations within its share. The *floor* of a request is the minimum disk
//! space with which its operation can start.
//!
//! An operation reserves the resources that it may need before it starts. The reservation is
//! released after the resources are counted as used, so that concurrent operations cannot exceed a
//! limit together.

mod figures;
mod fleet;
mod ledger;
mod refusal;
mod reservations;
mod sources;
mod usage;

pub(crate) use fleet::{fleet_needs, fleet_refusal};
pub(crate) use usage::KeyUsage;

use crate::error::ApiError;
use crate::keys::{Key, Keys, Limits, Scope};
use fleet::FleetShares;
use jiffy_engine_api::SandboxSize;
use jiffy_fleet::node::LimitedNeed;
use jiffy_sandbox_manager::{
    DiskLimit, OwnerQuota, OwnerUsage, QuotaAmount, QuotaHold, QuotaPermit, QuotaRefusal,
    QuotaRequest, Reserving, Sandboxes,
};
use jiffy_template_builder::BuildUsage;
use ledger::Ledger;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Maximum time for which a request at a limit waits. Requests in flight may release part of their
/// reservation meanwhile.
pub(crate) const BUDGET_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which the exchange limit of a key is cached. Without the cache, every request to a
/// sandbox would read the key.
const LIMIT_CACHE_AGE: Duration = Duration::from_secs(1);

type HostSource = Box<dyn Fn(&str) -> OwnerUsage + Send + Sync>;
type ByteSource = Box<dyn Fn(&str) -> u64 + Send + Sync>;
type DiskSource = Box<dyn Fn() -> Option<u64> + Send + Sync>;
type BuildSource = Box<dyn Fn(&str) -> Result<BuildUsage, String> + Send + Sync>;
type VolumeSource = Box<dyn Fn(&str) -> Result<u64, String> + Send + Sync>;

/// Returns the resources that `count` running sandboxes of `size` require.
pub(crate) fn running(size: SandboxSize, count: usize) -> QuotaAmount {
    let count = count as u64;
    QuotaAmount {
        sandboxes: count,
        vcpus: count * u64::from(size.vcpus),
        memory_mib: count * u64::from(size.memory_mib),
        ..QuotaAmount::default()
    }
}

/// Quotas of all keys. The sources `host`, `builds`, `function_bytes` and `volume_bytes` return the
/// usage of a key. All sources except `host` are set after the creation of this value, and count as
/// 0 until then.
pub(crate) struct Quota {
    keys: Arc<Keys>,
    /// Disk budget in MiB of keys with the scope `create` that have no limit of their own.
    default_disk_mib: Option<u64>,
    host: HostSource,
    /// Returns the bytes that may be written to the host's disk in addition to the space reserved
    /// for guests. `None` if the free space is unknown.
    writable_disk_bytes: DiskSource,
    builds: OnceLock<BuildSource>,
    function_bytes: OnceLock<ByteSource>,
    volume_bytes: OnceLock<VolumeSource>,
    ledger: Mutex<Ledger>,
    /// Notified when a reservation is released.
    changed: Notify,
    /// Number of exchanges (requests and streams to sandboxes) in flight, by key.
    exchanges: Mutex<HashMap<String, u64>>,
    /// Maximum number of exchanges of a key without a limit of its own.
    exchange_share: OnceLock<u64>,
    /// Cached limits of exchanges, with the time of reading.
    exchange_limits: Mutex<HashMap<String, (Instant, u64)>>,
    /// Shares of this host in the limits of a fleet.
    fleet: FleetShares,
}

/// Reason for which a reservation was denied.
enum Denied {
    /// Waiting does not help.
    Final(ApiError),
    /// Only requests in flight exceed the limit, so that waiting may help.
    InFlight(ApiError),
    /// The shares of this host in the limits of a fleet are too small.
    Shares(Vec<LimitedNeed>),
}

impl Denied {
    /// Returns the error for a caller that cannot wait.
    fn error(self) -> ApiError {
        match self {
            Self::Final(error) | Self::InFlight(error) => error,
            Self::Shares(_) => ApiError::host_busy(
                "the share of this host in a limit of the key is used up, and was requested to grow: \
                 retry",
            ),
        }
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quota")
            .field("ledger", &self.ledger)
            .finish_non_exhaustive()
    }
}

/// Reservation of a part of a key's quota. Dropping this value releases the reservation.
#[derive(Debug)]
struct QuotaReservation {
    quota: Arc<Quota>,
    key: Key,
    amount: QuotaAmount,
    disk_limit: DiskLimit,
}

impl Drop for QuotaReservation {
    fn drop(&mut self) {
        self.quota.ledger.lock().release(&self.key.id, self.amount);
        // Wake all waiting requests: each of them may now fit.
        self.quota.changed.notify_waiters();
    }
}

impl QuotaHold for QuotaReservation {
    fn disk_bytes(&self) -> u64 {
        self.amount.disk_bytes
    }

    fn disk_limit(&self) -> DiskLimit {
        self.disk_limit
    }

    fn grow(&mut self, bytes: u64) -> Result<(), QuotaRefusal> {
        let more = QuotaAmount {
            disk_bytes: bytes,
            ..QuotaAmount::default()
        };
        let request = QuotaRequest {
            amount: more,
            disk_floor: None,
        };
        // Without a floor, the whole amount is granted, so the granted amount is not needed.
        let granted = self.quota.grant(&self.key, request, None);
        granted.map_err(|denied| denied.error().quota())?;
        self.amount = self.amount + more;
        Ok(())
    }
}

/// Exchange (request or stream to a sandbox) in flight. Dropping this value ends the exchange.
#[derive(Debug)]
pub struct ExchangePermit {
    quota: Arc<Quota>,
    owner: String,
}

impl Drop for ExchangePermit {
    fn drop(&mut self) {
        let mut exchanges = self.quota.exchanges.lock();
        if let Some(count) = exchanges.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                exchanges.remove(&self.owner);
            }
        }
    }
}

impl Quota {
    /// Creates the quotas of `keys` and installs them in `sandboxes`.
    pub fn new(sandboxes: &Sandboxes, keys: Arc<Keys>, default_disk_mib: Option<u64>) -> Arc<Self> {
        // `sandboxes` owns the quota, so a strong reference in this direction would leak both.
        let weak = sandboxes.downgrade();
        let host = move |owner: &str| {
            let sandboxes = weak.upgrade();
            sandboxes.map_or_else(OwnerUsage::default, |s| s.budgets().usage(owner))
        };
        let weak = sandboxes.downgrade();
        let writable_disk_bytes = move || weak.upgrade()?.figures().writable_disk_bytes();
        let quota = Arc::new(Self {
            keys,
            default_disk_mib,
            host: Box::new(host),
            writable_disk_bytes: Box::new(writable_disk_bytes),
            builds: OnceLock::new(),
            function_bytes: OnceLock::new(),
            volume_bytes: OnceLock::new(),
            ledger: Mutex::default(),
            changed: Notify::new(),
            exchanges: Mutex::default(),
            exchange_share: OnceLock::new(),
            exchange_limits: Mutex::default(),
            fleet: FleetShares::default(),
        });
        sandboxes.budgets().limit(Arc::new(Budgets(quota.clone())));
        quota
    }

    /// Limits the exchanges of keys without a limit of their own.
    pub fn share_exchanges(&self, limit: u64) {
        // Only the first call has an effect.
        let _ = self.exchange_share.set(limit);
    }

    /// Returns the limits in force for a key.
    pub fn limits_of(&self, key: &Key) -> Limits {
        let mut limits = key.limits;
        if limits.max_disk_mib.is_none() && key.scope == Scope::Create {
            limits.max_disk_mib = self.default_disk_mib;
        }
        limits
    }

    /// Returns the maximum number of exchanges of a key: its own limit, or the default of this
    /// host.
    pub fn max_exchanges(&self, key: &Key) -> Option<u64> {
        let own = key.limits.max_exchanges.map(u64::from);
        own.or_else(|| self.exchange_share.get().copied())
    }

    /// Returns the usage of a key.
    pub fn usage_of(&self, key: &str) -> Result<KeyUsage, ApiError> {
        let builds = self.builds.get().map(|source| source(key));
        let builds = builds.transpose().map_err(ApiError::internal)?;
        let volumes = self.volume_bytes.get().map(|source| source(key));
        let volumes = volumes.transpose().map_err(ApiError::internal)?;
        let exchanges = self.exchanges.lock().get(key).copied();
        Ok(KeyUsage {
            host: (self.host)(key),
            builds: builds.unwrap_or_default(),
            function_bytes: self.function_bytes.get().map_or(0, |bytes| bytes(key)),
            volume_bytes: volumes.unwrap_or_default(),
            exchanges: exchanges.unwrap_or(0),
        })
    }

    /// Reserves resources within the limits of `key`. `new` is the number of sandboxes that count
    /// towards the key's creates per minute.
    pub async fn reserve(
        self: &Arc<Self>,
        key: &Key,
        request: QuotaRequest,
        new: Option<usize>,
    ) -> Result<QuotaPermit, ApiError> {
        let deadline = Instant::now() + BUDGET_TIMEOUT;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Register for the notification before the attempt, so that no release after the
            // attempt is missed.
            changed.as_mut().enable();
            match self.try_reserve(key, request, new) {
                Ok(permit) => return Ok(permit),
                Err(Denied::Final(refusal)) => return Err(refusal),
                Err(Denied::Shares(missing)) => {
                    let grown = self.request_shares(key, missing, deadline).await;
                    match grown {
                        Ok(()) if Instant::now() < deadline => {}
                        Ok(()) => return Err(Denied::Shares(Vec::new()).error()),
                        // The share of this host may suffice for the floor.
                        Err(error) => {
                            let permit = self.try_reserve_minimum(key, request, new);
                            return permit.map_err(|_| error);
                        }
                    }
                }
                // Requests in flight may fail and release their reservation. Their resources may
                // also be counted twice for a moment: as reserved and as used.
                Err(Denied::InFlight(refusal)) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if tokio::time::timeout(left, changed).await.is_err() {
                        return Err(refusal);
                    }
                }
            }
        }
    }

    /// Reserves without waiting.
    fn try_reserve(
        self: &Arc<Self>,
        key: &Key,
        request: QuotaRequest,
        new: Option<usize>,
    ) -> Result<QuotaPermit, Denied> {
        let granted = self.grant(key, request, new)?;
        Ok(self.permit(key, granted))
    }

    /// Reserves the disk space that the share of this host permits, down to the request's floor.
    fn try_reserve_minimum(
        self: &Arc<Self>,
        key: &Key,
        mut request: QuotaRequest,
        new: Option<usize>,
    ) -> Result<QuotaPermit, Denied> {
        if let Some(floor) = request.disk_floor {
            let limits = self.limits_of(key);
            let usage = self.usage_of(&key.id).map_err(Denied::Final)?;
            let before = usage.amount() + self.ledger.lock().reserved(&key.id);
            if let Some(free) = self.fleet.free_disk(&key.id, &limits, before) {
                let amount = request.amount.disk_bytes;
                request.amount.disk_bytes = amount.min(free.max(floor));
            }
        }
        self.try_reserve(key, request, new)
    }

    /// Permit for an amount that the caller has already counted. Dropping the permit returns the
    /// amount.
    fn permit(
        self: &Arc<Self>,
        key: &Key,
        (amount, disk_limit): (QuotaAmount, DiskLimit),
    ) -> QuotaPermit {
        QuotaPermit::held(QuotaReservation {
            quota: self.clone(),
            key: key.clone(),
            amount,
            disk_limit,
        })
    }

    /// Records a reservation for `request` in the ledger, which has the reservations of requests in
    /// flight. Disk space may be reserved partially, down to the request's floor. Returns the
    /// reserved amount and the limit that bounds its disk space.
    fn grant(
        &self,
        key: &Key,
        request: QuotaRequest,
        new: Option<usize>,
    ) -> Result<(QuotaAmount, DiskLimit), Denied> {
        let limits = self.limits_of(key);
        let mut ledger = self.ledger.lock();
        // Read the usage under the lock. The resources of a request are counted as used before its
        // reservation is released, so they are in `used`, in `reserved` or in both.
        let usage = self.usage_of(&key.id).map_err(Denied::Final)?;
        let used = usage.amount();
        let reserved = ledger.reserved(&key.id);
        let check = |in_flight: QuotaAmount| {
            let now = used + in_flight;
            refusal::check(&limits, &usage, now, &request)
        };
        // Check without the reservations of other requests first: if the usage alone exceeds a
        // limit, waiting is useless.
        if let Some(refusal) = check(QuotaAmount::default()) {
            return Err(Denied::Final(refusal));
        }
        // The limit is exceeded only together with requests in flight, so waiting may help.
        if let Some(refusal) = check(reserved) {
            return Err(Denied::InFlight(refusal));
        }
        if let Some(limit) = refusal::disk_limit(&limits)
            && refusal::is_below_minimum_share(limit, used + reserved, reserved, &request)
        {
            let refusal =
                refusal::out_of_disk(limit, &usage, used + reserved, request.amount.disk_bytes);
            return Err(Denied::InFlight(refusal));
        }
        let mut amount = request.amount;
        if amount.disk_bytes > 0
            && let Some(left) = (self.writable_disk_bytes)()
        {
            // `left` excludes the space that is reserved for guests, because guests take precedence
            // over the quota of a key. Here the space for requests in flight is subtracted as well.
            let in_flight = ledger.all_disk_bytes();
            let left = left.saturating_sub(in_flight);
            if let Some(refusal) = refusal::check_host_disk(left, in_flight, &request) {
                return Err((refusal, in_flight > 0).into());
            }
            amount.disk_bytes = amount.disk_bytes.min(left);
        }
        let mut disk_limit = DiskLimit::Host;
        if let Some(limit) = refusal::disk_limit(&limits) {
            let left = limit.saturating_sub((used + reserved).disk_bytes);
            // The key's remaining quota is at most the request and the free space of the host.
            if left <= amount.disk_bytes {
                (amount.disk_bytes, disk_limit) = (left, DiskLimit::Key);
            }
        }
        let shares = self.fleet.admit(&key.id, &limits, used + reserved, amount);
        shares.map_err(Denied::Shares)?;
        // The last check, because it records the creates: a request that is rejected must not
        // count.
        if let Some(count) = new {
            ledger.count_creates(key, count).map_err(Denied::Final)?;
        }
        ledger.reserve(&key.id, amount);
        Ok((amount, disk_limit))
    }

    /// Counts a request or stream to a sandbox of `owner` until the permit is dropped.
    pub fn exchange(self: &Arc<Self>, owner: &str) -> Result<ExchangePermit, ApiError> {
        let limit = self.exchange_limit(owner)?;
        let mut exchanges = self.exchanges.lock();
        let count = exchanges.entry(owner.to_owned()).or_default();
        if *count >= limit {
            // If the limit is 0, this call has created the entry, and must remove it again.
            let none = *count == 0;
            if none {
                exchanges.remove(owner);
            }
            let message = format!(
                "this key has reached its maximum of {limit} concurrent requests and streams to sandboxes: close some"
            );
            return Err(ApiError::too_many("max_exchanges", message).after(1));
        }
        *count += 1;
        drop(exchanges);
        Ok(ExchangePermit {
            quota: self.clone(),
            owner: owner.to_owned(),
        })
    }

    /// Returns the maximum number of exchanges of a key, cached for [`LIMIT_CACHE_AGE`].
    fn exchange_limit(&self, owner: &str) -> Result<u64, ApiError> {
        let now = Instant::now();
        if let Some((at, limit)) = self.exchange_limits.lock().get(owner)
            && now.duration_since(*at) < LIMIT_CACHE_AGE
        {
            return Ok(*limit);
        }
        let key = self.keys.in_force(owner);
        let key = key.map_err(|e| ApiError::internal(e.to_string()))?;
        let own = key.and_then(|key| key.limits.max_exchanges).map(u64::from);
        // Without a default, only keys with limits of their own are limited.
        let share = self.exchange_share.get().copied().unwrap_or(u64::MAX);
        let limit = own.unwrap_or(share);
        let mut limits = self.exchange_limits.lock();
        // Expired entries would accumulate otherwise.
        limits.retain(|_, (at, _)| now.duration_since(*at) < LIMIT_CACHE_AGE);
        limits.insert(owner.to_owned(), (now, limit));
        Ok(limit)
    }
}

/// Adapter of the quotas for operations on sandboxes and templates.
struct Budgets(Arc<Quota>);

impl Budgets {
    /// Returns the key, unless it was revoked. Operations on the sandboxes of a revoked key have no
    /// limits, because that key can no longer request any.
    fn key(&self, owner: &str) -> Result<Option<Key>, QuotaRefusal> {
        self.0.keys.in_force(owner).map_err(|e| {
            tracing::error!(key = owner, error = %e, "cannot read an API key");
            ApiError::internal(
                "internal error of the host; see the log of the daemon for the cause",
            )
            .quota()
        })
    }
}

impl OwnerQuota for Budgets {
    fn reserve<'a>(&'a self, owner: &'a str, request: QuotaRequest) -> Reserving<'a> {
        Box::pin(async move {
            match self.key(owner)? {
                Some(key) => {
                    let permit = self.0.reserve(&key, request, None).await;
                    permit.map_err(|refusal| refusal.quota())
                }
                None => Ok(QuotaPermit::unlimited()),
            }
        })
    }

    fn try_reserve(&self, owner: &str, request: QuotaRequest) -> Result<QuotaPermit, QuotaRefusal> {
        match self.key(owner)? {
            Some(key) => {
                let permit = self.0.try_reserve(&key, request, None);
                permit.map_err(|denied| denied.error().quota())
            }
            None => Ok(QuotaPermit::unlimited()),
        }
    }
}
