//! Routing in a fleet: decides for each call of the API which member answers it.
//!
//! A *member* is a host of the fleet. The *coordinator* is the member that places new sandboxes.
//!
//! The head of a sandbox is the record in the shared store that decides which member may run the
//! sandbox. The roster of a host is the list of its sandboxes in the store. Each host writes its
//! own roster, and the other hosts read it when the host is lost. Paused sandboxes that a draining
//! host has given up are in one more roster.

use super::call::Call;
use super::forward::{BufferedCall, Forwarded, Purpose};
use super::objects::{Object, is_probe};
use super::streams::opens_stream;
use super::{Fleet, SANDBOX_MOVED, host_lost};
use crate::app::App;
use crate::body::MAX_BODY;
use crate::caller::{Caller, ClientAddress, SHORT_ID};
use crate::error::ApiError;
use crate::query::Query;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use jiffy_engine_api::is_id;
use jiffy_fleet::node::LocateError;
use jiffy_fleet_core::{MemberId, RowState};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::ops::ControlFlow;

/// Forwards a call to the member that has its sandbox, or merges the answers of all members.
pub(crate) async fn route(State(app): State<App>, request: Request, next: Next) -> Response {
    let Some(fleet) = app.fleet.clone() else {
        return next.run(request).await;
    };
    let caller = request.extensions().get::<Caller>().cloned();
    // Functions use the sandboxes of their own host.
    let Some(caller) = caller.filter(|caller| !matches!(caller, Caller::Function(_))) else {
        return next.run(request).await;
    };
    let is_forwarded = request.extensions().get::<Forwarded>().is_some();
    let call = Call::of_request(&request);
    let routed = match call {
        Call::List | Call::Metrics | Call::Objects(_) | Call::Sandbox(_) | Call::Events
            if !is_forwarded && let Some(host) = host_of(&request) =>
        {
            fleet.on_host(&host, &caller, request, next).await
        }
        Call::Local | Call::Events => Ok(next.run(request).await),
        Call::NewVolume | Call::Volume(_) if is_forwarded => Ok(next.run(request).await),
        Call::NewVolume => fleet.new_volume(&caller, request, next).await,
        Call::Volume(which) => fleet.on_volume(&app, &caller, &which, request, next).await,
        Call::Object(object) if is_probe(&request) => app.answer_probe(&caller, &object),
        Call::List | Call::Metrics | Call::Objects(_) | Call::Object(_) | Call::NamedTemplate
            if is_forwarded =>
        {
            Ok(next.run(request).await)
        }
        Call::Objects(listed) => fleet.merge_objects(listed, &caller, request, next).await,
        Call::Object(object) => fleet.on_object(&app, &caller, object, request, next).await,
        Call::NamedTemplate => fleet.on_named_template(&app, &caller, request, next).await,
        Call::List => fleet.list(&caller, request, next).await,
        Call::Metrics => fleet.merge_metrics(&caller, request, next).await,
        Call::Create => fleet.create(&app, &caller, request, next).await,
        Call::Compared(_) if is_forwarded => Ok(next.run(request).await),
        Call::Compared(ids) => fleet.compare(&app, &caller, &ids, request, next).await,
        Call::Lineage if is_forwarded => Ok(next.run(request).await),
        Call::Lineage => fleet.lineage(&caller, request, next).await,
        Call::Limits if is_forwarded => Ok(next.run(request).await),
        Call::Limits => fleet.merge_limits(&caller, request, next).await,
        Call::Sandbox(id) => {
            let target = (&*id, is_forwarded);
            fleet.on_sandbox(&app, &caller, target, request, next).await
        }
    };
    routed.unwrap_or_else(IntoResponse::into_response)
}

/// Returns the host to which a call is restricted.
fn host_of(request: &Request) -> Option<String> {
    let query = Query::parse(request.uri().query()?).ok()?;
    query.get("host").map(str::to_owned)
}

/// Returns whether a member answered that it does not have the sandbox.
pub(super) fn is_moved(response: &Response) -> bool {
    response.status() == StatusCode::MISDIRECTED_REQUEST
}

