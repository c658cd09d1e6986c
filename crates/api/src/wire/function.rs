//! Functions as clients see them.

use super::moment;
use crate::error::ApiError;
use jiffy_function_manager::owner::label;
use jiffy_function_manager::{
    DeployChanges, FunctionError, FunctionRecord, ModuleDigest, SandboxKeyScope, ScheduleStatus,
    VersionRecord,
};
use jiffy_proto::function::{LATENCY_BUCKETS_US, LogEntry, MetricsSnapshot};
use jiffy_sandbox_manager::StoreState;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Settings of a deployment. Absent ones stay as they are, or have their default.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct DeploySettings {
    limits: DeployLimits,
    env: Option<BTreeMap<String, String>>,
    allow: Option<Vec<String>>,
    public: Option<bool>,
    schedule: Option<String>,
    sandbox_key: Option<String>,
    pub(crate) renew_sandbox_key: bool,
    digest: Option<String>,
}

impl DeploySettings {
    /// Digest of a module that the caller deployed before; none: the form has the module.
    pub(crate) fn digest(&self) -> Result<Option<ModuleDigest>, FunctionError> {
        self.digest.as_deref().map(str::parse).transpose()
    }

    /// Rights of the function over its deployer's sandboxes; none: it has none.
    pub(crate) fn sandbox_key(&self) -> Result<Option<SandboxKeyScope>, ApiError> {
        let refused = |message: &str| Err(ApiError::invalid(message));
        match self.sandbox_key.as_deref() {
            Some("read") => Ok(Some(SandboxKeyScope::Read)),
            Some("create") => Ok(Some(SandboxKeyScope::Create)),
            Some("admin") => refused(
                "`sandboxKey`: a function does not manage a host: `create` and `read` are for it",
            ),
            Some(_) => refused("`sandboxKey` must be `create` or `read`"),
            None if self.renew_sandbox_key => refused("`renewSandboxKey` needs `sandboxKey`"),
            None => Ok(None),
        }
    }
}

/// Limits of a deployment.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct DeployLimits {
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u32>,
    cpu_ms: Option<u32>,
    timeout_ms: Option<u32>,
    concurrency: Option<u32>,
}

impl From<DeploySettings> for DeployChanges {
    fn from(settings: DeploySettings) -> Self {
        let limits = settings.limits;
        Self {
            memory_mib: limits.memory_mb,
            cpu_ms: limits.cpu_ms,
            wall_ms: limits.timeout_ms,
            concurrency: limits.concurrency,
            env: settings.env,
            allow: settings.allow,
            public: settings.public,
            schedule: settings.schedule,
            sandbox_key: None,
        }
    }
}

/// Domain that every host has.
const LOCAL_DOMAIN: &str = "localhost";

/// Common part of the addresses of a host's functions.
pub(crate) struct FunctionBase<'a> {
    pub scheme: &'a str,
    /// May carry a port. None: the host has none but its local one.
    pub domain: Option<&'a str>,
    /// Port of direct requests.
    pub direct_port: Option<u16>,
}

/// State of a module in the store that hosts share, by its digest; none: this host shares none.
pub(crate) type StoreStateOf<'a> = &'a dyn Fn(&str) -> Option<StoreState>;

/// A function. Values of its environment are not shown.
pub(crate) fn function(
    record: &FunctionRecord,
    schedule: Option<&ScheduleStatus>,
    base: &FunctionBase<'_>,
    store_state: StoreStateOf<'_>,
) -> Value {
    let version = record.version();
    let limits = &record.settings.limits;
    let label = label(record.owner.as_deref(), &record.name);
    let mut shown = json!({
        "name": record.name,
        "owner": record.owner,
        "label": label,
        "state": match record.enabled {
            true => "enabled",
            false => "disabled",
        },
        "public": record.public,
        "version": record.answering,
        "world": version.map(|v| v.world.name()),
        "digest": version.map(|v| &v.module),
        "path": format!("/functions/{}/invoke/", record.name),
        "limits": {
            "memoryMB": limits.memory_mib,
            "cpuMs": limits.cpu_ms,
            "timeoutMs": limits.wall_ms,
            "concurrency": limits.concurrency,
        },
        "envNames": record.settings.env.keys().collect::<Vec<_>>(),
        "allow": record.settings.allow,
        "sandboxKey": record.sandbox_key.as_ref().map(|key| key.scope.name()),
        "createdAt": moment(record.created_ms),
        "updatedAt": moment(record.updated_ms),
    });
    if let Some(map) = shown.as_object_mut() {
        if let Some(state) = version.and_then(|v| store_state(&v.module)) {
            map.insert("storeState".to_owned(), json!(state));
        }
        if let Some(domain) = base.domain {
            let url = format!("{}://{label}.fn.{domain}/", base.scheme);
            map.insert("url".to_owned(), json!(url));
        }
        if let Some(port) = base.direct_port.filter(|_| record.public) {
            let domain = base.domain.and_then(|domain| domain.split(':').next());
            let domain = domain.unwrap_or(LOCAL_DOMAIN);
            let url = format!("http://{label}.fn.{domain}:{port}/");
            map.insert("directUrl".to_owned(), json!(url));
        }
        if let Some(cron) = &record.schedule {
            let status = schedule.cloned().unwrap_or_default();
            let at = |ms: Option<i64>| ms.and_then(|ms| u64::try_from(ms).ok()).map(moment);
            let shown = json!({
                "cron": cron,
                "nextAt": at(status.next_ms),
                "lastAt": at(status.last_ms),
                "lastStatus": status.last_status,
                "missed": status.missed,
                "skipped": status.skipped,
            });
            map.insert("schedule".to_owned(), shown);
        }
    }
    shown
}

/// Versions of a function, newest first.
pub(crate) fn versions(record: &FunctionRecord, store_state: StoreStateOf<'_>) -> Vec<Value> {
    let shown = |version: &VersionRecord| {
        let mut shown = json!({
            "version": version.number,
            "answers": version.number == record.answering,
            "world": version.world.name(),
            "bytes": version.bytes,
            "digest": version.module,
            "createdAt": moment(version.created_ms),
        });
        if let (Some(map), Some(state)) = (shown.as_object_mut(), store_state(&version.module)) {
            map.insert("storeState".to_owned(), json!(state));
        }
        shown
    };
    record.versions.iter().rev().map(shown).collect()
}

/// Counts of a function.
pub(crate) fn metrics(counts: &MetricsSnapshot) -> Value {
    let bounds = LATENCY_BUCKETS_US.iter().map(|bound| json!(bound));
    let buckets = bounds.chain([Value::Null]).zip(&counts.latency_buckets);
    json!({
        "requests": counts.requests,
        "running": counts.running,
        "cpuUs": counts.cpu_us,
        "latencyUs": counts.latency_us,
        "latencyBuckets": buckets
            .map(|(bound, count)| json!({ "leUs": bound, "count": count }))
            .collect::<Vec<_>>(),
        "faults": counts.faults,
    })
}

/// Entry of a log.
pub(crate) fn log_entry(entry: &LogEntry) -> Value {
    json!({
        "sequence": entry.sequence,
        "timestamp": moment(entry.unix_ms),
        "requestID": entry.request_id,
        "stream": entry.stream,
        "text": entry.text,
    })
}
