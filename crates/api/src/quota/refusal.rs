//! Compares a request with the limits of its key. An error states the usage, the limit and the
//! remedy.
//!
//! The *floor* of a request is the minimum disk space with which its operation can start.

use super::KeyUsage;
use crate::error::{ApiError, HOST_BUSY, INTERNAL};
use crate::keys::Limits;
use jiffy_sandbox_manager::{Bytes, QuotaAmount, QuotaRefusal, QuotaRequest};

/// While other requests are in flight, a request may start once this fraction (1/n) of its maximum
/// demand is free.
const MINIMUM_SHARE_DIVISOR: u64 = 4;
const KILL_OR_PAUSE: &str = "kill or pause a sandbox";

/// Returns the maximum disk space in bytes.
pub(super) fn disk_limit(limits: &Limits) -> Option<u64> {
    let mib = limits.max_disk_mib?;
    Some(mib.saturating_mul(1 << 20))
}

/// Returns an error if `request` exceeds a limit in addition to `now`: the usage, with or without
/// the reservations of requests in flight. `usage` is for the message only.
pub(super) fn check(
    limits: &Limits,
    usage: &KeyUsage,
    now: QuotaAmount,
    request: &QuotaRequest,
) -> Option<ApiError> {
    let requested = request.amount;
    let counts = [
        (
            "max_sandboxes",
            "running sandboxes",
            limits.max_sandboxes,
            (now.sandboxes, requested.sandboxes),
            KILL_OR_PAUSE,
        ),
        (
            "max_vcpus",
            "vCPUs",
            limits.max_vcpus,
            (now.vcpus, requested.vcpus),
            KILL_OR_PAUSE,
        ),
        (
            "max_memory",
            "MiB of memory",
            limits.max_memory_mib,
            (now.memory_mib, requested.memory_mib),
            KILL_OR_PAUSE,
        ),
        (
            "max_paused",
            "sandboxes that are paused or will be paused at their timeout",
            limits.max_paused,
            (now.paused, requested.paused),
            "kill or resume a paused sandbox",
        ),
        (
            "max_snapshots",
            "snapshots",
            limits.max_snapshots,
            (now.snapshots, requested.snapshots),
            "remove a snapshot (`DELETE /templates/{snapshotID}`)",
        ),
        (
            "max_templates",
            "templates, counted by tag",
            limits.max_templates,
            (now.templates, requested.templates),
            "remove a template (`DELETE /templates/{templateID}`) or a tag (`DELETE /templates/tags`)",
        ),
        (
            "max_builds",
            "queued or running builds",
            limits.max_builds,
            (now.builds, requested.builds),
            "wait until a build finishes, or cancel a build",
        ),
    ];
    for (code, what, limit, (used, requested), remedy) in counts {
        let Some(limit) = limit.map(u64::from) else {
            continue;
        };
        // A limit may have been lowered below the usage. Requests for other resources still
        // succeed.
        if requested > 0 && used.saturating_add(requested) > limit {
            let kind = match code {
                "max_snapshots" | "max_templates" => "maximum number of",
                // E2B clients match these words and wait.
                _ => "maximum number of concurrent",
            };
            let message = format!(
                "this key has reached its {kind} {what} ({used} of {limit}); {remedy}, or raise the \
                 limit"
            );
            // A retry without a remedy fails again.
            return Some(ApiError::too_many(code, message).permanent());
        }
    }
    // A key without a disk limit has passed all checks.
    let limit = disk_limit(limits)?;
    let minimum = request.disk_floor.unwrap_or(requested.disk_bytes);
    let minimum = minimum.min(requested.disk_bytes);
    let is_exceeded = minimum > 0 && now.disk_bytes.saturating_add(minimum) > limit;
    is_exceeded.then(|| out_of_disk(limit, usage, now, minimum))
}

/// Returns an error if the host's disk lacks space for `request`. `left` is the number of bytes
/// that are neither used nor reserved. Requests in flight have reserved `in_flight` bytes, most of
/// which they will release.
pub(super) fn check_host_disk(
    left: u64,
    in_flight: u64,
    request: &QuotaRequest,
) -> Option<ApiError> {
    let requested = request.amount.disk_bytes;
    // Without requests in flight, waiting does not help: start with the minimum of the request.
    let minimum = match in_flight {
        0 => request.disk_floor.unwrap_or(requested).min(requested),
        _ => requested,
    };
    (minimum > left).then(|| {
        ApiError::host_busy(format!(
            "the disk of this host has {} available beyond the reservations of its sandboxes; the request requires {}",
            Bytes(left),
            Bytes(minimum)
        ))
    })
}

