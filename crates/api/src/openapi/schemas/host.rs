//! The host and its upkeep.

use super::parts::{count, flag, integer, maybe, object, text};
use crate::routes::bounds::STATES;
use jiffy_sandbox_manager::MAX_RESTART_GRACE;
use serde_json::{Value, json};

/// Bodies of waiting, restarting and pruning.
pub(super) fn pruning() -> Value {
    let kinds = ["sandbox", "snapshot", "template", "step", "image", "upload"];
    let item = object(
        &["kind", "id", "bytes"],
        json!({
            "kind": { "type": "string", "enum": kinds },
            "id": text(),
            "name": text(),
            "bytes": count(),
        }),
    );
    let body = json!({ "dryRun": flag(), "unusedSeconds": count() });
    json!({
        "RestartSandbox": maybe(object(&[], json!({
            "graceMs": maybe(integer(0, MAX_RESTART_GRACE.as_millis() as u64)),
        }))),
        "Waited": object(&["sandboxID", "state"], json!({
            "sandboxID": text(),
            "state": { "type": "string", "enum": STATES },
            "reason": text(),
            "jiffy": { "type": "object" },
        })),
        "PruneHost": maybe(object(&[], body)),
        "PrunedHost": object(&["dryRun", "bytes", "items"], json!({
            "dryRun": flag(),
            "bytes": count(),
            "items": { "type": "array", "items": item },
        })),
    })
}

/// The host, its engines, keys and warm pools.
pub(super) fn host() -> Value {
    json!({
        "Error": object(&["code", "message"], json!({
            "code": { "type": "integer", "minimum": 400, "maximum": 599 },
            "message": text(),
            "error_code": text(),
        })),
        "Health": object(&["status"], json!({ "status": { "type": "string", "enum": ["ok"] } })),
        "RevokedKey": object(&["keyID", "name", "revokedAt"], json!({
            "keyID": text(),
            "name": text(),
            "revokedAt": { "type": "string", "format": "date-time" },
            "sandboxes": count(),
            "builds": count(),
        })),
        "Host": object(&["version", "pid", "running", "warm"], json!({
            "version": text(),
            "pid": count(),
            "running": count(),
            "warm": count(),
            "network": text(),
            "memoryTotalMB": maybe(count()),
            "memoryAvailableMB": maybe(count()),
            "memoryLimitMB": maybe(count()),
            "diskTotalMB": maybe(count()),
            "diskFreeMB": maybe(count()),
            "jiffy": { "type": "object", "description": "All about the daemon, for the host's owner" },
        })),
        "Budget": object(&["keyID", "name", "limits", "used"], json!({
            "keyID": text(),
            "name": text(),
            "limits": object(&["diskBytes"], json!({
                "sandboxes": maybe(count()),
                "vcpus": maybe(count()),
                "memoryMB": maybe(count()),
                "createsPerMinute": maybe(count()),
                "paused": maybe(count()),
                "snapshots": maybe(count()),
                "templates": maybe(count()),
                "builds": maybe(count()),
                "exchanges": maybe(count()),
                "diskBytes": maybe(count()),
            })),
            "used": object(&["sandboxes", "paused", "snapshots", "diskBytes", "disk"], json!({
                "sandboxes": count(),
                "vcpus": count(),
                "memoryMB": count(),
                "paused": count(),
                "snapshots": count(),
                "templates": count(),
                "builds": count(),
                "uploads": count(),
                "exchanges": count(),
                "diskBytes": count(),
                "disk": object(
                    &["paused", "snapshots", "templates", "uploads", "buildSteps", "functions"],
                    json!({
                        "paused": count(),
                        "snapshots": count(),
                        "templates": count(),
                        "uploads": count(),
                        "buildSteps": count(),
                        "functions": count(),
                    }),
                ),
            })),
        })),
        "Engine": object(&["name", "version", "usable", "why", "default", "capabilities"], json!({
            "name": text(),
            "version": maybe(text()),
            "usable": flag(),
            "why": maybe(text()),
            "default": flag(),
            "capabilities": { "type": "object", "additionalProperties": flag() },
        })),
        "Team": object(&["teamID", "name", "apiKey", "isDefault"], json!({
            "teamID": text(),
            "name": text(),
            "slug": text(),
            "apiKey": text(),
            "isDefault": flag(),
        })),
        "Pool": object(&["templateID", "size", "ready"], json!({
            "templateID": text(),
            "size": count(),
            "ready": count(),
        })),
    })
}
