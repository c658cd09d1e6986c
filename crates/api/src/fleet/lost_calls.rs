//! Calls on sandboxes whose host is dead or was removed from the fleet: this host answers from the
//! roster, the list of sandboxes that each host writes to the store.
//!
//! The *roster* of a host is the list of its sandboxes in the store, which the other hosts read if
//! the host is lost. A *verdict* is the decision that a host is dead. The *head* of a sandbox is
//! the record in the store that decides which host of a fleet may run the sandbox. A *draining*
//! host receives no new sandboxes, and gives up its stored ones: other hosts may resume them.

use super::lost::{LostSandbox, stays};
use super::route::{buffer, is_resume};
use super::{Fleet, HOST_LOST};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_engine_api::is_id;
use jiffy_fleet::roster::RosterState;
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::MemberState;
use jiffy_sandbox_manager::{Sandbox, SandboxState};
use std::ops::ControlFlow;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Maximum time for which a resume waits until a draining host gives up the sandbox. Afterwards the
/// host resumes it, unless a forced drain is in progress.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which such a resume checks the sandbox.
const RELEASE_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum time for which a kill waits for the verdict on a host that does not answer.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(20);

impl LostSandbox {
    /// Returns the error of a resume if the head shows that the lost host has resumed the sandbox
    /// after it wrote its roster.
    pub(crate) fn error_of_newer(&self, caller: &Caller) -> ApiError {
        let mut lost = self.clone();
        if lost.state == RosterState::Stored {
            lost.state = RosterState::Running;
        }
        lost.error(caller)
    }

    /// Returns the error of a call that needs the state on the lost host.
    pub(crate) fn error(&self, caller: &Caller) -> ApiError {
        let id = caller.shown_id(self.record.id());
        let message = match self.state {
            RosterState::Stored => format!(
                "sandbox {id} is paused, and {}: resume it first, on any host",
                self.cause
            ),
            RosterState::Paused => format!(
                "sandbox {id} is paused on a lost host only: {}. It is available again when the host \
                 returns; `jiffy resume --from stored {id}` uses an older state if one is stored",
                self.cause
            ),
            RosterState::Running => format!(
                "sandbox {id} ran on a lost host: {}. It continues if the host returns with it; \
                 `jiffy resume --from stored {id}` starts it from its newest stored state if one is \
                 stored",
                self.cause
            ),
        };
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_LOST, message).after(10)
    }
}

impl Fleet {
    /// Returns a sandbox of a lost host by id or name, if the caller may see it.
    pub(crate) fn lost_sandbox(&self, caller: &Caller, id: &str) -> Option<LostSandbox> {
        let lost = if is_id(id) {
            self.lost.find(id)
        } else {
            self.lost.named(caller.owner_id().as_deref(), id)
        };
        lost.filter(|lost| caller.sees(lost.record.owner()))
    }

    /// Like [`Self::lost_sandbox`], with the present rosters.
    pub(super) async fn lost_now(&self, caller: &Caller, id: &str) -> Option<LostSandbox> {
        if let Err(error) = self.lost.refresh(&self.node.members()).await {
            tracing::warn!(%error, "cannot read the sandboxes of lost hosts");
        }
        self.lost_sandbox(caller, id)
    }

    /// Returns whether a host gives up its sandboxes at present.
    pub(super) fn has_draining_member(&self) -> bool {
        let members = self.node.members();
        let mut rows = members.rows.iter();
        rows.any(|row| row.state == MemberState::Draining)
    }

    /// Gives up a paused sandbox of this host, which is draining, when it is stored and the other
    /// hosts know of the drain. Returns whether it did. A sandbox that is not paused or has volumes
    /// stays.
    pub(super) async fn gives_up(&self, app: &App, caller: &Caller, id: &str) -> bool {
        let released = async {
            loop {
                if self.releases(app, caller, id).await {
                    return true;
                }
                let sandbox = app.sandbox(caller, id, Liveness::Alive);
                let is_paused =
                    sandbox.is_ok_and(|s| *s.state() == SandboxState::Paused && !stays(&s));
                if !is_paused || !self.is_draining() || !self.lost.has_rosters() {
                    return false;
                }
                sleep(RELEASE_INTERVAL).await;
            }
        };
        timeout(RELEASE_TIMEOUT, released).await.unwrap_or(false)
    }

    /// Executes a resume on this host, which is draining, unless the host gives up the sandbox:
    /// returns the call for another host then.
    async fn resume_draining(
        &self,
        app: &App,
        caller: &Caller,
        id: &str,
        request: Request,
        next: &Next,
    ) -> Result<ControlFlow<Response, Request>, ApiError> {
        if self.gives_up(app, caller, id).await {
            return Ok(ControlFlow::Continue(request));
        }
        let (request, repeated) = repeatable(caller, request).await?;
        let response = next.clone().run(request).await;
        // A forced drain may have paused the sandbox while the resume waited for an earlier
        // operation on the sandbox.
        let is_refused = response.status() == StatusCode::SERVICE_UNAVAILABLE;
        if is_refused && self.gives_up(app, caller, id).await {
            return Ok(ControlFlow::Continue(repeated));
        }
        Ok(ControlFlow::Break(response))
    }

