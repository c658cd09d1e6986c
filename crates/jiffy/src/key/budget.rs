//! Limits of keys for `jiffy key ls`, with their usage if a daemon runs.
//!
//! The *budget* of a key consists of its limits and their present usage.

use hyper::Method;
use jiffy_api::{Key, Limits};
use jiffy_api_types::SnapshotAck;
use jiffy_daemon::local_daemon;
use jiffy_image::Home;
use jiffy_sandbox_manager::Bytes;
use serde_json::Value;
use std::collections::HashMap;

/// Budgets of keys by key id, as returned by the daemon.
pub type Budgets = HashMap<String, Value>;

/// Limit: its name in the API, its value, and the unit for display.
type LimitRow = (&'static str, Option<u64>, &'static str);

/// Returns the budgets of `keys` from the daemon of `home`. Empty if no daemon runs. Revoked keys,
/// and keys whose request fails, are missing.
pub async fn budgets(home: &Home, keys: &[Key]) -> Budgets {
    let mut budgets = Budgets::new();
    let Some(stream) = local_daemon::connect(home).await else {
        return budgets;
    };
    let Ok(client) = jiffy_daemon::local_daemon::client_over(home, stream).await else {
        return budgets;
    };
    for key in keys.iter().filter(|key| key.revoked_ms.is_none()) {
        let path = format!("/limits?key={}", key.id);
        // A failed request is ignored: the key is then shown with its limits only.
        if let Ok(budget) = client.call::<Value>(Method::GET, &path, &()).await {
            budgets.insert(key.id.clone(), budget);
        }
    }
    budgets
}

/// Formats limits with their usage if it is known, for example `2/5 sandboxes`.
pub fn limits_text(limits: &Limits, budget: Option<&Value>) -> String {
    let widen = |limit: Option<u32>| limit.map(u64::from);
    let all: [LimitRow; 9] = [
        ("sandboxes", widen(limits.max_sandboxes), " sandboxes"),
        ("vcpus", widen(limits.max_vcpus), " vCPUs"),
        ("memoryMB", widen(limits.max_memory_mib), " MiB"),
        (
            "createsPerMinute",
            widen(limits.creates_per_minute),
            " creates/min",
        ),
        ("paused", widen(limits.max_paused), " paused"),
        ("snapshots", widen(limits.max_snapshots), " snapshots"),
        ("templates", widen(limits.max_templates), " templates"),
        ("builds", widen(limits.max_builds), " builds"),
        ("exchanges", widen(limits.max_exchanges), " exchanges"),
    ];
    let used = |name: &str| budget.and_then(|b| b["used"][name].as_u64());
    let set = all.iter().filter_map(|(name, limit, unit)| {
        match (
            used(name).filter(|used| *used > 0 || limit.is_some()),
            limit,
        ) {
            (Some(used), Some(limit)) => Some(format!("{used}/{limit}{unit}")),
            // A resource without a limit is shown only if it is in use.
            (Some(used), None) => Some(format!("{used}{unit}")),
            (None, limit) => limit.map(|limit| format!("{limit}{unit}")),
        }
    });
    let mut set: Vec<String> = set.collect();
    // A key without its own disk quota may have the default quota, which only the daemon knows.
    let in_force = budget.and_then(|b| b["limits"]["diskBytes"].as_u64());
    let own = limits.max_disk_mib.map(|mib| mib.saturating_mul(1 << 20));
    let disk = match (used("diskBytes"), in_force.or(own)) {
        (Some(used), Some(limit)) => Some(format!("{}/{} disk", Bytes(used), Bytes(limit))),
        (Some(used), None) if used > 0 => Some(format!("{} disk", Bytes(used))),
        (_, limit) => limit.map(|limit| format!("{} disk", Bytes(limit))),
    };
    set.extend(disk);
    let idle = limits.idle_timeout_s.filter(|seconds| *seconds > 0);
    set.extend(idle.map(|seconds| format!("paused after {seconds} s without use")));
    let is_captured = limits.snapshot_ack == Some(SnapshotAck::Captured);
    set.extend(is_captured.then(|| "snapshots answered when captured".to_owned()));
    if set.is_empty() {
        "none".to_owned()
    } else {
        set.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn limits_are_shown_with_their_usage_if_it_is_known() {
        let limits = Limits {
            max_sandboxes: Some(5),
            max_disk_mib: Some(1024),
            ..Limits::default()
        };
        assert_eq!(limits_text(&limits, None), "5 sandboxes, 1.0 GiB disk");
        assert_eq!(limits_text(&Limits::default(), None), "none");
        let idle = |idle_timeout_s| Limits {
            idle_timeout_s,
            ..Limits::default()
        };
        let text = limits_text(&idle(Some(600)), None);
        assert_eq!(text, "paused after 600 s without use");
        assert_eq!(limits_text(&idle(Some(0)), None), "none");
        let captured = Limits {
            snapshot_ack: Some(SnapshotAck::Captured),
            ..Limits::default()
        };
        let text = limits_text(&captured, None);
        assert_eq!(text, "snapshots answered when captured");
        let budget = json!({
            "limits": { "diskBytes": 1u64 << 30 },
            "used": { "sandboxes": 0, "snapshots": 3, "paused": 0, "diskBytes": 1 << 20 },
        });
        assert_eq!(
            limits_text(&limits, Some(&budget)),
            "0/5 sandboxes, 3 snapshots, 1.0 MiB/1.0 GiB disk"
        );
        let budget = json!({ "limits": { "diskBytes": null }, "used": { "diskBytes": 0 } });
        assert_eq!(limits_text(&Limits::default(), Some(&budget)), "none");
    }
}
