//! The API in a fleet of several hosts. Each *member* (the daemon of one host) answers all calls.
//!
//! The *coordinator* is the member of the fleet that selects the hosts of new sandboxes and
//! declares silent members dead.
//!
//! A call on a sandbox of another member is forwarded as a whole, with the key of its caller. The
//! member that has the sandbox performs all checks. A forwarded call is never forwarded again.
//! Lists are merged from the answers of all members ([`lists`]). One member, the coordinator,
//! selects the member of a new sandbox, and reserves its name and `Idempotency-Key` ([`creates`],
//! [`placement`]).
//!
//! Words of these modules:
//! - The *directory* of the coordinator has a row for each sandbox, with its host and its state.
//! - The *head* of a sandbox is a record in the store that decides which host may run the sandbox.
//! - A *verdict* is the coordinator's decision that a silent host is dead. A host that is dead or
//!   was removed is *lost*.
//! - The *roster* of a host is the list of its sandboxes in the store, for the time after its loss.
//! - The *home* of an object is the member that manages it. Other members may have copies.

mod audit;
mod call;
mod create_answer;
mod creates;
mod drain;
mod events;
mod forward;
mod functions;
mod identity_keys;
mod import;
mod lineage;
mod lists;
mod lost;
mod lost_calls;
mod merged_log;
mod names;
mod networks;
mod object_calls;
mod objects;
mod own_sandboxes;
mod placement;
mod probe;
mod route;
mod rows;
pub(crate) mod scope;
mod secrets;
mod streams;
mod table_change;
mod templates;
mod usage;
mod volume_rows;
mod volume_table;
mod volumes;
mod webhooks;
mod why;

use crate::app::App;
use crate::error::{ApiError, HOST_LOST};
use async_trait::async_trait;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use functions::FunctionPlaces;
use jiffy_fleet::node::{LocateError, Node, NodeError, row_hash};
use jiffy_fleet::roster::Rosters;
use jiffy_fleet_core::{MemberId, MembershipError, SandboxHash};
use lost::LostSandboxes;
use rows::FleetRows;
use std::sync::Arc;
use std::time::Duration;
use templates::PresentTemplates;
use volumes::FleetVolumes;
use why::LocalDecisions;

pub use templates::TemplateHashes;

pub(crate) use forward::Forwarded;
pub use forward::receive_forwarded;
pub(crate) use functions::route_function;
pub use identity_keys::FleetIdentityKeys;
pub use import::{ImportError, ImportedObjects, import_owned};
pub(crate) use lists::{INCOMPLETE, ListPart};
pub use names::{NamedTemplate, TableNames, TemplateNames};
pub use probe::FleetProbe;
pub(crate) use route::route;
pub use secrets::FleetSecrets;
pub(crate) use streams::ForwardedStream;
pub use streams::{ByteStream, receive_forwarded_stream};
pub(crate) use table_change::TableChanges;
pub use volume_table::{HomedVolume, VolumeTable, VolumeTableError};
pub(crate) use volumes::route_content;
pub use webhooks::FleetWebhooks;

/// Maximum time for which a request waits until a host that returns to the fleet has compared a
/// sandbox with its head.
pub const COMPARISON_TIMEOUT: Duration = Duration::from_secs(10);
/// Error code of calls that need a member which does not answer.
const FLEET_UNAVAILABLE: &str = "fleet_unavailable";
/// Error code of a forwarded call on a sandbox that the receiver does not have.
const SANDBOX_MOVED: &str = "sandbox_moved";

/// Transport of calls to other members.
#[async_trait]
pub trait Forwarder: Send + Sync {
    /// Sends a call to a member and returns its response, whose body may arrive later. The receiver
    /// passes the call to [`receive_forwarded`].
    ///
    /// # Errors
    /// [`ForwardError`] if no response arrived.
    async fn forward(
        &self,
        to: MemberId,
        address: &str,
        request: Request<Body>,
    ) -> Result<Response, ForwardError>;

    /// Sends a request for a stream to a member. Returns the stream, or the response that rejects
    /// the request. The receiver passes the request to [`receive_forwarded_stream`].
    ///
    /// # Errors
    /// [`ForwardError`] if no response arrived.
    async fn open_stream(
        &self,
        to: MemberId,
        address: &str,
        request: Request<()>,
    ) -> Result<Result<Box<dyn ByteStream>, Response>, ForwardError>;
}

/// Failure to forward a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ForwardError {
    /// The member has not received the call: another attempt is safe.
    pub is_unsent: bool,
    /// Reason.
    pub reason: String,
}

/// Fleet, as the API uses it. Clones share the state.
#[derive(Clone)]
pub struct Fleet {
    node: Node,
    secret: Arc<[u8; 32]>,
    forwarder: Arc<dyn Forwarder>,
    rows: Arc<FleetRows>,
    functions: Arc<FunctionPlaces>,
    pub(crate) lost: Arc<LostSandboxes>,
    probe: Option<FleetProbe>,
    template_names: Option<Arc<dyn TemplateNames>>,
    templates: Arc<PresentTemplates>,
    /// Volumes of all members. `None` if members have no volumes.
    volumes: Option<FleetVolumes>,
    local: Arc<LocalDecisions>,
}

