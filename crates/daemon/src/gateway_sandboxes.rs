//! [`GatewaySandboxes`]: implements the gateway's interface to the sandboxes of this host. The
//! gateway calls it for each request of a client to a sandbox.

use jiffy_api::{
    AutoResume, COMPARISON_TIMEOUT, KeyStatus, Keys, Opening, PortRefusal, Ports, ResumeError,
};
use jiffy_engine_api::GuestStream;
use jiffy_gateway::{ExchangePermit, OpenError, SandboxAccess, SandboxUse, tcp_handshake};
use jiffy_proto::agent::{ENVD_PORT, TCP_PORT};
use jiffy_sandbox_manager::{OperationError, Sandbox, SandboxState, SandboxStream, Sandboxes};
use std::sync::Arc;

/// Sandboxes of the host, as the gateway accesses them.
#[derive(Clone)]
pub struct GatewaySandboxes {
    sandboxes: Sandboxes,
    /// Resumes paused sandboxes, and counts the in-flight requests of each owner.
    auto_resume: AutoResume,
    keys: Arc<Keys>,
}

impl GatewaySandboxes {
    /// Gives access to `sandboxes`, except for sandboxes of terminated keys. `keys` contains the
    /// status of all keys. `auto_resume` resumes paused sandboxes.
    pub fn new(sandboxes: Sandboxes, auto_resume: AutoResume, keys: Arc<Keys>) -> Self {
        Self {
            sandboxes,
            auto_resume,
            keys,
        }
    }
}

impl jiffy_gateway::Sandboxes for GatewaySandboxes {
    type Stream = SandboxStream;

    fn find(&self, id: &str) -> Option<SandboxAccess> {
        // This function is called for every request, so it copies only the required fields.
        let (access, is_hidden) = self.sandboxes.with_sandbox(id, |record| {
            let access = SandboxAccess {
                // The code below sets this field, because the status of the key is not read under
                // the lock of the sandbox.
                links_revoked: false,
                traffic_token: record.traffic_token().map(str::to_owned),
                mask_request_host: record.settings().network.mask_request_host.clone(),
                https_ports: record.settings().network.https_ports.clone(),
                owner: record.settings().owner.clone(),
                counts_uses: record.settings().idle_timeout_s.is_some(),
            };
            let states = [SandboxState::Killed, SandboxState::Creating];
            (access, states.contains(record.state()))
        })?;
        let key_status = self.keys.status(access.owner.as_deref());
        // Sandboxes of a terminated key are inaccessible before they are killed.
        if is_hidden || key_status == KeyStatus::Ended {
            return None;
        }
        Some(SandboxAccess {
            links_revoked: key_status != KeyStatus::InForce,
            ..access
        })
    }

    fn begin(&self, access: &SandboxAccess) -> Result<ExchangePermit, String> {
        match &access.owner {
            Some(owner) => Ok(Box::new(self.auto_resume.exchange(owner)?)),
            None => Ok(Box::new(())),
        }
    }

    fn begin_use(&self, id: &str, port: u16) -> SandboxUse {
        match self.sandboxes.uses_of(id) {
            // Requests to the agent include open terminals, watchers and commands. The traffic of
            // their streams counts, and the agent reports running commands.
            Some(uses) if u32::from(port) == ENVD_PORT => {
                uses.record();
                Box::new(())
            }
            Some(uses) => Box::new(uses.begin()),
            None => Box::new(()),
        }
    }

    fn find_by_token(&self, matches: impl Fn(&str) -> bool) -> Option<String> {
        self.sandboxes.index().by_token(matches)
    }

    async fn links_revoked(&self, id: &str) {
        if let Some(record) = self.sandboxes.find(id) {
            self.keys
                .until_invalid(record.settings().owner.as_deref())
                .await;
        }
    }

