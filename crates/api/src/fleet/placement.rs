//! Selection of the host of a new sandbox in a fleet, from the side of the host that received the
//! create.
//!
//! The *coordinator* is the member that selects the host. It also admits the sandbox to the budgets
//! of its owner. A *budget* is one limit of one key on all hosts. A *share* is the part of it that
//! one member may use. If a budget is exhausted, the coordinator *recalls* unused parts of shares.
//! The selected host checks its own free resources last. After a rejection, the next host is tried.
//! A *member* is a host of the fleet. A *row* is the entry of a sandbox or of a name in the
//! coordinator's directory. The *tables* of the fleet contain API keys and template names. Each
//! member has a copy in memory.

use super::create_answer::{error_of, read};
use super::forward::BufferedCall;
use super::scope::{self, Scope};
use super::why::LocalDecision;
use super::{FLEET_UNAVAILABLE, Fleet, host_lost, unavailable};
use crate::app::App;
use crate::body::parse_part;
use crate::caller::Caller;
use crate::error::{ApiError, HOST_BUSY, HOST_LOST};
use crate::lookup::{Origin, short};
use crate::quota::{BUDGET_TIMEOUT, fleet_needs, fleet_refusal, running};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use jiffy_api_types::{NewSandbox, OnTimeout};
use jiffy_engine_api::{EngineName, SandboxSize};
use jiffy_fleet::node::{NotPlaced, PlaceError, PlaceRequest, Placed, PlacementEnd};
use jiffy_fleet_core::record::HostLabel;
use jiffy_fleet_core::{MemberId, SandboxHash};
use jiffy_sandbox_manager::QuotaAmount;
use std::time::{Duration, Instant};

/// Maximum number of hosts that are tried for one sandbox.
const MAX_HOSTS: usize = 3;
/// Maximum number of hosts to which a create is restricted.
const MAX_ALLOWED: usize = 16;
/// Pause before a request is repeated while unused shares are recalled.
const RECALL_PAUSE: Duration = Duration::from_millis(250);
/// Maximum time for which a taken name is requested again although its host has no such sandbox.
/// The report of its end may be in transit to the coordinator.
const TRANSIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before such a name is requested again.
const TRANSIT_PAUSE: Duration = Duration::from_millis(20);
/// Size with which the coordinator selects a host if this host does not have the template, and so
/// does not know its size.
const USUAL_SIZE: SandboxSize = SandboxSize {
    vcpus: 2,
    memory_mib: 512,
    disk_mib: 1024,
};

/// Member that executes a create.
enum Target {
    /// The host that the coordinator has selected.
    Placed(Box<Placed>),
    /// The member that has received the same create before.
    Received(MemberId),
    /// This host, because no coordinator is available.
    Own,
}

/// Create that is being placed, with the results of earlier attempts.
struct Create {
    request: PlaceRequest,
    /// Members that may run the sandbox, in addition to the restrictions of the request.
    scope: Scope,
    template: String,
    /// This host has the template or snapshot.
    is_origin_local: bool,
    /// Probes have determined the hosts with the template, because heartbeats did not contain it.
    has_asked: bool,
    /// A budget was exhausted before, and the create has waited for a recall of unused shares.
    has_waited: bool,
    /// Time at which attempts end.
    deadline: Instant,
    /// Hosts that rejected the create, with their reasons.
    rejections: Vec<String>,
    /// Answer of the last host.
    last: Option<Response>,
}

