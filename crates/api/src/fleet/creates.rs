//! Creates in a fleet: makes names unique per owner on all members, and idempotency keys valid on
//! all members. Names and keys have rows in the fleet's directory, which its coordinator reserves.
//!
//! A *member* is a host of the fleet. The *coordinator* is the member of the fleet that selects the
//! hosts of new sandboxes and declares silent members dead. An *admission* is the permission of the
//! coordinator for one new sandbox on a host. A *row* is the entry of a sandbox or of a name in the
//! directory of the fleet.

use super::forward::{AdmittedCreate, BufferedCall, Forwarded};
use super::placement::name_taken;
use super::route::buffer;
use super::{Fleet, host_lost, unavailable};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::idempotency::key_of;
use axum::Json;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_fleet::node::ReserveError;
use jiffy_fleet_core::{MemberId, SandboxHash};
use jiffy_sandbox_manager::Creation;
use serde::Deserialize;

/// Field of a body that names a sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Named {
    name: Option<String>,
}

/// Returns the names in the body of a call. The handler rejects malformed bodies.
fn names_in(call: &BufferedCall) -> Named {
    crate::body::parse_part(&call.body).unwrap_or_default()
}

impl Fleet {
    /// Creates a sandbox on the host that the coordinator selects, or on this one if another member
    /// has forwarded the call.
    pub(super) async fn create(
        &self,
        app: &App,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let is_forwarded = request.extensions().get::<Forwarded>().is_some();
        let admitted = request.extensions().get::<AdmittedCreate>().cloned();
        let (call, request) = buffer(caller, request).await?;
        let owner = caller.owner_id();
        let key = key_of(&call.headers)?;
        let key = key.map(|key| self.idempotency_hash(owner.as_deref(), &key));
        if !is_forwarded {
            let name = names_in(&call).name.filter(|name| !name.is_empty());
            let rows = (name.as_deref(), key);
            let call = (call, request);
            return self.create_anywhere(app, caller, call, rows, next).await;
        }
        if let Some(AdmittedCreate(admission)) = admitted {
            // The coordinator has reserved the rows for this host.
            let accepted = self.node.accept_placement(admission).await;
            accepted.map_err(|error| ApiError::host_busy(error.to_string()))?;
            return Ok(next.run(request).await);
        }
        // A client may have sent the create with the same key to another member before. That member
        // then has the row of the key.
        if let Some(hash) = key
            && let Some(member) = self.reserve(hash).await?
        {
            return Err(unavailable(format!(
                "{member} executes a create with this `Idempotency-Key`: retry"
            )));
        }
        self.reserve_name(caller, &call).await?;
        Ok(next.run(request).await)
    }

    /// Executes a call on a sandbox of this member, after the reservation of a new name.
    pub(super) async fn rename(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        if *request.method() != Method::PATCH {
            return Ok(next.run(request).await);
        }
        let (call, request) = buffer(caller, request).await?;
        self.reserve_name(caller, &call).await?;
        Ok(next.run(request).await)
    }

    /// Reserves the name in a body for a sandbox of this member.
    async fn reserve_name(&self, caller: &Caller, call: &BufferedCall) -> Result<(), ApiError> {
        let name = names_in(call).name.filter(|name| !name.is_empty());
        let Some(name) = name else {
            return Ok(());
        };
        let hash = self.name_hash(caller.owner_id().as_deref(), &name);
        match self.reserve(hash).await? {
            None => Ok(()),
            Some(_) => Err(name_taken(&name)),
        }
    }

    /// Reserves a row. Returns the other member that has it.
    pub(super) async fn reserve(&self, hash: SandboxHash) -> Result<Option<MemberId>, ApiError> {
        match self.node.reserve(hash).await {
            Ok(()) => Ok(None),
            // The handler of this member checks whether one of its own sandboxes has the name.
            Err(ReserveError::Taken(member)) if member == self.node.id() => Ok(None),
            Err(ReserveError::Taken(member)) => Ok(Some(member)),
            Err(e @ ReserveError::NoCoordinator) => Err(unavailable(format!(
                "names, private networks and idempotency keys cannot be checked: {e}"
            ))),
        }
    }

    /// Sends a create to a particular host, without an attempt on another host if that fails.
    pub(super) async fn forward_to(
        &self,
        member: MemberId,
        call: &BufferedCall,
    ) -> Result<Response, ApiError> {
        let members = self.node.members();
        let row = members.row(member).filter(|row| row.state.is_live());
        let row = row.ok_or_else(|| host_lost(member, "it was declared dead"))?;
        let sent = self.send(member, &row.address, call).await;
        sent.map_err(|e| host_lost(member, &e.reason))
    }
}

impl App {
    /// Returns the answer to an earlier create with an idempotency key, from the record of its
    /// sandbox. `None` if no sandbox was created with the key, or this host is in no fleet.
    pub(crate) fn earlier_create(
        &self,
        caller: &Caller,
        key: &str,
        request: &[u8; 32],
    ) -> Option<Result<Response, ApiError>> {
        let fleet = self.fleet.as_ref()?;
        let hash = fleet.idempotency_hash(caller.owner_id().as_deref(), key);
        let sandbox = self.sandboxes.find(&fleet.rows.created_with(hash)?)?;
        let creation = sandbox.settings().creation.as_ref()?;
        if creation.is_expired() {
            return None;
        }
        if creation.request != Creation::digest_text(request) {
            return Some(Err(crate::idempotency::key_reused()));
        }
        let answer = self.answer(caller, &sandbox);
        Some(Ok((StatusCode::CREATED, Json(answer)).into_response()))
    }

    /// Returns the record of an idempotency key for a new sandbox, in a fleet only.
    pub(crate) fn creation(&self, key: &str, request: &[u8; 32]) -> Option<Creation> {
        self.fleet.as_ref()?;
        Some(Creation::new(key, request))
    }
}