    async fn not_running_reason(&self, id: &str) -> Option<OpenError> {
        // An operation in flight may change the state, so wait until it has ended.
        match self
            .sandboxes
            .wait_decided(id)
            .await
            .as_ref()
            .map(Sandbox::state)
        {
            None | Some(SandboxState::Killed) => Some(OpenError::NotFound),
            Some(SandboxState::Running) => None,
            Some(_) => Some(OpenError::NotRunning),
        }
    }

    async fn open(&self, id: &str, port: u16) -> Result<SandboxStream, OpenError> {
        let opened = match self.try_open(id, port).await {
            // A closed port means that the sandbox is running.
            Err(error) if error != OpenError::PortClosed => {
                // The sandbox may have been paused during the attempt, or a pause may be in flight,
                // whose end `wait_decided` awaits. The sandbox is then resumed in the same way as a
                // sandbox that was paused before the attempt.
                let sandbox = self.sandboxes.wait_decided(id).await;
                let is_resumable = sandbox.is_some_and(|s| {
                    *s.state() == SandboxState::Paused && s.settings().auto_resume
                });
                if is_resumable {
                    self.try_open(id, port).await
                } else {
                    Err(error)
                }
            }
            result => result,
        };
        Ok(SandboxStream::new(
            opened?,
            self.sandboxes.uses_of(id),
            port,
        ))
    }
}

impl GatewaySandboxes {
    /// Opens a stream to a port of a sandbox: over its network interface if possible, otherwise
    /// through its agent.
    async fn try_open(&self, id: &str, port: u16) -> Result<GuestStream, OpenError> {
        // Another host of the fleet may have resumed the sandbox while this host was cut off. The
        // sandbox manager therefore compares the sandboxes with the records in the store first.
        if !self.sandboxes.until_compared(id, COMPARISON_TIMEOUT).await {
            let reason = "its host compares its sandboxes with the store: retry";
            return Err(OpenError::Unavailable(reason.to_owned()));
        }
        let record = self.sandboxes.find(id).ok_or(OpenError::NotFound)?;
        match record.state() {
            SandboxState::Running => {}
            SandboxState::Paused if record.settings().auto_resume => {
                self.auto_resume
                    .ensure_running(id)
                    .await
                    .map_err(resume_error)?;
            }
            _ => return Err(OpenError::NotRunning),
        }
        let is_agent = u32::from(port) == ENVD_PORT;
        // If the connection over the network interface fails, the agent connects to the port. For
        // example, servers on loopback addresses are only accessible through the agent.
        if !is_agent && let Some(stream) = self.sandboxes.connect_tcp(id, port).await {
            return Ok(stream);
        }
        // The agent forwards streams on `TCP_PORT` to the port that the handshake names.
        let target = if is_agent { ENVD_PORT } else { TCP_PORT };
        let mut stream = self
            .sandboxes
            .connect(id, target)
            .await
            .map_err(operation_error)?;
        if !is_agent {
            tcp_handshake(&mut stream, port).await?;
        }
        Ok(stream.into())
    }
}

impl Ports for GatewaySandboxes {
    fn open<'a>(&'a self, id: &'a str, port: u16) -> Opening<'a> {
        Box::pin(async move {
            let result = jiffy_gateway::Sandboxes::open(self, id, port).await;
            result.map_err(|e| match e {
                OpenError::PortClosed => PortRefusal::Closed(port),
                OpenError::NotFound | OpenError::NotRunning => PortRefusal::NotRunning,
                OpenError::Limit(reason) => PortRefusal::Limit(reason),
                OpenError::Unavailable(reason) => PortRefusal::Unavailable(reason),
            })
        })
    }
}

fn resume_error(error: ResumeError) -> OpenError {
    match error {
        ResumeError::Limit(reason) => OpenError::Limit(reason),
        ResumeError::Operation(error) => operation_error(error),
    }
}

fn operation_error(error: OperationError) -> OpenError {
    match error {
        OperationError::Unknown { .. } => OpenError::NotFound,
        OperationError::State { .. } => OpenError::NotRunning,
        other => OpenError::Unavailable(other.to_string()),
    }
}
