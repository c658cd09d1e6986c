//! Sandboxes as clients see them.

use super::moment;
use crate::app::App;
use crate::caller::Caller;
use jiffy_engine_api::BootMode;
use jiffy_proto::agent::{ENVD_VERSION, SiteSettings};
use jiffy_sandbox_manager::{NetworkSettings, OnTimeout, SandboxRecord, SandboxState, StoreState};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Clients want the name of the machine that runs a sandbox; they do nothing with it.
const CLIENT_ID: &str = "jiffy";
/// When a sandbox without a time limit ends. Clients insist on a moment.
const NEVER: &str = "2999-12-31T23:59:59Z";

/// Answer to create, connect and resume, and in that to fork.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    envd_version: &'static str,
    alias: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_access_token: Option<String>,
    domain: Option<String>,
    #[serde(flatten)]
    ours: JiffyFields,
}

/// Fields that Jiffy adds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JiffyFields {
    /// Name that it is called by.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Sandbox it was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    forked_from: Option<String>,
    /// Snapshot it descends from.
    #[serde(rename = "snapshotID", skip_serializing_if = "Option::is_none")]
    snapshot_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_mode: Option<BootMode>,
    /// Engine that isolates it.
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_ms: Option<f64>,
    /// State in the store of what it sleeps in; none: it does not sleep, or there is no store.
    #[serde(skip_serializing_if = "Option::is_none")]
    store_state: Option<StoreState>,
    /// The whole record; secrets are in it for the host's owner only.
    jiffy: SandboxRecord,
}

/// An item of a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListedSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    alias: String,
    started_at: String,
    end_at: String,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    state: &'static str,
    envd_version: &'static str,
    metadata: BTreeMap<String, String>,
    volume_mounts: [Value; 0],
    #[serde(flatten)]
    ours: JiffyFields,
}

/// Answer to a look at one.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxDetail {
    #[serde(flatten)]
    listed: ListedSandbox,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    domain: Option<String>,
    allow_internet_access: Option<bool>,
    network: Value,
    lifecycle: Lifecycle,
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<&'static str>,
    /// Why the host could not serve its disk: its programs saw I/O errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_failure: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    on_timeout: &'static str,
    auto_resume: bool,
}

fn shown(caller: &Caller, id: Option<String>) -> Option<String> {
    id.map(|id| caller.shown_id(&id).to_owned())
}

/// All that is known about a sandbox, as far as the caller may know it.
pub(crate) fn whole(caller: &Caller, mut record: SandboxRecord) -> SandboxRecord {
    if !caller.is_owner() {
        record.env.clear();
        record.agent_token = None;
        record.traffic_token = None;
    }
    // Certificates are long, and a proxy's password is a secret.
    record.settings.site = SiteSettings::default();
    record.id = caller.shown_id(&record.id).to_owned();
    record.forked_from = shown(caller, record.forked_from);
    record
}

fn end_at(record: &SandboxRecord) -> String {
    match (&record.state, record.deadline_ms) {
        (SandboxState::Running | SandboxState::Creating, Some(at)) => moment(at),
        (SandboxState::Running | SandboxState::Creating, None) => NEVER.to_owned(),
        _ => moment(record.changed_ms),
    }
}

fn network(network: &NetworkSettings) -> Value {
    let mut shown = json!({
        "allowOut": network.allow_out,
        "denyOut": network.deny_out,
        "dnsServers": network.dns_servers,
        "allowPublicTraffic": !network.restrict_traffic,
    });
    if let (Some(mbps), Some(map)) = (network.egress_mbps, shown.as_object_mut()) {
        map.insert("egressMbps".to_owned(), json!(mbps));
    }
    if let (Some(host), Some(map)) = (&network.mask_request_host, shown.as_object_mut()) {
        map.insert("maskRequestHost".to_owned(), json!(host));
    }
    shown
}

impl App {
    fn ours(&self, caller: &Caller, record: &SandboxRecord) -> JiffyFields {
        let asleep = record.state == SandboxState::Paused;
        let asleep_in = record.snapshot.as_deref().filter(|_| asleep);
        let snapshots = self.sandboxes.snapshots();
        JiffyFields {
            name: record.name.clone(),
            forked_from: shown(caller, record.forked_from.clone()),
            snapshot_id: record.snapshot.clone(),
            boot_mode: record.boot_mode,
            engine: record.engine.clone(),
            boot_ms: record.boot_ms,
            store_state: asleep_in.and_then(|id| snapshots.store_state_of(id)),
            jiffy: whole(caller, record.clone()),
        }
    }

    /// A sandbox as its maker is told about it. Its secrets are not for those who may only look.
    pub(crate) fn answer(&self, caller: &Caller, record: &SandboxRecord) -> Sandbox {
        let secret = |token: &Option<String>| token.clone().filter(|_| !caller.only_reads());
        Sandbox {
            template_id: caller.called(&record.template),
            sandbox_id: caller.shown_id(&record.id).to_owned(),
            client_id: CLIENT_ID,
            envd_version: ENVD_VERSION,
            alias: caller.called(&record.template),
            envd_access_token: secret(&record.agent_token),
            traffic_access_token: secret(&record.traffic_token),
            domain: self.config.domain.clone(),
            ours: self.ours(caller, record),
        }
    }

    pub(crate) fn listed(&self, caller: &Caller, record: &SandboxRecord) -> ListedSandbox {
        ListedSandbox {
            template_id: caller.called(&record.template),
            sandbox_id: caller.shown_id(&record.id).to_owned(),
            client_id: CLIENT_ID,
            alias: caller.called(&record.template),
            started_at: moment(record.created_ms),
            end_at: end_at(record),
            cpu_count: record.size.vcpus,
            memory_mb: record.size.memory_mib,
            disk_size_mb: record.size.disk_mib,
            state: record.state.name(),
            envd_version: ENVD_VERSION,
            metadata: record.settings.metadata.clone(),
            volume_mounts: [],
            ours: self.ours(caller, record),
        }
    }

    pub(crate) fn detail(&self, caller: &Caller, record: &SandboxRecord) -> SandboxDetail {
        let settings = &record.settings;
        SandboxDetail {
            listed: self.listed(caller, record),
            envd_access_token: record.agent_token.clone().filter(|_| !caller.only_reads()),
            domain: self.config.domain.clone(),
            allow_internet_access: settings.network.allow_internet_access,
            network: network(&settings.network),
            lifecycle: Lifecycle {
                on_timeout: match settings.on_timeout {
                    OnTimeout::Kill => "kill",
                    OnTimeout::Pause => "pause",
                },
                auto_resume: settings.auto_resume,
            },
            pause_mode: (record.state == SandboxState::Paused).then_some("full"),
            disk_failure: self.sandboxes.observe().disk_failure(&record.id),
        }
    }
}
