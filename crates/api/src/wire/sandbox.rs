//! Conversion of sandboxes to the bodies of the API.

use super::moment;
use crate::app::App;
use crate::caller::Caller;
use jiffy_api_types::{
    JiffyFields, Lifecycle, ListedSandbox, Moment, Sandbox, SandboxDetail, SandboxInfo,
    SandboxState, SnapshotContent, VolumeMount,
};
use jiffy_proto::agent::ENVD_VERSION;
use jiffy_sandbox_manager as manager;

/// Value of `clientID`, the name of the host software. Clients require this field but do not use
/// it.
const CLIENT_ID: &str = "jiffy";
/// End time of a sandbox without a timeout, because clients require a timestamp.
const NEVER: &str = "2999-12-31T23:59:59Z";

/// Returns an id in the form that the caller may see.
fn shown(caller: &Caller, id: Option<&str>) -> Option<String> {
    id.map(|id| caller.shown_id(id).to_owned())
}

/// Returns the details of a sandbox that the caller may see. They include environment variables and
/// tokens only if the caller is the host's owner.
pub(crate) fn whole(caller: &Caller, sandbox: manager::Sandbox) -> SandboxInfo {
    let mut info = SandboxInfo::from(sandbox);
    // `App::answer` and `App::detail` return tokens in separate fields, unless the caller is
    // read-only.
    if !caller.is_owner() {
        info.env.clear();
        info.agent_token = None;
        info.traffic_token = None;
    }
    info.id = caller.shown_id(&info.id).to_owned();
    info.forked_from = shown(caller, info.forked_from.as_deref());
    info
}

/// Returns the time at which the sandbox will end, or at which it ended or was paused.
fn end_at(sandbox: &manager::Sandbox) -> Moment {
    match (&sandbox.state(), sandbox.deadline_ms()) {
        (SandboxState::Running | SandboxState::Creating, Some(at)) => moment(at),
        (SandboxState::Running | SandboxState::Creating, None) => Moment(NEVER.to_owned()),
        // The sandbox no longer runs, so its deadline has no meaning.
        _ => moment(sandbox.changed_ms()),
    }
}

impl App {
    /// Returns the fields that Jiffy adds to E2B's fields.
    fn added(&self, caller: &Caller, sandbox: &manager::Sandbox) -> JiffyFields {
        let is_paused = *sandbox.state() == SandboxState::Paused;
        // Only the snapshot of a paused sandbox has a state in the store that matters to clients.
        let paused_in = sandbox.snapshot().filter(|_| is_paused);
        let snapshots = self.sandboxes.snapshots();
        JiffyFields {
            name: sandbox.name().map(str::to_owned),
            forked_from: shown(caller, sandbox.forked_from()),
            snapshot_id: sandbox.snapshot().map(str::to_owned),
            boot_mode: sandbox.boot_mode(),
            engine: sandbox.engine().map(str::to_owned),
            boot_ms: sandbox.boot_ms(),
            store_state: paused_in.and_then(|id| snapshots.store_state_of(id)),
            jiffy: SandboxInfo {
                pause_mode: self.pause_mode(sandbox),
                ..whole(caller, sandbox.clone())
            },
        }
    }

    /// Returns the content of the pause. `None` if the sandbox is not paused.
    fn pause_mode(&self, sandbox: &manager::Sandbox) -> Option<SnapshotContent> {
        let is_paused = *sandbox.state() == SandboxState::Paused;
        let paused_in = sandbox.snapshot().filter(|_| is_paused)?;
        let content = self.sandboxes.snapshots().content_of(paused_in);
        // The snapshot of a sandbox that was paused on another host may be in the store only.
        Some(content.unwrap_or_default())
    }

    /// Returns the response to a call that creates, forks, connects to, resumes or restarts a
    /// sandbox. Tokens are omitted for read-only callers.
    pub(crate) fn answer(&self, caller: &Caller, sandbox: &manager::Sandbox) -> Sandbox {
        let secret =
            |token: Option<&str>| token.filter(|_| !caller.is_read_only()).map(str::to_owned);
        Sandbox {
            template_id: caller.display_name(sandbox.template()),
            sandbox_id: caller.shown_id(sandbox.id()).to_owned(),
            client_id: CLIENT_ID.to_owned(),
            envd_version: ENVD_VERSION.to_owned(),
            alias: caller.display_name(sandbox.template()),
            envd_access_token: secret(sandbox.agent_token()),
            traffic_access_token: secret(sandbox.traffic_token()),
            domain: self.config.domain.clone(),
            added: self.added(caller, sandbox),
        }
    }

    /// Converts a sandbox to its form in lists, as `caller` may see it.
    pub(crate) fn listed(&self, caller: &Caller, sandbox: &manager::Sandbox) -> ListedSandbox {
        ListedSandbox {
            template_id: caller.display_name(sandbox.template()),
            sandbox_id: caller.shown_id(sandbox.id()).to_owned(),
            client_id: CLIENT_ID.to_owned(),
            alias: caller.display_name(sandbox.template()),
            started_at: moment(sandbox.created_ms()),
            end_at: end_at(sandbox),
            cpu_count: sandbox.size().vcpus,
            memory_mb: sandbox.size().memory_mib,
            disk_size_mb: sandbox.size().disk_mib,
            state: sandbox.state().kind(),
            envd_version: ENVD_VERSION.to_owned(),
            metadata: sandbox.settings().metadata.clone(),
            volume_mounts: sandbox
                .settings()
                .volumes
                .iter()
                .map(VolumeMount::from)
                .collect(),
            host: self.host_of(sandbox),
            disk_failure: self.sandboxes.observe().disk_failure(sandbox.id()),
            added: self.added(caller, sandbox),
        }
    }

    /// Returns the host of the fleet that has a sandbox. `None` without a fleet, and for a sandbox
    /// of a lost host, of which this host has a stored record only.
    fn host_of(&self, sandbox: &manager::Sandbox) -> Option<String> {
        let fleet = self.fleet.as_ref()?;
        self.sandboxes.find(sandbox.id())?;
        Some(fleet.node().id().to_string())
    }

    /// Converts a sandbox to its form in a response about one sandbox. Read-only callers do not
    /// receive the token of the agent.
    pub(crate) fn detail(&self, caller: &Caller, sandbox: &manager::Sandbox) -> SandboxDetail {
        let settings = &sandbox.settings();
        let observed = self.sandboxes.observe();
        let mut listed = self.listed(caller, sandbox);
        // Lists omit the durations of steps, which are read per sandbox.
        listed.added.jiffy.steps = Some(observed.times(sandbox.id()).into());
        SandboxDetail {
            listed,
            envd_access_token: sandbox
                .agent_token()
                .filter(|_| !caller.is_read_only())
                .map(str::to_owned),
            domain: self.config.domain.clone(),
            allow_internet_access: settings.network.allow_internet_access,
            network: (&settings.network).into(),
            lifecycle: Lifecycle {
                on_timeout: settings.on_timeout,
                auto_resume: settings.auto_resume,
            },
            pause_mode: self.pause_mode(sandbox),
        }
    }
}