impl Fleet {
    /// Creates the fleet of a member. `secret` is the same on all members, and known to no other
    /// process.
    #[must_use]
    pub fn new(node: Node, secret: [u8; 32], forwarder: Arc<dyn Forwarder>) -> Self {
        Self::with_lost(node, secret, forwarder, Arc::default())
    }

    /// Like [`Self::new`], with the rosters of all members in their store: sandboxes of lost
    /// members are shown.
    #[must_use]
    pub fn with_rosters(
        node: Node,
        secret: [u8; 32],
        forwarder: Arc<dyn Forwarder>,
        rosters: Rosters,
    ) -> Self {
        let lost = Arc::new(LostSandboxes::new(rosters));
        Self::with_lost(node, secret, forwarder, lost)
    }

    /// Creates the fleet with the given view of lost sandboxes.
    fn with_lost(
        node: Node,
        secret: [u8; 32],
        forwarder: Arc<dyn Forwarder>,
        lost: Arc<LostSandboxes>,
    ) -> Self {
        let secret = Arc::new(secret);
        let rows = FleetRows::new(node.clone(), secret.clone(), lost.clone());
        Self {
            rows: Arc::new(rows),
            lost,
            probe: None,
            node,
            secret,
            forwarder,
            functions: Arc::default(),
            template_names: None,
            templates: Arc::default(),
            volumes: None,
            local: Arc::default(),
        }
    }

    /// Returns the node of this member.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns the templates of this host, for heartbeats. The list is updated every 2 s.
    #[must_use]
    pub fn templates(&self) -> Arc<TemplateHashes> {
        self.templates.current()
    }

    /// Returns the hash by which a sandbox is located.
    #[must_use]
    pub fn sandbox_hash(&self, id: &str) -> SandboxHash {
        row_hash(&self.secret, rows::ID, &[id])
    }

    fn name_hash(&self, owner: Option<&str>, name: &str) -> SandboxHash {
        row_hash(&self.secret, rows::NAME, &[owner.unwrap_or(""), name])
    }

    fn network_hash(&self, owner: Option<&str>, network: &str) -> SandboxHash {
        row_hash(&self.secret, rows::NETWORK, &[owner.unwrap_or(""), network])
    }

    fn idempotency_hash(&self, owner: Option<&str>, key: &str) -> SandboxHash {
        row_hash(&self.secret, rows::IDEMPOTENCY, &[owner.unwrap_or(""), key])
    }
}

impl App {
    /// Makes this host a member of a fleet. Without it, all calls are answered by this host.
    pub fn set_fleet(&mut self, fleet: Fleet) {
        self.sandboxes.set_observer(fleet.rows.clone());
        fleet.lost.start(&fleet.node, &fleet.rows, &self.sandboxes);
        self.quota
            .join_fleet(fleet.node.clone(), fleet.rows.released());
        self.fleet = Some(fleet.clone());
        templates::watch(self, &fleet);
        volume_rows::watch(self, &fleet);
    }
}

impl Fleet {
    /// Returns the error of a call on a sandbox of a dead member that other members do not know.
    fn host_lost(&self, member: MemberId) -> ApiError {
        let members = self.node.members();
        let since_ms = members.row(member).and_then(|row| row.dead_since_ms);
        let message = format!(
            "{}: the sandbox is available again when the host returns",
            lost::cause_of(member, since_ms)
        );
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_LOST, message).after(10)
    }
}

/// Returns the error of a call for a member that is dead or does not answer.
fn host_lost(member: MemberId, reason: &str) -> ApiError {
    let message = format!("host {member} does not answer: {reason}");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_LOST, message).after(2)
}

/// Returns the error of an operator's command.
pub(crate) fn operation_error(error: NodeError) -> ApiError {
    let message = error.to_string();
    match error {
        NodeError::Membership(MembershipError::Unknown(_)) => {
            ApiError::not_found("not_found", message)
        }
        // The text of this error states the same time.
        NodeError::Membership(MembershipError::Grace(_)) => unavailable(message).after(12),
        NodeError::Membership(MembershipError::NotCoordinator(_))
        | NodeError::Placement(_)
        | NodeError::Busy
        | NodeError::Stopped
        | NodeError::Unconfirmed(_) => unavailable(message),
        NodeError::Membership(_) => ApiError::conflict("refused", message),
    }
}

fn unavailable(message: impl Into<String>) -> ApiError {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    ApiError::new(status, FLEET_UNAVAILABLE, message).after(2)
}

impl From<LocateError> for ApiError {
    fn from(error: LocateError) -> Self {
        unavailable(error.to_string())
    }
}
