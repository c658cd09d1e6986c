//! Schemas of bodies.

use crate::network;
use crate::routes::bounds::{
    MAX_NAME, MAX_PAIRS, MAX_REFRESH, MAX_SNAPSHOT_NAME, MAX_VALUE, STATES,
};
use jiffy_engine::SandboxSize;
use jiffy_host::{
    GVISOR, MAX_AUTHORITIES_BYTES, MAX_NO_PROXY, MAX_PROXY_URL, MAX_RESTART_GRACE,
    MAX_SANDBOX_NAME, MICROVM,
};
use serde_json::{Value, json};

/// Longest time limit that any configuration allows.
const MAX_TIMEOUT: u64 = 30 * 24 * 3600;

/// An object with these properties, of which `required` must be there.
fn object(required: &[&str], properties: Value) -> Value {
    json!({ "type": "object", "required": required, "properties": properties })
}

/// Two lists of properties as one.
fn joined(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}

/// `schema` of one type, or null.
fn maybe(mut schema: Value) -> Value {
    if let Some(map) = schema.as_object_mut() {
        let kind = map.get("type").cloned().unwrap_or_default();
        map.insert("type".to_owned(), json!([kind, "null"]));
    }
    schema
}

fn text() -> Value {
    json!({ "type": "string" })
}

fn flag() -> Value {
    json!({ "type": "boolean" })
}

fn integer(least: i64, most: u64) -> Value {
    json!({ "type": "integer", "minimum": least, "maximum": most })
}

fn memory_of_template() -> Value {
    integer(
        i64::from(SandboxSize::MIN_MEMORY_MIB),
        u64::from(SandboxSize::MAX_MEMORY_MIB),
    )
}

fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn moment() -> Value {
    json!({ "type": "string", "format": "date-time" })
}

fn timeout() -> Value {
    let mut schema = integer(-1, MAX_TIMEOUT);
    if let Some(map) = schema.as_object_mut() {
        map.insert("description".to_owned(), json!("Seconds; -1: no limit"));
    }
    schema
}

fn pairs(names: &str) -> Value {
    json!({
        "type": ["object", "null"],
        "maxProperties": MAX_PAIRS,
        "propertyNames": { "type": "string", "pattern": names, "maxLength": MAX_NAME },
        "additionalProperties": { "type": "string", "maxLength": MAX_VALUE, "pattern": "^[^\\u0000]*$" },
    })
}

/// The name of a sandbox, or null for none.
fn sandbox_name() -> Value {
    let pattern = format!("^[A-Za-z0-9][A-Za-z0-9._-]{{0,{}}}$", MAX_SANDBOX_NAME - 1);
    json!({
        "type": ["string", "null"], "pattern": pattern,
        "description": "Unique among the caller's sandboxes; stands wherever a sandbox's id does",
    })
}

fn addresses(pattern: &str) -> Value {
    json!({
        "type": ["array", "null"], "maxItems": network::MAX_NETWORK_ENTRIES,
        "items": { "type": "string", "pattern": pattern },
    })
}

/// Nothing but emptiness: an option this host does not have.
fn nothing() -> Value {
    json!({
        "description": "Not supported: refused unless empty",
        "anyOf": [
            { "type": "null" },
            { "type": "array", "maxItems": 0 },
            { "type": "object", "maxProperties": 0 },
        ],
    })
}

const OCTET: &str = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";

fn v4(prefix: &str) -> String {
    format!("({OCTET}\\.){{3}}{OCTET}{prefix}")
}

fn lists() -> Value {
    let cidr = v4("(/(3[0-2]|[12]?[0-9]))?");
    let name = "(\\*\\.)?([a-z]([a-z0-9-]{0,30}[a-z0-9])?\\.){0,3}[a-z]([a-z0-9-]{0,30}[a-z0-9])?";
    // Of IPv6 the patterns know what starts no trouble; more is understood.
    let v6 = "::1|fd00::(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?";
    json!({
        "allowOut": addresses(&format!("^({cidr}|{v6}|{name})$")),
        "denyOut": addresses(&format!("^({cidr}|{v6})$")),
        "dnsServers": addresses(&format!("^({}|::1)$", v4(""))),
        "egressMbps": maybe(integer(1, u64::from(network::MAX_MBPS))),
        "egressProxy": nothing(),
        "rules": nothing(),
    })
}

/// All of them, by name.
pub(super) fn all() -> Value {
    joined(joined(requests(), sandboxes()), joined(others(), pruning()))
}

