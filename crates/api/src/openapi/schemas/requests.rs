//! Bodies of requests about sandboxes.

use super::parts::{
    addresses, closed_object, flag, integer, joined, maybe, nothing, object, pairs, sandbox_name,
    text, timeout,
};
use crate::network;
use crate::routes::bounds::{MAX_REFRESH, MAX_SNAPSHOT_NAME};
use jiffy_engine_api::{GVISOR, MICROVM, SandboxSize};
use jiffy_sandbox_manager::{MAX_AUTHORITIES_BYTES, MAX_NO_PROXY, MAX_PROXY_URL};
use serde_json::{Value, json};

const OCTET: &str = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";

fn v4(prefix: &str) -> String {
    format!("({OCTET}\\.){{3}}{OCTET}{prefix}")
}

fn lists() -> Value {
    let cidr = v4("(/(3[0-2]|[12]?[0-9]))?");
    let name = "(\\*\\.)?([a-z]([a-z0-9-]{0,30}[a-z0-9])?\\.){0,3}[a-z]([a-z0-9-]{0,30}[a-z0-9])?";
    // Of IPv6 the patterns know what starts no trouble; more is understood.
    let v6 = "::1|fd00::(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?";
    let host = "^[a-z][a-z0-9]{0,30}(\\.[a-z][a-z0-9]{0,30}){0,3}(:\\$\\{PORT\\})?$";
    json!({
        "allowOut": addresses(&format!("^({cidr}|{v6}|{name})$")),
        "denyOut": addresses(&format!("^({cidr}|{v6})$")),
        "dnsServers": addresses(&format!("^({}|::1)$", v4(""))),
        "egressMbps": maybe(integer(1, u64::from(network::MAX_MBPS))),
        "egressProxy": nothing(),
        "rules": nothing(),
        "httpsPorts": nothing(),
        "allowPublicTraffic": maybe(flag()),
        "maskRequestHost": maybe(json!({ "type": "string", "pattern": host })),
    })
}

/// Bodies of requests.
pub(super) fn requests() -> Value {
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
            "autoResume": maybe(closed_object(&[], json!({ "enabled": maybe(flag()) }))),
            "secure": maybe(flag()),
            "allow_internet_access": maybe(flag()),
            "network": maybe(closed_object(&[], lists())),
            "metadata": pairs("^(?!host-mount$)"),
            "envVars": pairs("^[^=\\u0000]+$"),
            "envs": pairs("^[^=\\u0000]+$"),
            "lifecycle": maybe(closed_object(&[], json!({
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
            "prefetch": {
                "type": ["string", "null"], "enum": ["working_set", "all", null],
                "description": "Memory of a snapshot in the store that is fetched without being touched: first what it touches (the default), or then also the rest",
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
            "durable": maybe(flag()),
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
            "durable": maybe(flag()),
            "ack": maybe(json!({ "type": "string", "enum": ["captured", "stored"] })),
        }))),
        "NetworkUpdate": closed_object(&[], joined(lists(), json!({
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
