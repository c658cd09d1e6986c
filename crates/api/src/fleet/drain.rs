//! Drain of a host, before it is removed or maintained. The host gives up its paused sandboxes
//! whose state is in the store, so that other hosts can resume them. Running ones are paused on
//! request.
//!
//! A *member* is a host of the fleet. The *coordinator* is the member that selects the hosts of new
//! sandboxes and declares silent members dead.

use super::forward::{BufferedCall, Purpose};
use super::lost::{is_draining, stays};
use super::{Fleet, host_lost, unavailable};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::response::Response;
use jiffy_api_types::{DrainHost, HostOperation};
use jiffy_fleet::node::Operation;
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::MemberState;
use jiffy_sandbox_manager::{Sandbox, SandboxState};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Maximum number of sandboxes that are paused at the same time.
const MAX_PAUSES: usize = 4;
/// Interval at which a drain checks whether the host is empty.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum size of the answer of the drained host.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// Maximum time until this host knows that it is draining.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(10);

impl Fleet {
    /// Returns whether this host is draining.
    pub(super) fn is_draining(&self) -> bool {
        is_draining(&self.node)
    }

    /// Drains another host: the coordinator places no more sandboxes on it, and the host gives up
    /// its sandboxes.
    pub(crate) async fn drain(
        &self,
        caller: &Caller,
        host: MemberId,
        body: DrainHost,
    ) -> Result<HostOperation, ApiError> {
        // The host drains already: the call only waits, or pauses running sandboxes.
        let is_repeated = self.node.members().row(host).map(|row| row.state)
            == Some(MemberState::Draining)
            && (body.wait || body.force);
        if !is_repeated {
            let operated = self.node.operate(Operation::Drain(host)).await;
            operated.map_err(super::operation_error)?;
        }
        let members = self.node.members();
        let row = members.row(host).filter(|row| row.state.is_live());
        let row = row.ok_or_else(|| self.host_lost(host))?;
        let mut headers = HeaderMap::new();
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::CONTENT_TYPE, json);
        let uri = format!("/fleet/nodes/{host}/drain").parse();
        let call = BufferedCall {
            method: Method::POST,
            uri: uri.map_err(|_| ApiError::internal("the path of a drain is invalid"))?,
            headers,
            body: serde_json::to_vec(&body)
                .map_err(|e| ApiError::internal(e.to_string()))?
                .into(),
            // Only administrators may drain hosts, so the call is sent with full access.
            caller: Caller::Owner,
            client: None,
            purpose: Purpose::Call,
            placement: None,
        };
        debug_assert!(caller.is_admin());
        let sent = self.send(host, &row.address, &call).await;
        let response = sent.map_err(|e| host_lost(host, &e.reason))?;
        let status = response.status();
        let bytes = axum::body::to_bytes(response.into_body(), MAX_ANSWER_BYTES).await;
        let bytes = bytes.map_err(|e| host_lost(host, &e.to_string()))?;
        if !status.is_success() {
            let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
            let message = value["message"]
                .as_str()
                .unwrap_or("it does not report why");
            return Err(unavailable(format!("{host} cannot be drained: {message}")));
        }
        serde_json::from_slice(&bytes).map_err(|e| host_lost(host, &e.to_string()))
    }

    /// Executes the drain on this host.
    pub(crate) async fn drain_own(
        &self,
        app: &App,
        body: DrainHost,
    ) -> Result<HostOperation, ApiError> {
        let own = self.node.id();
        // Another host has received the command. This host may not know yet that it is draining, so
        // wait for the new state of the members.
        let members = async {
            let mut known = self.node.members();
            while known.row(own).map(|row| row.state) != Some(MemberState::Draining) {
                known = self.node.members_changed(&known).await;
            }
        };
        let known = tokio::time::timeout(NOTICE_TIMEOUT, members).await;
        known.map_err(|_| unavailable(format!("{own} is not draining")))?;
        // A forced drain pauses the running sandboxes. A client may already wait to resume one of
        // them: this guard delays resumes on this host, so that another host resumes the sandbox.
        let _hold = body.force.then(|| app.sandboxes.hold_resumes());
        loop {
            // Repeat until the host is empty: a resume or create may have ended after the sandboxes
            // were listed.
            if body.force {
                self.pause_all(app).await?;
            }
            self.lost
                .release_stored(&self.node, &self.rows, &app.sandboxes)
                .await
                .map_err(|e| unavailable(format!("cannot give up paused sandboxes: {e}")))?;
            let all = app.sandboxes.list();
            let count = |is: fn(&Sandbox) -> bool| all.iter().filter(|s| is(s)).count() as u64;
            let running = count(|s| *s.state() == SandboxState::Running);
            let paused = count(|s| *s.state() == SandboxState::Paused && !stays(s));
            let staying = count(|s| *s.state() == SandboxState::Paused && stays(s));
            if running + paused == 0 || !(body.wait || body.force) {
                return Ok(HostOperation {
                    host: own.to_string(),
                    state: MemberState::Draining.name().to_owned(),
                    text: text(own, running, paused, staying),
                    running: Some(running),
                    unstored: Some(paused),
                });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Pauses all running sandboxes, and waits until the pauses are stored.
    async fn pause_all(&self, app: &App) -> Result<(), ApiError> {
        let all = app.sandboxes.list().into_iter();
        let all = all.filter(|s| *s.state() == SandboxState::Running);
        let mut waiting = all.map(|s| s.id().to_owned());
        let mut pausing = JoinSet::new();
        let mut failed = Vec::new();
        loop {
            while pausing.len() < MAX_PAUSES
                && let Some(id) = waiting.next()
            {
                let sandboxes = app.sandboxes.clone();
                pausing.spawn(async move {
                    let paused = match sandboxes.pause(&id).await {
                        Ok(record) => {
                            let snapshot = record.snapshot().unwrap_or_default();
                            sandboxes.snapshots().wait_stored(snapshot).await.map(drop)
                        }
                        // The sandbox has ended meanwhile.
                        Err(_)
                            if sandboxes
                                .find(&id)
                                .is_none_or(|s| *s.state() != SandboxState::Running) =>
                        {
                            Ok(())
                        }
                        Err(error) => Err(error),
                    };
                    paused.err().map(|error| format!("{id}: {error}"))
                });
            }
            match pausing.join_next().await {
                None => break,
                Some(Ok(None)) => {}
                Some(Ok(Some(error))) => failed.push(error),
                Some(Err(error)) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
        Err(unavailable(format!(
            "{} sandboxes are not paused and stored; the drain continues: {}",
            failed.len(),
            failed.join("; ")
        )))
    }

    /// Sends a resume to another host, because this host is draining. `None` if no other host
    /// receives sandboxes.
    pub(super) async fn resume_elsewhere(
        &self,
        call: &BufferedCall,
    ) -> Option<Result<Response, ApiError>> {
        let members = self.node.members();
        let up = members
            .rows
            .iter()
            .find(|row| row.state == MemberState::Up)?;
        let sent = self.send(up.id, &up.address, call).await;
        Some(sent.map_err(|e| host_lost(up.id, &e.reason)))
    }
}

/// Returns the message about a drain for the operator.
fn text(host: MemberId, running: u64, paused: u64, staying: u64) -> String {
    let mut text = format!("{host} receives no more sandboxes");
    if running > 0 {
        text += &format!(
            "; {running} sandboxes run to their end (--force pauses them, --wait waits for them)"
        );
    }
    if paused > 0 {
        text += &format!("; {paused} paused sandboxes are being stored");
    }
    if staying > 0 {
        text += &format!(
            "; {staying} paused sandboxes stay, because their volumes are on this host: they cannot be \
             resumed while its daemon is stopped"
        );
    }
    if running + paused + staying == 0 {
        text += ", and has none: its daemon can be stopped";
    }
    text
}