impl App {
    /// Returns the request for a host of a new sandbox.
    fn create_of(
        &self,
        fleet: &Fleet,
        caller: &Caller,
        body: &NewSandbox,
        (scope, volume_host): (Scope, Option<MemberId>),
    ) -> Create {
        let id = &*body.template_id;
        let origin = self.origin(caller, id);
        let size = match &origin {
            Ok(Origin::Template(info)) => info.size,
            Ok(Origin::Snapshot(snapshot)) => snapshot.size(),
            Err(_) => USUAL_SIZE,
        };
        let size = SandboxSize {
            vcpus: body.cpu_count.unwrap_or(size.vcpus),
            memory_mib: body.memory_mb.unwrap_or(size.memory_mib),
            disk_mib: body.disk_size_mb.unwrap_or(size.disk_mib),
        };
        let is_engine = |name: EngineName| body.engine.as_deref() == Some(&*name.to_string());
        let mut request = PlaceRequest {
            template: short(id),
            memory_mib: size.memory_mib,
            disk_mib: u32::try_from(size.disk_mib).unwrap_or(u32::MAX),
            needs_microvm: is_engine(EngineName::MicroVm),
            needs_gvisor: is_engine(EngineName::Gvisor),
            volume_host,
            ..PlaceRequest::default()
        };
        // A name in the table denotes one version on all hosts.
        let named = fleet.named_template(caller, id);
        let version = named
            .as_ref()
            .and_then(|named| fleet.version_hash(id, named));
        let is_origin_local = match &named {
            Some(named) => self.has_version(caller, id, named),
            None => origin.is_ok(),
        };
        match &origin {
            _ if let Some(version) = version => request.templates = vec![version],
            Ok(Origin::Template(info)) => {
                request.templates = vec![fleet.template_hash(&info.reference())];
            }
            // The host of the volumes fetches the snapshot from the store.
            Ok(Origin::Snapshot(_)) if let Some(host) = volume_host => {
                request.allowed = vec![host];
            }
            // The files of a snapshot are on this host.
            Ok(Origin::Snapshot(_)) => request.allowed = vec![fleet.node.id()],
            Err(_) => request.templates = fleet.template_hashes(caller, id),
        }
        if let Some(key) = caller.key() {
            let pauses = body.auto_pause == Some(true)
                || body.auto_pause.is_none()
                    && body
                        .lifecycle
                        .as_ref()
                        .is_some_and(|l| l.on_timeout == Some(OnTimeout::Pause));
            // The host of the sandbox rejects an invalid idle timeout.
            let idle_timeout = self.idle_timeout(caller, origin.as_ref().ok(), body.idle_timeout);
            let is_paused_idle = idle_timeout.is_ok_and(|seconds| seconds.is_some());
            let amount = QuotaAmount {
                paused: u64::from(pauses || is_paused_idle),
                ..running(size, 1)
            };
            let limits = self.quota.limits_of(key);
            request.needs = fleet_needs(&key.id, &limits, &amount);
            request.rate = limits
                .creates_per_minute
                .map(|limit| (key.id.clone(), limit));
        }
        let labels = body.host_labels.iter().flatten();
        request.labels = labels
            .filter_map(|(name, value)| HostLabel::new(name, value).ok())
            .collect();
        Create {
            request,
            scope,
            template: id.to_owned(),
            is_origin_local,
            has_asked: false,
            has_waited: false,
            deadline: Instant::now() + BUDGET_TIMEOUT,
            rejections: Vec::new(),
            last: None,
        }
    }
}

impl Fleet {
    /// Creates a sandbox on the host that the coordinator selects.
    pub(super) async fn create_anywhere(
        &self,
        app: &App,
        caller: &Caller,
        (mut call, request): (BufferedCall, Request),
        (name, idempotency): (Option<&str>, Option<SandboxHash>),
        next: Next,
    ) -> Result<Response, ApiError> {
        // The handler rejects an invalid body.
        let Ok(body) = parse_part::<NewSandbox>(&call.body) else {
            return Ok(next.run(request).await);
        };
        scope::check(&body)?;
        let scope = self.scope(body.distribution_scope.as_deref())?;
        let volume_host = self.home_of_volumes(caller, body.volume_mounts.as_deref())?;
        scope.expect_volumes(volume_host)?;
        let owner = caller.owner_id();
        let mut create = app.create_of(self, caller, &body, (scope, volume_host));
        create.request.name = name.map(|name| self.name_hash(owner.as_deref(), name));
        create.request.idempotency = idempotency;
        let network = body.network.as_ref().and_then(|n| n.join.as_deref());
        let mut own = Some((request, next));
        for _ in 0..MAX_HOSTS {
            if let Some(network) = network {
                let allowed = &mut create.request.allowed;
                self.restrict_to_network(owner.as_deref(), network, volume_host, allowed)
                    .await?;
            }
            let placed = match self.target(app, caller, &call, &mut create, name).await? {
                Some(Target::Placed(placed)) => placed,
                Some(Target::Received(member)) => return self.forward_to(member, &call).await,
                Some(Target::Own) => {
                    self.check_own(&create.request.labels, &create.scope, volume_host)?;
                    let (request, next) = own.take().ok_or_else(no_coordinator)?;
                    let response = next.run(request).await;
                    let (response, id) = read(response).await;
                    if let Some(id) = id {
                        self.local
                            .add(LocalDecision::without_coordinator(self.sandbox_hash(&id)));
                    }
                    return Ok(response);
                }
                None => break,
            };
            let host = placed.admission.host.member;
            let response = if host == self.node.id() {
                match (
                    self.node.accept_placement(placed.admission.clone()).await,
                    own.take(),
                ) {
                    (Ok(()), Some((request, next))) => Ok(next.run(request).await),
                    (Err(error), taken) => {
                        own = taken;
                        Err(ApiError::host_busy(error.to_string()))
                    }
                    (_, None) => Err(ApiError::host_busy("the host was tried before")),
                }
            } else {
                call.placement = Some(placed.admission.clone());
                self.send(host, &placed.address, &call)
                    .await
                    .map_err(|error| {
                        if error.is_unsent {
                            ApiError::host_busy(error.reason)
                        } else {
                            host_lost(host, &error.reason)
                        }
                    })
            };
            let response = match response {
                Ok(response) => response,
                // The host may have created the sandbox: another host must not.
                Err(error) if error.error_code == HOST_LOST => return Err(error),
                Err(error) => axum::response::IntoResponse::into_response(error),
            };
            if let Some(response) = self.finish(&mut create, &placed, response).await {
                return Ok(response);
            }
        }
        if let Some(home) = create.lacks_template() {
            let template = (&*create.template, create.is_origin_local);
            let explained = self.explain_missing_template(&call, home, template);
            explained.await?;
        }
        create.rejected()
    }

