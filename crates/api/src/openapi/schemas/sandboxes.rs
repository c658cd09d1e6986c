//! Sandboxes and snapshots.

use super::parts::{count, flag, integer, joined, maybe, moment, object, text};
use crate::network;
use crate::openapi::reference::schema;
use crate::routes::bounds::STATES;
use jiffy_sandbox_manager::StoreState;
use serde_json::{Value, json};

/// Properties that Jiffy adds to a sandbox.
fn ours() -> Value {
    json!({
        "name": text(),
        "forkedFrom": text(),
        "snapshotID": text(),
        "bootMode": { "type": "string", "enum": ["cold", "snapshot", "warm-pool", "fork"] },
        "engine": text(),
        "bootMs": { "type": "number", "minimum": 0 },
        "storeState": store_state(),
        "jiffy": { "type": "object", "description": "The whole record; with secrets for the host's owner only" },
    })
}

/// State of a snapshot in the store that hosts share.
fn store_state() -> Value {
    let states = StoreState::ALL.map(StoreState::name);
    json!({
        "type": "string", "enum": states,
        "description": "State of the snapshot, or of the one that the sandbox sleeps in, in the store that hosts share; absent without a store",
    })
}

/// Sandboxes and snapshots.
pub(super) fn sandboxes() -> Value {
    const LISTED: [&str; 10] = [
        "templateID",
        "sandboxID",
        "clientID",
        "startedAt",
        "endAt",
        "cpuCount",
        "memoryMB",
        "diskSizeMB",
        "state",
        "envdVersion",
    ];
    let listed = || {
        joined(
            ours(),
            json!({
                "templateID": text(),
                "sandboxID": text(),
                "clientID": text(),
                "alias": text(),
                "startedAt": moment(),
                "endAt": moment(),
                "cpuCount": count(),
                "memoryMB": count(),
                "diskSizeMB": count(),
                "state": { "type": "string", "enum": STATES },
                "envdVersion": text(),
                "metadata": { "type": "object", "additionalProperties": text() },
                "volumeMounts": { "type": "array" },
            }),
        )
    };
    let strings = json!({ "type": "array", "items": text() });
    json!({
        "Sandbox": object(&["templateID", "sandboxID", "clientID", "envdVersion"], joined(ours(), json!({
            "templateID": text(),
            "sandboxID": text(),
            "clientID": text(),
            "envdVersion": text(),
            "alias": text(),
            "envdAccessToken": text(),
            "trafficAccessToken": maybe(text()),
            "domain": maybe(text()),
        }))),
        "ListedSandbox": object(&LISTED, listed()),
        "SandboxDetail": object(&LISTED, joined(listed(), json!({
            "envdAccessToken": text(),
            "domain": maybe(text()),
            "allowInternetAccess": maybe(flag()),
            "network": object(&["allowOut", "denyOut", "dnsServers", "allowPublicTraffic"], json!({
                "allowOut": strings,
                "denyOut": strings,
                "dnsServers": strings,
                "egressMbps": integer(1, u64::from(network::MAX_MBPS)),
                "allowPublicTraffic": flag(),
                "maskRequestHost": text(),
            })),
            "lifecycle": object(&["onTimeout", "autoResume"], json!({
                "onTimeout": { "type": "string", "enum": ["kill", "pause"] },
                "autoResume": flag(),
            })),
            "pauseMode": { "type": "string", "enum": ["full", "filesystem"] },
            "diskFailure": text(),
        }))),
        "Forked": object(&["snapshotID"], json!({
            "snapshotID": text(),
            "sandbox": schema("Sandbox"),
            "error": schema("Error"),
        })),
        "Promoted": object(&["sandboxID", "removed"], json!({
            "sandboxID": text(),
            "removed": strings,
            "jiffy": { "type": "array" },
        })),
        "RolledBack": object(&["sandboxID", "snapshotID", "operationID", "status"], json!({
            "sandboxID": text(),
            "snapshotID": text(),
            "operationID": text(),
            "status": { "type": "string", "enum": ["completed"] },
            "bootMs": { "type": "number", "minimum": 0 },
            "jiffy": { "type": "object" },
        })),
        "Snapshot": object(&["snapshotID", "names", "status", "createdAt"], json!({
            "snapshotID": text(),
            "names": strings,
            "status": { "type": "string", "enum": ["storing", "ready"] },
            "originSandboxID": text(),
            "templateID": text(),
            "parentSnapshotID": text(),
            "purpose": { "type": "string", "enum": ["template", "asked", "fork", "pause", "step"] },
            "cpuCount": count(),
            "memoryMB": count(),
            "diskSizeMB": count(),
            "createdAt": moment(),
            "updatedAt": moment(),
            "stoppedMs": { "type": "number", "minimum": 0 },
            "totalMs": { "type": "number", "minimum": 0 },
            "storeState": store_state(),
            "jiffy": { "type": "object" },
        })),
    })
}