fn requests() -> Value {
    let network = json!({
        "httpsPorts": nothing(),
        "allowPublicTraffic": maybe(flag()),
        "maskRequestHost": maybe(json!({
            "type": "string", "pattern": "^[a-z][a-z0-9]{0,30}(\\.[a-z][a-z0-9]{0,30}){0,3}(:\\$\\{PORT\\})?$",
        })),
    });
    let on_timeout = json!({ "type": ["string", "null"], "enum": ["kill", "pause", null] });
    let not_false = json!({
        "description": "Not supported: false is refused",
        "type": ["boolean", "null"],
    });
    let disk = integer(SandboxSize::MIN_DISK_MIB as i64, SandboxSize::MAX_DISK_MIB);
    let memory = integer(
        i64::from(SandboxSize::MIN_MEMORY_MIB),
        u64::from(SandboxSize::MAX_MEMORY_MIB),
    );
    let proxy = maybe(object(
        &["url"],
        json!({
            "url": {
                "description": "http://[USER:PASSWORD@]HOST[:PORT]; empty: none, whatever the host has",
                "type": "string",
                "maxLength": MAX_PROXY_URL,
            },
            "noProxy": {
                "description": "Hosts reached without it, with commas between them",
                "type": ["string", "null"],
                "maxLength": MAX_NO_PROXY,
            },
        }),
    ));
    let name = format!(
        "^[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{}}}$",
        MAX_SNAPSHOT_NAME - 1
    );
    json!({
        "NewSandbox": object(&["templateID"], json!({
            "templateID": { "type": "string", "description": "A template by name, or a snapshot" },
            "timeout": maybe(timeout()),
            "autoPause": maybe(flag()),
            "autoPauseMemory": not_false,
            "autoResume": maybe(object(&[], json!({ "enabled": maybe(flag()) }))),
            "secure": maybe(flag()),
            "allow_internet_access": maybe(flag()),
            "network": maybe(object(&[], joined(lists(), network))),
            "metadata": pairs("^(?!host-mount$)"),
            "envVars": pairs("^[^=\\u0000]+$"),
            "envs": pairs("^[^=\\u0000]+$"),
            "lifecycle": maybe(object(&[], json!({
                "onTimeout": on_timeout,
                "autoResume": maybe(flag()),
            }))),
            "mcp": nothing(),
            "iam": nothing(),
            "volumeMounts": nothing(),
            "cpuCount": maybe(integer(1, u64::from(SandboxSize::MAX_VCPUS))),
            "memoryMB": maybe(memory),
            "diskSizeMB": maybe(disk),
            "name": sandbox_name(),
            "engine": {
                "type": ["string", "null"], "enum": [MICROVM, GVISOR, null],
                "description": "What isolates it; null: the host's default, or the snapshot's own",
            },
            "caCertificates": {
                "description": "Certificate authorities that its programs trust, in PEM",
                "type": ["string", "null"],
                "maxLength": MAX_AUTHORITIES_BYTES,
            },
            "proxy": proxy,
        })),
        "ChangeSandbox": object(&["name"], json!({ "name": sandbox_name() })),
        "ConnectSandbox": maybe(object(&[], json!({
            "timeout": maybe(timeout()),
            "memory": not_false,
            "autoPause": maybe(flag()),
        }))),
        "ResumeSandbox": maybe(object(&[], json!({
            "timeout": maybe(timeout()),
            "memory": not_false,
            "autoPause": maybe(flag()),
        }))),
        "PauseSandbox": maybe(object(&[], json!({
            "memory": not_false,
            "requireHealthyGuest": maybe(flag()),
        }))),
        "SetTimeout": object(&["timeout"], json!({ "timeout": timeout() })),
        "Refresh": maybe(object(&[], json!({ "duration": maybe(integer(0, MAX_REFRESH)) }))),
        "ForkSandbox": maybe(object(&[], json!({
            "timeout": maybe(timeout()),
            "count": maybe(integer(1, 100)),
        }))),
        "RollbackSandbox": object(&["snapshotID"], json!({ "snapshotID": text() })),
        "SnapshotSandbox": maybe(object(&[], json!({
            "name": maybe(json!({ "type": "string", "pattern": name })),
            "memory": not_false,
        }))),
        "NetworkUpdate": object(&[], joined(lists(), json!({
            "allow_internet_access": maybe(flag()),
        }))),
        "RevokeKey": object(&[], json!({
            "end": {
                "type": "boolean",
                "description": "Kill its sandboxes, also paused ones, and cancel its builds",
            },
        })),
        "StopHost": object(&[], json!({ "killSandboxes": flag() })),
        "SetPool": object(&["size"], json!({ "size": integer(0, 1000) })),
    })
}