    /// Ends a placement. Returns the answer unless the host has rejected the sandbox.
    async fn finish(
        &self,
        create: &mut Create,
        placed: &Placed,
        response: Response,
    ) -> Option<Response> {
        let status = response.status();
        let (response, answer) = if status.is_success() {
            let (response, id) = read(response).await;
            let rows = id.map(|id| self.sandbox_hash(&id));
            let host = placed.admission.host.member;
            if let Some(row) = rows.filter(|_| host != self.node.id()) {
                self.node.remember(row, host);
            }
            (response, Ok(rows.into_iter().collect()))
        } else {
            let (response, code, message) = error_of(response).await;
            (response, Err((code, message)))
        };
        let mut end = PlacementEnd {
            term: placed.admission.term,
            decision: placed.decision,
            rows: Vec::new(),
            rejected: None,
        };
        let (code, message) = match answer {
            Ok(rows) => {
                end.rows = rows;
                self.node.end_placement(end);
                return Some(response);
            }
            Err(error) => error,
        };
        end.rejected = Some(message.clone());
        self.node.end_placement(end);
        let is_rejected = matches!(&*code, HOST_BUSY | "engine_unavailable")
            || code == "template_not_found"
                && (!create.is_origin_local || create.request.volume_host.is_some());
        if !is_rejected {
            return Some(response);
        }
        let host = placed.admission.host.member;
        create.rejections.push(format!("{host}: {message}"));
        create.request.excluded.push(host);
        // The next request names the rejected decision, and does not count as another create.
        create.request.former = Some(placed.decision);
        create.request.is_counted = true;
        create.last = Some(response);
        None
    }

