//! The host's sandboxes as the gateway sees them.

use jiffy_api::{AutoResume, KeyStatus, Keys, Opening, PortRefusal, Ports, WakeError};
use jiffy_engine_api::GuestStream;
use jiffy_gateway::{ExchangePermit, OpenError, SandboxAccess, tcp_handshake};
use jiffy_proto::agent::{ENVD_PORT, TCP_PORT};
use jiffy_sandbox_manager::{OperationError, Sandbox, SandboxState, Sandboxes};
use std::sync::Arc;

/// The sandboxes of a host, each of whose ports can be reached.
pub struct GatewaySandboxes(Sandboxes, AutoResume, Arc<Keys>);

impl GatewaySandboxes {
    /// Those of `sandboxes`, which were made with `keys`, and which `auto_resume` wakes.
    pub fn new(sandboxes: Sandboxes, auto_resume: AutoResume, keys: Arc<Keys>) -> Self {
        Self(sandboxes, auto_resume, keys)
    }
}

impl Clone for GatewaySandboxes {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1.clone(), self.2.clone())
    }
}

impl jiffy_gateway::Sandboxes for GatewaySandboxes {
    type Stream = GuestStream;

    fn find(&self, id: &str) -> Option<SandboxAccess> {
        // For every request: only what it needs is copied.
        let (access, killed) = self.0.with_sandbox(id, |record| {
            let access = SandboxAccess {
                links_closed: false,
                traffic_token: record.traffic_token().map(str::to_owned),
                mask_request_host: record.settings().network.mask_request_host.clone(),
                owner: record.settings().owner.clone(),
            };
            let states = [SandboxState::Killed, SandboxState::Creating];
            (access, states.contains(record.state()))
        })?;
        let standing = self.2.standing(access.owner.as_deref());
        // Sandboxes that the end of a key kills are gone from the moment of the request.
        if killed || standing == KeyStatus::Ended {
            return None;
        }
        Some(SandboxAccess {
            links_closed: standing != KeyStatus::InForce,
            ..access
        })
    }

    fn begin(&self, access: &SandboxAccess) -> Result<ExchangePermit, String> {
        match &access.owner {
            Some(owner) => Ok(Box::new(self.1.exchange(owner)?)),
            None => Ok(Box::new(())),
        }
    }

    fn find_by_token(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        self.0.index().by_token(fits)
    }

    async fn links_closed(&self, id: &str) {
        if let Some(record) = self.0.find(id) {
            self.2.over(record.settings().owner.as_deref()).await;
        }
    }

    async fn why_gone(&self, id: &str) -> Option<OpenError> {
        match self.0.wait_decided(id).await.as_ref().map(Sandbox::state) {
            None | Some(SandboxState::Killed) => Some(OpenError::NotFound),
            Some(SandboxState::Running) => None,
            Some(_) => Some(OpenError::NotRunning),
        }
    }

    async fn open(&self, id: &str, port: u16) -> Result<GuestStream, OpenError> {
        match self.try_open(id, port).await {
            Err(error) if error != OpenError::PortClosed => {
                // One that was put to sleep at that moment is woken like one that slept before.
                let now = self.0.wait_decided(id).await;
                match now
                    .is_some_and(|r| *r.state() == SandboxState::Paused && r.settings().auto_resume)
                {
                    true => self.try_open(id, port).await,
                    false => Err(error),
                }
            }
            opened => opened,
        }
    }
}

impl GatewaySandboxes {
    async fn try_open(&self, id: &str, port: u16) -> Result<GuestStream, OpenError> {
        let record = self.0.find(id).ok_or(OpenError::NotFound)?;
        match record.state() {
            SandboxState::Running => {}
            SandboxState::Paused if record.settings().auto_resume => {
                self.1.wake(id).await.map_err(not_woken)?;
            }
            _ => return Err(OpenError::NotRunning),
        }
        let envd = u32::from(port) == ENVD_PORT;
        // Only the agent reaches servers that listen on loopback addresses.
        if !envd && let Some(stream) = self.0.connect_tcp(id, port).await {
            return Ok(stream);
        }
        let target = if envd { ENVD_PORT } else { TCP_PORT };
        let mut stream = self.0.connect(id, target).await.map_err(not_opened)?;
        if !envd {
            tcp_handshake(&mut stream, port).await?;
        }
        Ok(stream.into())
    }
}

impl Ports for GatewaySandboxes {
    fn open<'a>(&'a self, id: &'a str, port: u16) -> Opening<'a> {
        Box::pin(async move {
            let opened = jiffy_gateway::Sandboxes::open(self, id, port).await;
            opened.map_err(|e| match e {
                OpenError::PortClosed => PortRefusal::Closed(port),
                OpenError::NotFound | OpenError::NotRunning => PortRefusal::NotRunning,
                OpenError::Limit(why) => PortRefusal::Limit(why),
                OpenError::Unavailable(why) => PortRefusal::Unavailable(why),
            })
        })
    }
}

fn not_woken(error: WakeError) -> OpenError {
    match error {
        WakeError::Limit(why) => OpenError::Limit(why),
        WakeError::Operation(error) => not_opened(error),
    }
}

fn not_opened(error: OperationError) -> OpenError {
    match error {
        OperationError::Unknown { .. } => OpenError::NotFound,
        OperationError::State { .. } => OpenError::NotRunning,
        other => OpenError::Unavailable(other.to_string()),
    }
}