/// Properties that Jiffy adds to a sandbox.
fn ours() -> Value {
    json!({
        "name": text(),
        "forkedFrom": text(),
        "snapshotID": text(),
        "bootMode": { "type": "string", "enum": ["cold", "snapshot", "warm-pool", "fork"] },
        "engine": text(),
        "bootMs": { "type": "number", "minimum": 0 },
        "jiffy": { "type": "object", "description": "The whole record; with secrets for the host's owner only" },
    })
}

fn sandboxes() -> Value {
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
            "sandbox": super::schema("Sandbox"),
            "error": super::schema("Error"),
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
            "status": { "type": "string", "enum": ["ready"] },
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
            "jiffy": { "type": "object" },
        })),
    })
}

/// Bodies of what Jiffy adds.
fn pruning() -> Value {
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

fn others() -> Value {
    let metric = [
        "timestamp",
        "timestampUnix",
        "cpuCount",
        "cpuUsedPct",
        "memUsed",
        "memTotal",
        "memCache",
        "diskUsed",
        "diskTotal",
    ];
    let entry = object(
        &["timestamp", "message", "level"],
        json!({
            "timestamp": moment(),
            "message": text(),
            "level": { "type": "string", "enum": ["debug", "info", "warn", "error"] },
            "fields": { "type": "object", "additionalProperties": text() },
        }),
    );
    let line = object(
        &["timestamp", "line"],
        json!({ "timestamp": moment(), "line": text() }),
    );
    let connection = object(
        &[
            "timestamp",
            "protocol",
            "address",
            "port",
            "host",
            "question",
            "bytesOut",
            "bytesIn",
            "verdict",
            "reason",
            "times",
        ],
        json!({
            "timestamp": moment(),
            "protocol": text(),
            "address": maybe(text()),
            "port": maybe(count()),
            "host": maybe(text()),
            "question": maybe(text()),
            "bytesOut": maybe(count()),
            "bytesIn": maybe(count()),
            "verdict": { "type": "string", "enum": ["allowed", "refused"] },
            "reason": { "type": ["string", "null"], "enum": ["rules", "limit", "host", null] },
            "times": { "type": "integer", "minimum": 1 },
        }),
    );
    let entries = json!({ "type": "array", "items": entry });
    let strings = json!({ "type": "array", "items": text() });
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
                    &["paused", "snapshots", "templates", "uploads", "buildSteps"],
                    json!({
                        "paused": count(),
                        "snapshots": count(),
                        "templates": count(),
                        "uploads": count(),
                        "buildSteps": count(),
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
        "Process": object(&["pid"], json!({ "pid": count(), "exits": maybe(count()) })),
        "Metric": object(&metric, json!({
            "timestamp": moment(),
            "timestampUnix": count(),
            "cpuCount": count(),
            "cpuUsedPct": { "type": "number", "minimum": 0 },
            "memUsed": count(),
            "memTotal": count(),
            "memCache": count(),
            "diskUsed": count(),
            "diskTotal": count(),
            "netBytesOut": count(),
            "netBytesIn": count(),
        })),
        "AllMetrics": object(&["sandboxes"], json!({
            "sandboxes": { "type": "object", "additionalProperties": super::schema("Metric") },
        })),
        "Logs": object(&["logs", "logEntries"], json!({
            "logs": { "type": "array", "items": line },
            "logEntries": entries,
        })),
        "LogsV2": object(&["logs"], json!({ "logs": entries })),
        "Connections": object(&["since", "connections", "missing", "untold"], json!({
            "since": maybe(moment()),
            "connections": { "type": "array", "items": connection },
            "missing": count(),
            "untold": { "type": "array", "items": text() },
        })),
        "Preview": object(&["url", "expiresAt"], json!({ "url": text(), "expiresAt": moment() })),
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
            "name": { "type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,62}(:[a-z0-9][a-z0-9._-]{0,62})?$" },
            "alias": text(),
            "tags": {
                "type": "array", "maxItems": 99,
                "items": { "type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,62}$" },
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
            "spec": { "type": "object", "description": "Instead of all others: stages as `jiffy template build` sends them" },
        })),
        "BuildLogs": object(&["logs"], json!({ "logs": entries })),
        "AddTags": object(&["target", "tags"], json!({ "target": text(), "tags": strings })),
        "AddedTags": object(&["tags", "buildID"], json!({ "tags": strings, "buildID": text() })),
        "RemoveTags": object(&["name", "tags"], json!({ "name": text(), "tags": strings })),
        "TemplateChange": object(&[], json!({ "public": flag() })),
        "ChangedTemplate": object(&["names"], json!({ "names": strings })),
        "Prune": object(&[], json!({ "unusedSeconds": count() })),
        "Pruned": object(&["steps", "uploadBytes"], json!({ "steps": count(), "uploadBytes": count() })),
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