    /// Executes a resume of a sandbox of this host. Returns the call if another host must execute
    /// it.
    pub(super) async fn resume_own(
        &self,
        app: &App,
        caller: &Caller,
        id: &str,
        request: Request,
        next: &Next,
    ) -> Result<ControlFlow<Response, Request>, ApiError> {
        if self.is_draining() {
            return self.resume_draining(app, caller, id, request, next).await;
        }
        self.resume_here(app, caller, id, request, next).await
    }

    /// Executes a resume on this host. Returns the call again if the sandbox has left this host
    /// meanwhile. This happens if the call has waited for an earlier resume on this host, and
    /// another host has resumed the sandbox first.
    async fn resume_here(
        &self,
        app: &App,
        caller: &Caller,
        id: &str,
        request: Request,
        next: &Next,
    ) -> Result<ControlFlow<Response, Request>, ApiError> {
        let (request, repeated) = repeatable(caller, request).await?;
        let response = next.clone().run(request).await;
        let is_missing = response.status() == StatusCode::NOT_FOUND;
        if is_missing && !app.has_sandbox(caller, id) {
            return Ok(ControlFlow::Continue(repeated));
        }
        Ok(ControlFlow::Break(response))
    }

    /// Gives up the stored sandboxes of this host. Returns whether this sandbox has been given up.
    async fn releases(&self, app: &App, caller: &Caller, id: &str) -> bool {
        let released = self
            .lost
            .release_stored(&self.node, &self.rows, &app.sandboxes)
            .await;
        released.is_ok() && app.sandboxes.find(id).is_none() && {
            let lost = self.lost_sandbox(caller, id);
            lost.is_some_and(|lost| app.sandboxes.find(lost.record.id()).is_none())
        }
    }

    /// Returns the visible sandboxes of lost hosts for a list. The caller merges them with the
    /// sandboxes of live hosts.
    pub(crate) fn lost_in_list(&self, condition: impl Fn(&Sandbox) -> bool) -> Vec<Sandbox> {
        self.lost.select(condition)
    }

    /// Executes a call on a sandbox of a lost host.
    pub(super) async fn on_lost(
        &self,
        app: &App,
        caller: &Caller,
        lost: &LostSandbox,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let path = request.uri().path();
        let path = path.strip_prefix("/v2").unwrap_or(path);
        // True for `/sandboxes/ID`: the call is on the sandbox as a whole.
        let is_whole = path.trim_matches('/').split('/').count() == 2;
        match *request.method() {
            Method::GET if is_whole => Ok(Json(app.detail(caller, &lost.record)).into_response()),
            Method::DELETE if is_whole => {
                self.kill_lost(app, caller, lost).await?;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            // The handler reads the head of the sandbox, which decides whether this host may resume
            // it.
            _ if is_resume(&request) => {
                let (call, request) = buffer(caller, request).await?;
                if self.is_draining()
                    && let Some(sent) = self.resume_elsewhere(&call).await
                {
                    return sent;
                }
                let id = lost.record.id();
                let resumed = self.resume_here(app, caller, id, request, &next).await?;
                let response = match resumed {
                    ControlFlow::Break(response) => response,
                    // The head reports which host has resumed the sandbox, or that it was killed.
                    ControlFlow::Continue(request) => next.run(request).await,
                };
                if response.status().is_success() {
                    self.lost.remove(lost.record.id());
                }
                Ok(response)
            }
            _ => Err(lost.error(caller)),
        }
    }

    /// Kills a sandbox whose host does not answer, after the verdict on the host. Until then, the
    /// host may run the sandbox, so `error` is returned if there is no verdict.
    pub(super) async fn kill_after_verdict(
        &self,
        app: &App,
        caller: &Caller,
        (id, member): (&str, MemberId),
        error: ApiError,
    ) -> Result<Response, ApiError> {
        if timeout(VERDICT_TIMEOUT, self.node.until_lost(member))
            .await
            .is_err()
            || self.lost.reload(&self.node.members()).await.is_err()
        {
            return Err(error);
        }
        let lost = self.lost_sandbox(caller, id).ok_or(error)?;
        self.kill_lost(app, caller, &lost).await?;
        Ok(StatusCode::NO_CONTENT.into_response())
    }

    /// Kills a sandbox of a lost host: no host runs it again. The lost host kills it when it
    /// returns.
    async fn kill_lost(
        &self,
        app: &App,
        caller: &Caller,
        lost: &LostSandbox,
    ) -> Result<(), ApiError> {
        if caller.is_read_only() {
            return Err(ApiError::read_only());
        }
        let id = lost.record.id();
        let home = lost.host;
        app.sandboxes
            .kill_away(lost.record.owner(), id, home)
            .await?;
        self.lost.remove(id);
        Ok(())
    }
}

/// Returns the request, and a copy that can be executed later.
async fn repeatable(caller: &Caller, request: Request) -> Result<(Request, Request), ApiError> {
    let (call, request) = buffer(caller, request).await?;
    let (parts, body) = request.into_parts();
    let repeated = Request::from_parts(parts.clone(), Body::from(call.body));
    Ok((Request::from_parts(parts, body), repeated))
}
