//! State shared by all connections of a gateway: connection pools, limits and counters. The
//! submodules pass requests to guests and to other hosts.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream.

mod forward;
mod pass;

pub(crate) use pass::RequestContext;

use crate::admission::ConnectionAdmission;
use crate::config::GatewayConfig;
use crate::counters::{GatewayCounters, add};
use crate::file_link::FileLink;
use crate::guest_calls::GuestCallLog;
use crate::guest_tls::GuestTls;
use crate::other_hosts::OtherHosts;
use crate::pool::GuestConnectionPool;
use crate::preview_link::LinkSigner;
use crate::request_error::RequestError;
use crate::route::{Addressing, Route, SandboxTarget, route};
use crate::sandboxes::{OpenError, Sandboxes};
use hyper::StatusCode;
use hyper::header::ORIGIN;
use hyper::http::request::Parts;
use jiffy_proto::agent::ENVD_PORT;
use std::sync::Arc;
use tokio::time::timeout;
use tracing::debug;

/// TCP port of the agent in the guest.
const AGENT_PORT: u16 = 49_983;
// The types differ: ports of TCP have 16 bits, and ports of vsock have 32.
const _: () = assert!(AGENT_PORT as u32 == ENVD_PORT);

/// State shared by all connections.
#[derive(Debug)]
pub(crate) struct GatewayState<S> {
    pub(crate) config: GatewayConfig,
    pub(crate) sandboxes: S,
    /// Signer of preview links. `None` if signed links are disabled.
    pub(crate) signer: Option<LinkSigner>,
    pub(crate) counters: Arc<GatewayCounters>,
    pub(crate) pool: Arc<GuestConnectionPool>,
    /// TLS to servers at the HTTPS ports of sandboxes.
    pub(crate) guest_tls: GuestTls,
    /// Other hosts of the fleet. `None` for a host without a fleet.
    pub(crate) hosts: Option<Arc<dyn OtherHosts>>,
    /// Connections to gateways of other hosts.
    pub(crate) host_pool: Arc<GuestConnectionPool>,
    pub(crate) admission: Arc<ConnectionAdmission>,
    /// Record of calls to agents. `None` if they are not recorded.
    pub(crate) guest_calls: Option<Arc<dyn GuestCallLog>>,
}

impl<S: Sandboxes> GatewayState<S> {
    /// Routes a request. If pages of guests are isolated, their cross-origin requests have `Origin:
    /// null` and must not reach the control plane.
    pub(crate) fn decide(&self, parts: &Parts) -> Route {
        match route(parts, &self.config) {
            Route::ControlPlane
                if self.config.isolate_paths
                    && parts.headers.get(ORIGIN).is_some_and(|o| o == "null") =>
            {
                Route::Refused(
                    StatusCode::FORBIDDEN,
                    "Pages without an origin may not call the control plane",
                )
            }
            // A signed link to a file may name no sandbox. `route` then returns the control plane.
            Route::ControlPlane => self.route_file_link(parts),
            route => route,
        }
    }

    /// Routes a request without a sandbox: a signed link to a file leads to the sandbox whose token
    /// signed it.
    fn route_file_link(&self, parts: &Parts) -> Route {
        let Some(link) = FileLink::of(parts) else {
            return Route::ControlPlane;
        };
        if self.hosts.is_some() {
            // The token may belong to a sandbox of any host, and each of them would have to compare
            // the signature with all of its sandboxes.
            return Route::Refused(
                StatusCode::UNAUTHORIZED,
                "In a fleet, a link to a file must name its sandbox: set the domain of the client",
            );
        }
        let id = self
            .sandboxes
            .find_by_token(|token| link.is_signed_with(token));
        match (id, parts.uri.path_and_query()) {
            (Some(id), Some(path)) => Route::Sandbox(SandboxTarget {
                id,
                port: AGENT_PORT,
                path: path.clone(),
                // As if addressed by headers: the path has no prefix to remove.
                addressing: Addressing::Headers,
            }),
            // The control plane has no files, so the request would fail there, too.
            _ => Route::Refused(
                StatusCode::UNAUTHORIZED,
                "The signature matches no sandbox on this server: request a new link",
            ),
        }
    }

    /// Replaces the error of an interrupted exchange by its cause. The cause is known if the
    /// sandbox was killed or paused.
    pub(crate) async fn with_cause(&self, failure: RequestError, id: &str) -> RequestError {
        if !matches!(failure, RequestError::Unavailable(_)) {
            return failure;
        }
        // A pending operation may take as long as a resume.
        let why = timeout(
            self.config.limits.open,
            self.sandboxes.not_running_reason(id),
        )
        .await;
        match why {
            Ok(Some(OpenError::NotFound)) => RequestError::NotFound,
            Ok(Some(OpenError::NotRunning)) => RequestError::NotRunning,
            _ => failure,
        }
    }

    /// Logs and counts a failed request.
    pub(crate) fn record_failure(&self, failure: &RequestError) {
        // Not a warning: clients cause these errors.
        debug!(%failure, "rejected a request");
        let counters = &self.counters;
        let counter = match failure {
            RequestError::Refused(..) => &counters.refused,
            RequestError::HostOnly | RequestError::Token | RequestError::Link => {
                &counters.forbidden
            }
            RequestError::NotFound | RequestError::NotRunning => &counters.not_found,
            RequestError::PortClosed => &counters.port_closed,
            RequestError::Unavailable(_) => &counters.unavailable,
            RequestError::Limit(_)
            | RequestError::ExchangeLimit(_)
            | RequestError::Busy
            | RequestError::Overloaded => &counters.limited,
            RequestError::HostUnavailable(_) | RequestError::Moved => &counters.unavailable,
        };
        add(counter, 1);
    }
}