/// Returns whether a request should wait for requests in flight instead of starting with the little
/// disk space that is left. Requests in flight release most of their reservation.
pub(super) fn is_below_minimum_share(
    limit: u64,
    now: QuotaAmount,
    in_flight: QuotaAmount,
    request: &QuotaRequest,
) -> bool {
    let left = limit.saturating_sub(now.disk_bytes);
    let minimum_share = request.amount.disk_bytes / MINIMUM_SHARE_DIVISOR;
    request.disk_floor.is_some() && in_flight.disk_bytes > 0 && left < minimum_share
}

/// Returns the error for an exceeded disk quota, with the usage by type of resource.
pub(super) fn out_of_disk(
    limit: u64,
    usage: &KeyUsage,
    now: QuotaAmount,
    minimum: u64,
) -> ApiError {
    let used = usage.amount().disk_bytes;
    let parts = usage.disk().into_iter().filter(|(_, bytes)| *bytes > 0);
    let mut parts: Vec<String> = parts
        .map(|(what, bytes)| format!("{what} {}", Bytes(bytes)))
        .collect();
    let reserved = now.disk_bytes.saturating_sub(used);
    if reserved > 0 {
        parts.push(format!("in flight {}", Bytes(reserved)));
    }
    let parts = if parts.is_empty() {
        String::new()
    } else {
        format!(" ({})", parts.join(", "))
    };
    ApiError::out_of_disk(format!(
        "disk quota exceeded: this key uses {} of {}{parts} and needs {} more; remove snapshots, \
         volumes, templates (`DELETE /templates/{{id}}`) or paused sandboxes, prune build data \
         (`POST /templates/prune`), or raise the limit",
        Bytes(now.disk_bytes),
        Bytes(limit),
        Bytes(minimum),
    ))
}

impl ApiError {
    /// Converts the error to the type used by operations.
    pub(super) fn quota(self) -> QuotaRefusal {
        QuotaRefusal {
            code: self.error_code,
            of_disk: self.is_out_of_disk(),
            message: self.message,
        }
    }
}

impl From<QuotaRefusal> for ApiError {
    fn from(refusal: QuotaRefusal) -> Self {
        match refusal.code {
            _ if refusal.of_disk => Self::out_of_disk(refusal.message),
            HOST_BUSY => Self::host_busy(refusal.message),
            INTERNAL => Self::internal(refusal.message),
            code => Self::too_many(code, refusal.message).permanent(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(disk_bytes: u64, disk_floor: Option<u64>) -> QuotaRequest {
        QuotaRequest {
            amount: QuotaAmount {
                disk_bytes,
                ..QuotaAmount::default()
            },
            disk_floor,
        }
    }

    #[test]
    fn disk_space_is_refused_from_the_first_byte_too_many() {
        let limits = Limits {
            max_disk_mib: Some(1),
            ..Limits::default()
        };
        let mut usage = KeyUsage::default();
        usage.host.snapshot_bytes = (1 << 20) - 10;
        let now = usage.amount();
        let ask = |bytes, floor| check(&limits, &usage, now, &request(bytes, floor));
        assert!(ask(10, None).is_none());
        let refused = ask(11, None).unwrap();
        assert!(refused.is_out_of_disk());
        assert!(
            refused.message.contains("snapshots 1024.0 KiB"),
            "{}",
            refused.message
        );
        assert!(ask(1 << 30, Some(10)).is_none(), "the floor fits");
        assert!(ask(1 << 30, Some(11)).is_some());
        assert!(
            ask(5, Some(11)).is_none(),
            "the floor is at most the amount"
        );
    }

    #[test]
    fn an_exceeded_limit_refuses_only_requests_for_its_resource() {
        let limits = Limits {
            max_snapshots: Some(0),
            max_disk_mib: Some(0),
            ..Limits::default()
        };
        let mut usage = KeyUsage::default();
        usage.host.snapshots = 3;
        usage.host.snapshot_bytes = 5;
        let nothing = QuotaRequest::default();
        assert!(check(&limits, &usage, usage.amount(), &nothing).is_none());
        let mut one = nothing;
        one.amount.snapshots = 1;
        let refused = check(&limits, &usage, usage.amount(), &one).unwrap();
        assert_eq!(refused.error_code, "max_snapshots");
        assert!(
            refused
                .message
                .contains("maximum number of snapshots (3 of 0)")
        );
    }
}
