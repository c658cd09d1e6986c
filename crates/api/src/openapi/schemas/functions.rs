//! Functions.

use super::parts::{count, flag, maybe, moment, object, text};
use jiffy_sandbox_manager::StoreState;
use serde_json::{Value, json};

/// Functions, their versions, logs and counts.
pub(super) fn functions() -> Value {
    let strings = json!({ "type": "array", "items": text() });
    let scope = json!({ "type": "string", "enum": ["create", "read"] });
    let limits = json!({
        "memoryMB": count(),
        "cpuMs": count(),
        "timeoutMs": count(),
        "concurrency": count(),
    });
    let metrics = object(
        &[
            "requests",
            "running",
            "cpuUs",
            "latencyUs",
            "latencyBuckets",
            "faults",
        ],
        json!({
            "requests": count(),
            "running": count(),
            "cpuUs": count(),
            "latencyUs": count(),
            "latencyBuckets": { "type": "array", "items": object(&["leUs", "count"], json!({
                "leUs": maybe(count()),
                "count": count(),
            })) },
            "faults": { "type": "object", "additionalProperties": count() },
        }),
    );
    let settings = object(
        &[],
        json!({
            "limits": object(&[], limits.clone()),
            "env": { "type": "object", "additionalProperties": text() },
            "allow": strings,
            "public": flag(),
            "schedule": text(),
            "sandboxKey": scope,
            "renewSandboxKey": flag(),
            "digest": {
                "type": "string",
                "description": "BLAKE3 hash of a module of the caller's, on this host or in the store that hosts share, instead of the part `module`",
            },
        }),
    );
    let store_state = json!({
        "type": "string",
        "enum": [StoreState::Uploading.name(), StoreState::Stored.name()],
        "description": "State of the module in the store that hosts share; absent without a store",
    });
    json!({
        "Function": object(
            &["name", "owner", "label", "state", "public", "version", "world", "digest", "path",
                "limits", "envNames", "allow", "sandboxKey", "createdAt", "updatedAt"],
            json!({
                "name": text(),
                "owner": maybe(text()),
                "label": text(),
                "state": { "type": "string", "enum": ["enabled", "disabled"] },
                "public": flag(),
                "version": count(),
                "world": maybe(text()),
                "digest": maybe(text()),
                "storeState": store_state,
                "path": text(),
                "url": text(),
                "directUrl": text(),
                "limits": object(&["memoryMB", "cpuMs", "timeoutMs", "concurrency"], limits),
                "envNames": strings,
                "allow": strings,
                "sandboxKey": maybe(scope),
                "schedule": object(&["cron", "missed", "skipped"], json!({
                    "cron": text(),
                    "nextAt": maybe(moment()),
                    "lastAt": maybe(moment()),
                    "lastStatus": maybe(count()),
                    "missed": count(),
                    "skipped": count(),
                })),
                "createdAt": moment(),
                "updatedAt": moment(),
                "metrics": metrics,
            }),
        ),
        "FunctionVersion": object(
            &["version", "answers", "world", "bytes", "digest", "createdAt"],
            json!({
                "version": count(),
                "answers": flag(),
                "world": text(),
                "bytes": count(),
                "digest": text(),
                "storeState": store_state,
                "createdAt": moment(),
            }),
        ),
        "DeployFunction": object(&[], json!({
            "settings": settings,
            "module": { "type": "string", "contentMediaType": "application/wasm" },
        })),
        "RollbackFunction": maybe(object(&[], json!({ "version": maybe(count()) }))),
        "FunctionLog": object(&["entries", "next"], json!({
            "entries": { "type": "array", "items": object(
                &["sequence", "timestamp", "requestID", "stream", "text"],
                json!({
                    "sequence": count(),
                    "timestamp": moment(),
                    "requestID": text(),
                    "stream": { "type": "string", "enum": ["stdout", "stderr", "fault"] },
                    "text": text(),
                }),
            ) },
            "next": text(),
        })),
        "FunctionMetrics": metrics,
    })
}
