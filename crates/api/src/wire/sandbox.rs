//! Sandboxes as clients see them.

use super::moment;
use crate::app::App;
use crate::caller::Caller;
use jiffy_api_types::{
    JiffyFields, Lifecycle, ListedSandbox, Moment, PauseMode, Sandbox, SandboxDetail, SandboxInfo,
    SandboxState,
};
use jiffy_proto::agent::ENVD_VERSION;
use jiffy_sandbox_manager::SandboxRecord;

/// Clients want the name of the machine that runs a sandbox; they do nothing with it.
const CLIENT_ID: &str = "jiffy";
/// When a sandbox without a time limit ends. Clients insist on a moment.
const NEVER: &str = "2999-12-31T23:59:59Z";

fn shown(caller: &Caller, id: Option<String>) -> Option<String> {
    id.map(|id| caller.shown_id(&id).to_owned())
}

/// Details of a sandbox, as far as the caller may know them.
pub(crate) fn whole(caller: &Caller, record: SandboxRecord) -> SandboxInfo {
    let mut info = SandboxInfo::from(record);
    if !caller.is_owner() {
        info.env.clear();
        info.agent_token = None;
        info.traffic_token = None;
    }
    info.id = caller.shown_id(&info.id).to_owned();
    info.forked_from = shown(caller, info.forked_from);
    info
}

fn end_at(record: &SandboxRecord) -> Moment {
    match (&record.state, record.deadline_ms) {
        (SandboxState::Running | SandboxState::Creating, Some(at)) => moment(at),
        (SandboxState::Running | SandboxState::Creating, None) => Moment(NEVER.to_owned()),
        _ => moment(record.changed_ms),
    }
}

impl App {
    fn added(&self, caller: &Caller, record: &SandboxRecord) -> JiffyFields {
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
            client_id: CLIENT_ID.to_owned(),
            envd_version: ENVD_VERSION.to_owned(),
            alias: caller.called(&record.template),
            envd_access_token: secret(&record.agent_token),
            traffic_access_token: secret(&record.traffic_token),
            domain: self.config.domain.clone(),
            added: self.added(caller, record),
        }
    }

    pub(crate) fn listed(&self, caller: &Caller, record: &SandboxRecord) -> ListedSandbox {
        ListedSandbox {
            template_id: caller.called(&record.template),
            sandbox_id: caller.shown_id(&record.id).to_owned(),
            client_id: CLIENT_ID.to_owned(),
            alias: caller.called(&record.template),
            started_at: moment(record.created_ms),
            end_at: end_at(record),
            cpu_count: record.size.vcpus,
            memory_mb: record.size.memory_mib,
            disk_size_mb: record.size.disk_mib,
            state: record.state.kind(),
            envd_version: ENVD_VERSION.to_owned(),
            metadata: record.settings.metadata.clone(),
            volume_mounts: Vec::new(),
            added: self.added(caller, record),
        }
    }

    pub(crate) fn detail(&self, caller: &Caller, record: &SandboxRecord) -> SandboxDetail {
        let settings = &record.settings;
        let observed = self.sandboxes.observe();
        let mut listed = self.listed(caller, record);
        listed.added.jiffy.steps = Some(observed.times(&record.id).into());
        SandboxDetail {
            listed,
            envd_access_token: record.agent_token.clone().filter(|_| !caller.only_reads()),
            domain: self.config.domain.clone(),
            allow_internet_access: settings.network.allow_internet_access,
            network: (&settings.network).into(),
            lifecycle: Lifecycle {
                on_timeout: settings.on_timeout,
                auto_resume: settings.auto_resume,
            },
            pause_mode: (record.state == SandboxState::Paused).then_some(PauseMode::Full),
            disk_failure: observed.disk_failure(&record.id),
        }
    }
}
