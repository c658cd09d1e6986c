//! Conversion of functions to and from the bodies of the API.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway.

use super::moment;
use crate::error::ApiError;
use jiffy_api_types::{
    DeploySettings, Function, FunctionLimits, FunctionLogEntry, FunctionMetrics, FunctionSchedule,
    FunctionState, FunctionVersion, LatencyBucket, ModuleState,
};
use jiffy_function_manager::owner::label;
use jiffy_function_manager::{
    DeployChanges, FunctionError, FunctionRecord, ModuleDigest, SandboxKeyScope, ScheduleStatus,
    VersionRecord,
};
use jiffy_proto::function::{LATENCY_BUCKETS_US, LogEntry, LogStream, MetricsSnapshot};

/// Returns the digest of a module that the caller deployed before. `None` if the form contains the
/// module.
pub(crate) fn digest(settings: &DeploySettings) -> Result<Option<ModuleDigest>, FunctionError> {
    let digest = settings.digest.as_deref().map(str::parse);
    Ok(digest.transpose()?)
}

/// Returns the function's access to its deployer's sandboxes.
pub(crate) fn sandbox_key(settings: &DeploySettings) -> Result<Option<SandboxKeyScope>, ApiError> {
    let refused = |message: &str| Err(ApiError::invalid(message));
    match settings.sandbox_key.as_deref() {
        Some("read") => Ok(Some(SandboxKeyScope::Read)),
        Some("create") => Ok(Some(SandboxKeyScope::Create)),
        Some("admin") => {
            refused("`sandboxKey` must be `create` or `read`: a function cannot manage the host")
        }
        Some(_) => refused("`sandboxKey` must be `create` or `read`"),
        // Without access to sandboxes, there is no key to renew.
        None if settings.renew_sandbox_key => refused("`renewSandboxKey` requires `sandboxKey`"),
        None => Ok(None),
    }
}

/// Returns the changes of a deployment, except for the key for sandboxes.
pub(crate) fn changes(settings: DeploySettings) -> DeployChanges {
    let limits = settings.limits;
    DeployChanges {
        memory_mib: limits.memory_mb,
        cpu_ms: limits.cpu_ms,
        wall_ms: limits.timeout_ms,
        concurrency: limits.concurrency,
        env: settings.env,
        allow: settings.allow,
        public: settings.public,
        schedule: settings.schedule,
        // The caller creates the key and sets this field.
        sandbox_key: None,
    }
}

/// Domain of hosts without a domain of their own.
const LOCAL_DOMAIN: &str = "localhost";

/// Common part of the addresses of a host's functions.
pub(crate) struct FunctionBase<'a> {
    pub scheme: &'a str,
    /// Domain of the host, optionally with a port. `None` if the host has no domain of its own.
    pub domain: Option<&'a str>,
    /// Port on which functions receive direct requests, without the gateway. `None` if there is no
    /// such port.
    pub direct_port: Option<u16>,
}

/// Returns the state of a module in the shared store, by its digest. `None` if the host uses no
/// store.
pub(crate) type StoreStateOf<'a> = &'a dyn Fn(&str) -> Option<ModuleState>;

/// Returns the description of a function. Values of its environment are omitted.
pub(crate) fn function(
    record: &FunctionRecord,
    schedule: Option<&ScheduleStatus>,
    base: &FunctionBase<'_>,
    store_state: StoreStateOf<'_>,
) -> Function {
    let version = record.version();
    let limits = &record.settings.limits;
    let label = label(record.owner.as_deref(), &record.name);
    // Direct requests carry no key, so only public functions receive them.
    let direct_port = base.direct_port.filter(|_| record.public);
    // The domain may include the port of the gateway, which differs from the direct port.
    let direct_domain = base.domain.and_then(|domain| domain.split(':').next());
    let direct_domain = direct_domain.unwrap_or(LOCAL_DOMAIN);
    Function {
        name: record.name.clone(),
        owner: record.owner.clone(),
        state: if record.enabled {
            FunctionState::Enabled
        } else {
            FunctionState::Disabled
        },
        public: record.public,
        version: record.answering,
        world: version.map(|v| v.world.name().to_owned()),
        digest: version.map(|v| v.module.clone()),
        store_state: version.and_then(|v| store_state(&v.module)),
        path: format!("/functions/{}/invoke/", record.name),
        url: (base.domain).map(|domain| format!("{}://{label}.fn.{domain}/", base.scheme)),
        direct_url: direct_port.map(|port| format!("http://{label}.fn.{direct_domain}:{port}/")),
        limits: FunctionLimits {
            memory_mb: limits.memory_mib,
            cpu_ms: limits.cpu_ms,
            timeout_ms: limits.wall_ms,
            concurrency: limits.concurrency,
        },
        env_names: record.settings.env.keys().cloned().collect(),
        allow: record.settings.allow.clone(),
        sandbox_key: record.sandbox_key.as_ref().map(|key| match key.scope {
            SandboxKeyScope::Read => jiffy_api_types::SandboxKeyScope::Read,
            SandboxKeyScope::Create => jiffy_api_types::SandboxKeyScope::Create,
        }),
        schedule: (record.schedule.as_ref()).map(|cron| scheduled(cron.clone(), schedule)),
        created_at: moment(record.created_ms),
        updated_at: moment(record.updated_ms),
        metrics: None,
        label,
    }
}

fn scheduled(cron: String, status: Option<&ScheduleStatus>) -> FunctionSchedule {
    let status = status.cloned().unwrap_or_default();
    // Negative times cannot be represented in the API.
    let at = |ms: Option<i64>| ms.and_then(|ms| u64::try_from(ms).ok()).map(moment);
    FunctionSchedule {
        cron,
        next_at: at(status.next_ms),
        last_at: at(status.last_ms),
        last_status: status.last_status,
        missed: status.missed,
        skipped: status.skipped,
    }
}

/// Returns the versions of a function, newest first.
pub(crate) fn versions(
    record: &FunctionRecord,
    store_state: StoreStateOf<'_>,
) -> Vec<FunctionVersion> {
    let shown = |version: &VersionRecord| FunctionVersion {
        version: version.number,
        answers: version.number == record.answering,
        world: version.world.name().to_owned(),
        bytes: version.bytes,
        digest: version.module.clone(),
        store_state: store_state(&version.module),
        created_at: moment(version.created_ms),
    };
    record.versions.iter().rev().map(shown).collect()
}

/// Returns the metrics of a function.
pub(crate) fn metrics(counts: MetricsSnapshot) -> FunctionMetrics {
    let bounds = LATENCY_BUCKETS_US.iter().map(|bound| Some(*bound));
    // The last bucket has no upper bound.
    let buckets = bounds.chain([None]).zip(counts.latency_buckets);
    FunctionMetrics {
        requests: counts.requests,
        running: counts.running,
        cpu_us: counts.cpu_us,
        latency_us: counts.latency_us,
        latency_buckets: buckets
            .map(|(le_us, count)| LatencyBucket { le_us, count })
            .collect(),
        faults: counts.faults,
    }
}

/// Returns an entry of a function's log.
pub(crate) fn log_entry(entry: LogEntry) -> FunctionLogEntry {
    FunctionLogEntry {
        sequence: entry.sequence,
        timestamp: moment(entry.unix_ms),
        request_id: entry.request_id,
        stream: match entry.stream {
            LogStream::Stdout => jiffy_api_types::LogStream::Stdout,
            LogStream::Stderr => jiffy_api_types::LogStream::Stderr,
            LogStream::Fault => jiffy_api_types::LogStream::Fault,
        },
        text: entry.text,
    }
}