    /// Returns the member for a create. `None` if no further host is suitable after a rejection.
    async fn target(
        &self,
        app: &App,
        caller: &Caller,
        call: &BufferedCall,
        create: &mut Create,
        name: Option<&str>,
    ) -> Result<Option<Target>, ApiError> {
        let transit_end = Instant::now() + TRANSIT_TIMEOUT;
        loop {
            let mut request = create.request.clone();
            create.scope.restrict(&mut request.allowed)?;
            let error = match self.node.place(request).await {
                Ok(placed) => return Ok(Some(Target::Placed(Box::new(placed)))),
                Err(PlaceError::NoCoordinator) => {
                    let is_reserved =
                        create.request.name.is_some() || create.request.idempotency.is_some();
                    if is_reserved || create.last.is_some() {
                        return Err(no_coordinator());
                    }
                    return Ok(Some(Target::Own));
                }
                Err(PlaceError::NotPlaced(error)) => error,
            };
            match error {
                NotPlaced::Received(member) if member == self.node.id() => {
                    return Ok(Some(Target::Own));
                }
                NotPlaced::Received(member) => return Ok(Some(Target::Received(member))),
                NotPlaced::NameTaken(taken) => {
                    let row = create.request.name.unwrap_or(SandboxHash([0; 16]));
                    let is_absent = self.node.has_row(taken.member, row).await == Some(false);
                    if !is_absent || Instant::now() >= transit_end {
                        return Err(name_taken(name.unwrap_or_default()));
                    }
                    // The name seems to be taken, but its host has no such sandbox. If the host had
                    // reported the sandbox, it was killed a moment ago, and the report of its end
                    // is in transit. Otherwise the name is reserved for a create in progress, which
                    // ends with a row on its host or with the end of the reservation.
                    let former = create.request.freed.replace(taken);
                    if former.is_some() || !taken.is_reported {
                        tokio::time::sleep(TRANSIT_PAUSE).await;
                    }
                }
                NotPlaced::Rate { wait_s } => {
                    let limit = create.request.rate.as_ref().map_or(0, |rate| rate.1);
                    let message = format!(
                        "this key has reached its limit of {limit} new sandboxes per minute"
                    );
                    return Err(ApiError::too_many("creates_per_minute", message).after(wait_s));
                }
                NotPlaced::Budget(error) => {
                    let is_over = Instant::now() + RECALL_PAUSE >= create.deadline;
                    let is_first = !std::mem::replace(&mut create.has_waited, true);
                    if !error.is_known || is_over || !(error.is_unused_elsewhere || is_first) {
                        let limits = caller.key().map(|key| app.quota.limits_of(key));
                        return Err(fleet_refusal(&error, &limits.unwrap_or_default()));
                    }
                    // Wait at least once, and as long as other members have unused parts of their
                    // shares (their parts of the owner's budget). Meanwhile, members report that
                    // sandboxes have ended, and return unused parts.
                    create.request.is_counted = true;
                    tokio::time::sleep(RECALL_PAUSE).await;
                }
                NotPlaced::NoTemplate { builders } => {
                    self.ask_for_template(call, create, &builders).await?;
                }
                NotPlaced::NoHost { reason, .. } if create.last.is_some() => {
                    create.rejections.push(reason);
                    return Ok(None);
                }
                NotPlaced::NoHost { decision, reason } => {
                    return Err(ApiError::host_busy(format!(
                        "no host of the fleet can run the sandbox: {reason}; \
                         `jiffy fleet why {decision}` repeats this"
                    )));
                }
            }
        }
    }

    /// Restricts a create to the hosts that have its template or snapshot, although their
    /// heartbeats do not contain it.
    async fn ask_for_template(
        &self,
        call: &BufferedCall,
        create: &mut Create,
        builders: &[MemberId],
    ) -> Result<(), ApiError> {
        if create.has_asked {
            return Err(unavailable("the templates of the hosts change: retry"));
        }
        create.has_asked = true;
        // No other host may run the sandbox. The host of the volumes builds a stock template, or
        // fetches a snapshot from the store.
        let only = create.request.volume_host;
        if let Some(only) = only.or(create.is_origin_local.then(|| self.node.id())) {
            create.request.allowed = vec![only];
            return Ok(());
        }
        let mut hosts = self.places_of_origin(call, &create.template).await?;
        hosts.truncate(MAX_ALLOWED);
        if !hosts.is_empty() {
            create.request.allowed = hosts;
            return Ok(());
        }
        if !builders.is_empty() {
            let names: Vec<_> = builders.iter().map(ToString::to_string).collect();
            let message = format!(
                "no host has the template `{}`; {} builds it: retry after the build",
                short(&create.template),
                names.join(", ")
            );
            let status = axum::http::StatusCode::SERVICE_UNAVAILABLE;
            return Err(ApiError::new(status, FLEET_UNAVAILABLE, message).after(5));
        }
        // This host fetches a snapshot from the store, or reports that the template is unknown.
        create.request.allowed = vec![self.node.id()];
        Ok(())
    }
}

impl Create {
    /// Returns the host of the volumes if it has rejected the sandbox because it lacks the
    /// template.
    fn lacks_template(&self) -> Option<MemberId> {
        let status = self.last.as_ref().map(Response::status);
        let is_missing = status == Some(axum::http::StatusCode::NOT_FOUND);
        self.request.volume_host.filter(|_| is_missing)
    }

    /// Returns the answer after the rejections of all tried hosts.
    fn rejected(self) -> Result<Response, ApiError> {
        match self.last {
            Some(response) if response.status() != axum::http::StatusCode::SERVICE_UNAVAILABLE => {
                Ok(response)
            }
            _ => Err(ApiError::host_busy(format!(
                "no host of the fleet has accepted the sandbox: {}",
                self.rejections.join("; ")
            ))),
        }
    }
}

fn no_coordinator() -> ApiError {
    unavailable(
        "names, private networks and idempotency keys cannot be checked: no coordinator is available: retry",
    )
}

/// Returns the error of a name that another sandbox has.
pub(super) fn name_taken(name: &str) -> ApiError {
    let name = short(name);
    let message = format!("the name `{name}` belongs to another of your sandboxes");
    ApiError::conflict("name_taken", message)
}
