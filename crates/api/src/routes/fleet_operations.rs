//! Calls for operators' commands on the hosts of a fleet: drain, removal and others.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. In a
//! *mass silence*, more than half of the hosts are silent, and none is declared dead. The *records*
//! of the fleet are the small objects by which the hosts agree.

use super::fleet::fleet_of;
use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::{Fleet, Forwarded, operation_error};
use axum::extract::{Path, State};
use axum::{Extension, Json};
use jiffy_api_types::{AcceptedRestore, DrainHost, HostOperation};
use jiffy_fleet::node::Operation;
use jiffy_fleet_core::MemberId;

fn host_of(text: &str) -> Result<MemberId, ApiError> {
    text.parse().map_err(|_| {
        let text = crate::lookup::short(text);
        ApiError::invalid(format!(
            "`{text}` is not the number of a host: use a number as `h2`"
        ))
    })
}

/// Executes a command, and returns its result with `text`.
async fn operate(
    fleet: &Fleet,
    operation: Operation,
    text: String,
) -> Result<HostOperation, ApiError> {
    let operated = fleet.node().operate(operation).await;
    operated.map_err(operation_error)?;
    Ok(HostOperation {
        host: operation.member().to_string(),
        state: operation.state().name().to_owned(),
        text,
        ..HostOperation::default()
    })
}

/// `POST /fleet/nodes/{host}/drain`: the host receives no more sandboxes.
pub(super) async fn drain(
    State(app): State<App>,
    caller: Caller,
    Path(host): Path<String>,
    forwarded: Option<Extension<Forwarded>>,
    Optional(body): Optional<DrainHost>,
) -> Result<Json<HostOperation>, ApiError> {
    let fleet = fleet_of(&app, &caller, "draining a host")?;
    let host = host_of(&host)?;
    let is_own = host == fleet.node().id();
    if is_own && forwarded.is_some() {
        return Ok(Json(fleet.drain_own(&app, body).await?));
    }
    if is_own {
        return Err(ApiError::conflict(
            "refused",
            format!("{host} cannot drain itself: run the command on another host of the fleet"),
        ));
    }
    Ok(Json(fleet.drain(&caller, host, body).await?))
}

/// `POST /fleet/nodes/{host}/undrain`: the host receives sandboxes again.
pub(super) async fn undrain(
    State(app): State<App>,
    caller: Caller,
    Path(host): Path<String>,
) -> Result<Json<HostOperation>, ApiError> {
    let fleet = fleet_of(&app, &caller, "ending the drain of a host")?;
    let host = host_of(&host)?;
    let text = format!("{host} receives sandboxes again");
    Ok(Json(operate(fleet, Operation::Undrain(host), text).await?))
}

/// `POST /fleet/nodes/{host}/remove`: a dead host, or a front, leaves the fleet.
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(host): Path<String>,
) -> Result<Json<HostOperation>, ApiError> {
    let fleet = fleet_of(&app, &caller, "removing a host")?;
    let host = host_of(&host)?;
    if host.is_front() {
        fleet.check_front(host).await?;
        let text = format!("{host} was removed from the fleet: no host accepts its certificate");
        return Ok(Json(operate(fleet, Operation::Remove(host), text).await?));
    }
    let text = format!(
        "{host} was removed from the fleet. It still has the keys of the store: rotate them with \
         `jiffy store rotate` if the host is not trusted"
    );
    Ok(Json(operate(fleet, Operation::Remove(host), text).await?))
}

/// `POST /fleet/nodes/{host}/confirm-dead`: a silent host is declared dead, also during mass
/// silence.
pub(super) async fn confirm_dead(
    State(app): State<App>,
    caller: Caller,
    Path(host): Path<String>,
) -> Result<Json<HostOperation>, ApiError> {
    let fleet = fleet_of(&app, &caller, "declaring a host dead")?;
    let host = host_of(&host)?;
    let text = format!("{host} is dead: its stored paused sandboxes can resume on other hosts");
    let operation = Operation::ConfirmDead(host);
    Ok(Json(operate(fleet, operation, text).await?))
}

/// `POST /fleet/accept-restore`: all hosts accept records that are older than the records that they
/// have read before.
pub(super) async fn accept_restore(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<AcceptedRestore>, ApiError> {
    let fleet = fleet_of(&app, &caller, "accepting restored records")?;
    let accepted = fleet.node().accept_restore_everywhere().await;
    let (accepted, missing) = accepted.map_err(operation_error)?;
    let names = |hosts: &[MemberId]| hosts.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (accepted, missing) = (names(&accepted), names(&missing));
    if accepted.is_empty() {
        let message = if missing.is_empty() {
            "the records are not older than the records that the hosts have read before".to_owned()
        } else {
            format!(
                "no host has read newer records before; {} did not answer: repeat the command when \
                 they answer",
                missing.join(", ")
            )
        };
        return Err(ApiError::conflict("refused", message));
    }
    let mut text = format!("{} accept the records", accepted.join(", "));
    if !missing.is_empty() {
        text += &format!(
            "; {} did not answer: repeat the command",
            missing.join(", ")
        );
    }
    Ok(Json(AcceptedRestore {
        accepted,
        missing,
        text,
    }))
}
