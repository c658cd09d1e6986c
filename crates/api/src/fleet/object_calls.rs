//! Executes calls on snapshots, templates and other objects that another member has: sends probes,
//! and forwards the call to the member that answers best.
//!
//! A *member* is a host of the fleet. A *probe* requests only the quality of the best match
//! among the member's objects. The member does not execute the call. The *home* of an object is the
//! member that manages it.

use super::forward::{BufferedCall, Forwarded, Purpose, prepare};
use super::objects::{Match, Object};
use super::route::buffer;
use super::{Fleet, ForwardError, host_lost, unavailable};
use crate::app::App;
use crate::caller::{Caller, ClientAddress};
use crate::error::ApiError;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use jiffy_fleet_core::MemberId;
use serde::Deserialize;

/// Maximum size of the answer to a probe.
const MAX_PROBE_BYTES: usize = 1024;
/// Reason of an error for a template whose home (the member that manages it) is dead.
const HOME_LOST: &str = "it has the builds of the template, and was declared dead";

/// Fields of bodies, one of which names a template.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Named {
    name: Option<String>,
    alias: Option<String>,
    target: Option<String>,
}

/// Returns the answer to a probe. The outer `None` is no answer.
pub(super) async fn read_probe(response: Response) -> Option<Option<Match>> {
    if !response.status().is_success() {
        return None;
    }
    let body = to_bytes(response.into_body(), MAX_PROBE_BYTES).await.ok()?;
    serde_json::from_slice(&body).ok()
}

/// Returns whether an object could not be removed. An object that was removed meanwhile is no
/// failure.
fn is_failure(response: &Response) -> bool {
    !response.status().is_success() && response.status() != StatusCode::NOT_FOUND
}

/// Returns the response of a removal on several members: a failure, or else a success.
fn better_of(before: Option<Response>, new: Response) -> Response {
    match before {
        Some(before) if before.status().is_success() && !is_failure(&new) => before,
        _ => new,
    }
}

/// Members that have an object.
struct Holders {
    /// Other members, with their addresses, in the order of their ids.
    others: Vec<(MemberId, String, Match)>,
    /// Live members that did not answer.
    missing: Vec<MemberId>,
}

impl Holders {
    /// Returns the other member with the best match.
    fn best(&self) -> Option<&(MemberId, String, Match)> {
        // `max_by_key` returns the last of equal matches. The order is reversed, so that it returns
        // the match of the member with the lowest id.
        self.others.iter().rev().max_by_key(|(_, _, found)| *found)
    }

    /// Fails if a host did not answer, because the object may exist there.
    fn expect_complete(&self) -> Result<(), ApiError> {
        if self.missing.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = self.missing.iter().map(ToString::to_string).collect();
        Err(unavailable(format!(
            "hosts that may have the object do not answer: {}",
            names.join(", ")
        )))
    }
}

impl Fleet {
    /// Executes a call on an object on the member that has it.
    pub(super) async fn on_object(
        &self,
        app: &App,
        caller: &Caller,
        object: Object,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let local = app.object_match(caller, &object)?;
        // All copies of a removed object are removed.
        let removes = request.method() == Method::DELETE && matches!(object, Object::Template(_));
        // No other member can have a better match.
        if !removes && local.is_some_and(|found| object.is_decided(found)) {
            return Ok(next.run(request).await);
        }
        if let Object::Template(text) = &object
            && let Some(named) = self.named_template(caller, text)
            && !removes
        {
            if named.home == self.node.id() {
                return Ok(next.run(request).await);
            }
            let row = self.node.members().row(named.home).cloned();
            match row.filter(|row| row.state.is_live()) {
                Some(row) => {
                    let sent = self.send_request(row.id, &row.address, Some(caller), request);
                    return sent.await.map_err(|error| host_lost(row.id, &error.reason));
                }
                // A build of a template with this name (`POST /templates`) does not need the dead
                // home.
                None if request.uri().path().ends_with("/templates") => {}
                None => return Err(host_lost(named.home, HOME_LOST)),
            }
        }
        let holders = self.holders(probe_of(caller, &request), &object).await?;
        if removes {
            return self.remove(caller, local, holders, request, next).await;
        }
        let best = holders.best();
        let is_remote = best.is_some_and(|(_, _, found)| local.is_none_or(|own| *found > own));
        if let (true, Some((member, address, found))) = (is_remote, best) {
            // A member that did not answer could have a better match.
            if !object.is_decided(*found) {
                holders.expect_complete()?;
            }
            let sent = self
                .send_request(*member, address, Some(caller), request)
                .await;
            return sent.map_err(|error| host_lost(*member, &error.reason));
        }
        // A read of a shared object gives the same result on all members that have it.
        let is_read = request.method() == Method::GET && local.is_some();
        if !is_read {
            holders.expect_complete()?;
        }
        Ok(next.run(request).await)
    }

    /// Executes a call whose body names a template.
    pub(super) async fn on_named_template(
        &self,
        app: &App,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let (call, request) = buffer(caller, request).await?;
        let named: Named = crate::body::parse_part(&call.body).unwrap_or_default();
        let name = named.target.or(named.name).or(named.alias);
        match name.filter(|name| !name.is_empty()) {
            Some(name) => {
                let object = Object::Template(name);
                self.on_object(app, caller, object, request, next).await
            }
            // The handler rejects the call.
            None => Ok(next.run(request).await),
        }
    }