impl Fleet {
    /// Answers a call on one sandbox. This host answers the call if it has the sandbox. Otherwise,
    /// the coordinator's directory of sandboxes names the member that answers. If the host of the
    /// sandbox is lost, its roster contains the sandbox.
    async fn on_sandbox(
        &self,
        app: &App,
        caller: &Caller,
        (id, is_forwarded): (&str, bool),
        mut request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let is_resume = is_resume(&request);
        // After this host has returned to the fleet, the call waits until the sandbox was compared
        // with its head: another host may have resumed or killed the sandbox.
        if app.has_compared_sandbox(caller, id).await? {
            if !is_resume {
                // `rename` reserves the new name of a renamed sandbox in the fleet. It passes all
                // other calls to the handler.
                return self.rename(caller, request, next).await;
            }
            let resumed = self.resume_own(app, caller, id, request, &next);
            request = match resumed.await? {
                ControlFlow::Break(response) => return Ok(response),
                ControlFlow::Continue(request) => request,
            };
        }
        if is_forwarded {
            // A draining host forwards the resume of a sandbox after it has given up the sandbox.
            // Such a sandbox is in a roster, like the sandboxes of lost hosts.
            if is_resume
                && !self.is_draining()
                && let Some(lost) = self.lost_now(caller, id).await
            {
                return self.on_lost(app, caller, &lost, request, next).await;
            }
            return Err(ApiError::new(
                StatusCode::MISDIRECTED_REQUEST,
                SANDBOX_MOVED,
                "the sandbox is on another host",
            ));
        }
        let hash = if is_id(id) {
            self.sandbox_hash(id)
        } else {
            self.name_hash(caller.owner_id().as_deref(), id)
        };
        let located = match self.node.locate(hash).await {
            // The sandbox is in the roster of a lost host. Its head decides whether a host that
            // does not answer has resumed it since.
            Err(LocateError::Unreachable(_)) if self.lost_sandbox(caller, id).is_some() => None,
            located => located?,
        };
        let is_lost = located.as_ref().is_none_or(|place| !place.is_live);
        if is_lost && let Some(lost) = self.lost_sandbox(caller, id) {
            return self.on_lost(app, caller, &lost, request, next).await;
        }
        // `lost_sandbox` has searched the rosters that this host has in memory. The sandbox may be
        // missing there if its host has just been lost, or if a draining host has just given up the
        // sandbox. `lost_now` reads the rosters again.
        if (located.as_ref().is_some_and(|place| !place.is_live) || self.has_draining_member())
            && is_lost
            && let Some(lost) = self.lost_now(caller, id).await
        {
            return self.on_lost(app, caller, &lost, request, next).await;
        }
        // The sandbox belongs to another owner: the handler answers that it does not exist.
        if is_lost && self.lost.find(id).is_some() {
            return Ok(next.run(request).await);
        }
        let place = match located {
            Some(place) if place.member != self.node.id() => place,
            // `id` is a name or a prefix of an id. Only callers that see the sandboxes of all
            // owners may use names of other owners' sandboxes.
            None if !is_id(id) && caller.owner_scope().is_none() => {
                return self.search(caller, id, request, next).await;
            }
            // Read-only callers know only prefixes of ids.
            None if caller.is_read_only() && id.len() >= SHORT_ID => {
                return self.search(caller, id, request, next).await;
            }
            _ => return Ok(next.run(request).await),
        };
        // The host of the sandbox is lost, but the sandbox is paused and stored: its head permits
        // any host to resume it.
        if !place.is_live && place.state == RowState::Stored && is_resume {
            return Ok(next.run(request).await);
        }
        if !place.is_live {
            return Err(self.host_lost(place.member));
        }
        if opens_stream(&request) {
            let mut request = request;
            let opened = self.open_stream(app, caller, (hash, place), &mut request);
            return match opened.await? {
                Some(response) => Ok(response),
                None => Ok(next.run(request).await),
            };
        }
        let (call, request) = buffer(caller, request).await?;
        let member = place.member;
        match self.send_to_place(hash, place, &call).await {
            Ok(Some(response)) => Ok(response),
            Ok(None) => match self.lost_now(caller, id).await {
                Some(lost) => self.on_lost(app, caller, &lost, request, next).await,
                None => Ok(next.run(request).await),
            },
            Err(error) if call.method == Method::DELETE => {
                self.kill_after_verdict(app, caller, (id, member), error)
                    .await
            }
            // The host was declared dead during the call.
            Err(error) if self.is_dead(member) => match self.lost_now(caller, id).await {
                Some(lost) => self.on_lost(app, caller, &lost, request, next).await,
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Executes a comparison on a member that has one of the objects.
    async fn compare(
        &self,
        app: &App,
        caller: &Caller,
        ids: &[String],
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let is_here = |id: &String| {
            app.has_sandbox(caller, id) || app.snapshot_of_lineage(caller, id).is_ok()
        };
        let Some(first) = ids.first().filter(|_| !ids.iter().any(is_here)) else {
            return Ok(next.run(request).await);
        };
        for id in ids {
            let hash = if is_id(id) {
                self.sandbox_hash(id)
            } else {
                self.name_hash(caller.owner_id().as_deref(), id)
            };
            if self.node.locate(hash).await?.is_some() {
                let target = (&**id, false);
                return self.on_sandbox(app, caller, target, request, next).await;
            }
        }
        let object = Object::Snapshot(first.clone());
        self.on_object(app, caller, object, request, next).await
    }

    /// Returns whether a member was declared dead or removed.
    fn is_dead(&self, member: MemberId) -> bool {
        let members = self.node.members();
        members.row(member).is_some_and(|row| !row.state.is_live())
    }

    /// Executes a call on one member only.
    pub(super) async fn on_host(
        &self,
        host: &str,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let member: Option<MemberId> = host.parse().ok();
        let members = self.node.members();
        let row = member.and_then(|member| members.row(member));
        let row = row.ok_or_else(|| {
            let host = crate::lookup::short(host);
            ApiError::invalid(format!(
                "the fleet has no host `{host}`: `jiffy fleet nodes` lists the hosts"
            ))
        })?;
        if row.id == self.node.id() {
            return Ok(next.run(request).await);
        }
        if !row.state.is_live() {
            return Err(host_lost(row.id, "it is not alive"));
        }
        let sent = self.send_request(row.id, &row.address, Some(caller), request);
        let response = sent.await.map_err(|e| host_lost(row.id, &e.reason))?;
        if is_moved(&response) {
            let message = format!("host {} does not have the sandbox", row.id);
            return Err(ApiError::not_found("sandbox_not_found", message));
        }
        Ok(response)
    }

    /// Sends a call to the only member that has a sandbox with this name or prefix.
    async fn search(
        &self,
        caller: &Caller,
        id: &str,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let (call, request) = buffer(caller, request).await?;
        let probe = BufferedCall {
            method: Method::GET,
            uri: sandbox_uri(id)?,
            body: Default::default(),
            ..call.clone()
        };
        let answers = self.send_to_all(&probe, success).await;
        let found = answers
            .into_iter()
            .filter_map(|(member, address, answer)| answer.map(|()| (member, address)));
        let found: Vec<_> = found.collect();
        match &found[..] {
            [] => Ok(next.run(request).await),
            [(member, address)] => {
                let sent = self.send(*member, address, &call).await;
                sent.map_err(|e| host_lost(*member, &e.reason))
            }
            several => {
                let hosts: Vec<_> = several
                    .iter()
                    .map(|(member, _)| member.to_string())
                    .collect();
                Err(ApiError::invalid(format!(
                    "several sandboxes on the hosts {} have this name or prefix: use a complete id",
                    hosts.join(", ")
                )))
            }
        }
    }
}

/// Returns the path of a sandbox.
fn sandbox_uri(id: &str) -> Result<Uri, ApiError> {
    let uri = format!("/sandboxes/{}", utf8_percent_encode(id, NON_ALPHANUMERIC)).parse();
    uri.map_err(|_| ApiError::invalid("the path is invalid"))
}

/// Returns `Some` for a successful response.
pub(super) async fn success(response: Response) -> Option<()> {
    response.status().is_success().then_some(())
}

pub(super) fn is_resume(request: &Request) -> bool {
    let path = request.uri().path();
    request.method() == Method::POST && (path.ends_with("/resume") || path.ends_with("/connect"))
}

/// Reads the body of a call. Returns the call for other members, and the request for this one.
pub(super) async fn buffer(
    caller: &Caller,
    request: Request,
) -> Result<(BufferedCall, Request), ApiError> {
    let (parts, body) = request.into_parts();
    let read = Limited::new(body, MAX_BODY).collect().await;
    let body = read.map(http_body_util::Collected::to_bytes).map_err(|e| {
        if e.is::<LengthLimitError>() {
            ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "body_too_large",
                format!("the body exceeds the maximum of {MAX_BODY} bytes"),
            )
        } else {
            ApiError::invalid("the body of the request ended early")
        }
    })?;
    let call = BufferedCall {
        method: parts.method.clone(),
        uri: parts.uri.clone(),
        headers: parts.headers.clone(),
        body: body.clone(),
        caller: caller.clone(),
        client: parts.extensions.get::<ClientAddress>().map(|a| a.0),
        purpose: Purpose::Call,
        placement: None,
    };
    let mut request = Request::from_parts(parts, Body::from(body));
    let length = HeaderValue::from(call.body.len());
    if !call.body.is_empty() {
        request.headers_mut().insert(header::CONTENT_LENGTH, length);
    }
    Ok((call, request))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_in_the_path_of_a_sandbox_is_encoded() {
        assert_eq!(sandbox_uri("a-b").unwrap().to_string(), "/sandboxes/a%2Db");
    }
}
