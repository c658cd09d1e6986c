//! Templates and their builds.

use super::parts::{count, flag, integer, log_entries, memory_of_template, moment, object, text};
use jiffy_engine_api::SandboxSize;
use serde_json::{Value, json};

/// Templates and their builds.
pub(super) fn templates() -> Value {
    let entries = log_entries();
    let strings = json!({ "type": "array", "items": text() });
    json!({
        "Template": object(&[
            "templateID", "buildID", "cpuCount", "memoryMB", "diskSizeMB", "public", "aliases",
            "names", "createdAt", "updatedAt", "createdBy", "lastSpawnedAt", "spawnCount",
            "buildCount", "envdVersion", "buildStatus",
        ], json!({
            "templateID": text(),
            "buildID": { "type": "string", "format": "uuid" },
            "cpuCount": count(),
            "memoryMB": count(),
            "diskSizeMB": count(),
            "public": flag(),
            "aliases": strings,
            "names": strings,
            "createdAt": moment(),
            "updatedAt": moment(),
            "createdBy": { "type": "null" },
            "lastSpawnedAt": { "type": "null" },
            "spawnCount": count(),
            "buildCount": count(),
            "envdVersion": text(),
            "buildStatus": { "type": "string", "enum": ["ready"] },
            "builds": { "type": "array" },
        })),
        "Alias": object(&["templateID", "public"], json!({ "templateID": text(), "public": flag() })),
        "Tag": object(&["tag", "buildID", "createdAt"], json!({
            "tag": text(),
            "buildID": text(),
            "createdAt": moment(),
        })),
        "BuildStatus": object(&["templateID", "buildID", "status", "logs", "logEntries"], json!({
            "templateID": text(),
            "buildID": text(),
            "status": { "type": "string", "enum": ["waiting", "building", "ready", "error"] },
            "logs": strings,
            "logEntries": entries,
            "reason": object(&["message"], json!({ "message": text(), "step": text() })),
            "progress": object(&["text", "percent"], json!({ "text": text(), "percent": integer(0, 100) })),
        })),
        "NewTemplate": object(&["name"], json!({
            "name": { "type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,62})?$" },
            "alias": text(),
            "tags": {
                "type": "array", "maxItems": 99,
                "items": { "type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$" },
            },
            "cpuCount": integer(1, u64::from(SandboxSize::MAX_VCPUS)),
            "memoryMB": memory_of_template(),
            "minFreeDiskMb": integer(0, SandboxSize::MAX_DISK_MIB),
        })),
        "RequestedBuild": object(
            &["templateID", "buildID", "public", "names", "tags", "aliases"],
            json!({
                "templateID": text(),
                "buildID": { "type": "string", "format": "uuid" },
                "public": flag(),
                "names": strings,
                "tags": strings,
                "aliases": strings,
            }),
        ),
        "UploadLink": object(&["present", "url"], json!({ "present": flag(), "url": text() })),
        "BuildStart": object(&[], json!({
            "fromImage": text(),
            "fromTemplate": text(),
            "fromImageRegistry": object(&["type"], json!({
                "type": { "type": "string", "enum": ["registry"] },
                "username": text(),
                "password": text(),
            })),
            "steps": {
                "type": "array", "maxItems": 1000,
                "items": object(&["type"], json!({
                    "type": { "type": "string", "enum": ["RUN", "COPY", "ENV", "WORKDIR", "USER"] },
                    "args": strings,
                    "filesHash": text(),
                    "force": flag(),
                })),
            },
            "startCmd": text(),
            "readyCmd": text(),
            "force": flag(),
            "spec": { "type": "object", "description": "Instead of all others: stages as `jiffy \
                template build` sends them" },
        })),
        "BuildLogs": object(&["logs"], json!({ "logs": entries })),
        "AddTags": object(&["target", "tags"], json!({ "target": text(), "tags": strings })),
        "AddedTags": object(&["tags", "buildID"], json!({ "tags": strings, "buildID": text() })),
        "RemoveTags": object(&["name", "tags"], json!({ "name": text(), "tags": strings })),
        "TemplateChange": object(&[], json!({ "public": flag() })),
        "ChangedTemplate": object(&["names"], json!({ "names": strings })),
        "Prune": object(&[], json!({ "unusedSeconds": count() })),
        "Pruned": object(&["steps", "uploadBytes"], json!({ "steps": count(), "uploadBytes": count() })),
    })
}