    /// Returns the other members that have the template or snapshot `id`, from which a call creates
    /// a sandbox. If objects of several owners have this name, objects of the caller precede shared
    /// ones.
    ///
    /// # Errors
    /// An error if no member has it, and a member that may have it does not answer.
    pub(super) async fn places_of_origin(
        &self,
        call: &BufferedCall,
        id: &str,
    ) -> Result<Vec<MemberId>, ApiError> {
        if let Some(named) = self.named_template(&call.caller, id) {
            let row = self.node.members().row(named.home).cloned();
            return match row.filter(|row| row.state.is_live()) {
                Some(row) => Ok(vec![row.id]),
                None => Err(host_lost(named.home, HOME_LOST)),
            };
        }
        let object = Object::Template(id.to_owned());
        let holders = self.holders(call.clone(), &object).await?;
        let Some((_, _, best)) = holders.best() else {
            return holders.expect_complete().map(|()| Vec::new());
        };
        let equal = holders.others.iter();
        let equal = equal.filter(|(_, _, found)| found.precedence == best.precedence);
        Ok(equal.map(|(member, ..)| *member).collect())
    }

    /// Removes all copies of an object, and then the object of its home. If the removal of a copy
    /// fails, the object still exists at its home, so that the caller can repeat the call.
    async fn remove(
        &self,
        caller: &Caller,
        local: Option<Match>,
        holders: Holders,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        holders.expect_complete()?;
        // If several objects have this name, the call is about those with the highest precedence.
        let of = |found: &Match| found.precedence;
        let others = holders.others.iter().map(|(_, _, found)| of(found));
        let Some(precedence) = others.chain(local.as_ref().map(of)).max() else {
            return Ok(next.run(request).await);
        };
        let mut others = holders.others;
        others.retain(|(_, _, found)| found.precedence == precedence);
        others.sort_by_key(|(_, _, found)| found.is_home);
        let local = local.filter(|found| found.precedence == precedence);
        let (call, request) = buffer(caller, request).await?;
        let mut removed = None;
        let (copies, homes): (Vec<_>, Vec<_>) = others.iter().partition(|(_, _, m)| !m.is_home);
        let send = async |(member, address, _): &(MemberId, String, Match)| {
            let sent = self.send(*member, address, &call).await;
            sent.map_err(|error| host_lost(*member, &error.reason))
        };
        for copy in copies {
            let response = better_of(removed.take(), send(copy).await?);
            if is_failure(&response) {
                return Ok(response);
            }
            removed = Some(response);
        }
        if local.is_some() {
            let response = better_of(removed.take(), next.run(request).await);
            if is_failure(&response) {
                return Ok(response);
            }
            removed = Some(response);
        }
        for home in homes {
            let response = better_of(removed.take(), send(home).await?);
            if is_failure(&response) {
                return Ok(response);
            }
            removed = Some(response);
        }
        removed.ok_or_else(|| ApiError::internal("no member removed the object"))
    }

    /// Sends a probe to all other members.
    async fn holders(&self, mut probe: BufferedCall, object: &Object) -> Result<Holders, ApiError> {
        (probe.method, probe.uri) = object.probe()?;
        probe.body = Default::default();
        probe.purpose = Purpose::Probe;
        let mut holders = Holders {
            others: Vec::new(),
            missing: Vec::new(),
        };
        for (member, address, answer) in self.send_to_all(&probe, read_probe).await {
            match answer {
                Some(Some(found)) => holders.others.push((member, address, found)),
                Some(None) => {}
                None => holders.missing.push(member),
            }
        }
        holders.others.sort_by_key(|(member, _, _)| *member);
        holders.missing.sort();
        Ok(holders)
    }

    /// Forwards an upload to the member that its link names. Returns the request if this member is
    /// the receiver.
    pub(crate) async fn forward_upload(
        &self,
        host: Option<&str>,
        request: Request,
    ) -> Result<Result<Response, Request>, ApiError> {
        let is_forwarded = request.extensions().get::<Forwarded>().is_some();
        let member: Option<MemberId> = host.and_then(|host| host.parse().ok());
        let Some(member) = member.filter(|id| *id != self.node.id() && !is_forwarded) else {
            return Ok(Err(request));
        };
        let row = self.node.members().row(member).cloned();
        let row = row.filter(|row| row.state.is_live());
        let row = row.ok_or_else(|| host_lost(member, "it is not alive"))?;
        let sent = self.send_request(member, &row.address, None, request).await;
        sent.map(Ok)
            .map_err(|error| host_lost(member, &error.reason))
    }

    /// Forwards a call whose body is streamed. The call is sent once, because the body cannot be
    /// sent again.
    pub(super) async fn send_request(
        &self,
        member: MemberId,
        address: &str,
        caller: Option<&Caller>,
        mut request: Request<Body>,
    ) -> Result<Response, ForwardError> {
        let length = request.headers().get(header::CONTENT_LENGTH).cloned();
        let client = request.extensions().get::<ClientAddress>().map(|a| a.0);
        prepare(&mut request, caller, client);
        if let Some(length) = length {
            let name = header::CONTENT_LENGTH;
            request.headers_mut().insert(name, length);
        }
        request.extensions_mut().clear();
        self.until_answered(member, self.forwarder.forward(member, address, request))
            .await
    }
}

/// Returns a probe with the headers of a request. [`Fleet::holders`] sets its method and its path.
fn probe_of(caller: &Caller, request: &Request) -> BufferedCall {
    BufferedCall {
        method: request.method().clone(),
        uri: request.uri().clone(),
        headers: request.headers().clone(),
        body: Default::default(),
        caller: caller.clone(),
        client: request.extensions().get::<ClientAddress>().map(|a| a.0),
        purpose: Purpose::Probe,
        placement: None,
    }
}
