//! Routes of the API: each path and method with its handler.
//!
//! A *router* of axum assigns handlers to paths and methods. A *layer* runs before and after the
//! handlers of a router.

mod audit;
mod build_ssh;
mod builds;
mod compare;
mod create;
mod events;
mod fleet;
mod fleet_operations;
mod fork;
mod functions;
mod guest;
mod host;
mod identity;
mod image_templates;
mod keys;
mod lease;
mod limits;
mod lineage;
mod list;
mod pause_resume;
mod pools;
mod ports;
mod processes;
mod prune;
mod recipes;
mod rollback;
mod secrets;
mod snapshot_routes;
mod template_tags;
mod templates;
mod timeout;
mod usage;
mod volume_content;
mod volume_snapshots;
mod volumes;
mod wait;
mod webhooks;

pub use functions::invoke::{FunctionHost, function_router};
pub(crate) use lease::PROTOCOL as LEASE_PROTOCOL;
pub(crate) use ports::{PROTOCOL as PORT_PROTOCOL, expect_upgrade};
pub(crate) use volume_content::TOKEN_PREFIX as VOLUME_TOKEN_PREFIX;

use crate::app::App;
use crate::audit::record;
use crate::caller::authenticate;
use crate::error::convert_error;
use crate::fleet as members;
use crate::openapi;
use axum::handler::Handler;
use axum::http::{Method, StatusCode};
use axum::middleware::{from_fn_with_state, map_response};
use axum::routing::{MethodFilter, MethodRouter, on};
use axum::{Json, Router};
use jiffy_api_types::{Health, HealthStatus};

/// Router that records its routes, which tests compare with the OpenAPI document.
struct Calls {
    router: Router<App>,
    routes: Vec<(Method, &'static str)>,
}

impl Calls {
    fn new() -> Self {
        Self {
            router: Router::new(),
            routes: Vec::new(),
        }
    }

    /// Adds a route, and records it for the comparison with the OpenAPI document.
    fn add<H, T>(mut self, method: Method, path: &'static str, handler: H) -> Self
    where
        H: Handler<T, App>,
        T: 'static,
    {
        // One filter per route: axum answers other methods with 405.
        let filter = match method {
            Method::POST => MethodFilter::POST,
            Method::PUT => MethodFilter::PUT,
            Method::PATCH => MethodFilter::PATCH,
            Method::DELETE => MethodFilter::DELETE,
            // All other calls use `GET`.
            _ => MethodFilter::GET,
        };
        let call: MethodRouter<App> = on(filter, handler);
        self.router = self.router.route(path, call);
        self.routes.push((method, path));
        self
    }

    fn get<H: Handler<T, App>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(Method::GET, path, handler)
    }

    fn post<H: Handler<T, App>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(Method::POST, path, handler)
    }

    fn put<H: Handler<T, App>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(Method::PUT, path, handler)
    }

    fn delete<H: Handler<T, App>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(Method::DELETE, path, handler)
    }
}

/// Calls that need no key.
fn public_calls() -> Calls {
    Calls::new()
        .get("/health", async || {
            Json(Health {
                status: HealthStatus::Ok,
            })
        })
        .get("/openapi.json", async || Json(openapi::document()))
        .get("/.well-known/openid-configuration", identity::configuration)
        .get("/.well-known/jwks.json", identity::public_keys)
        // The secret part of the path authorises the upload.
        .put("/templates/uploads/{word}", builds::upload)
}

/// Calls on the content of volumes, which the token of the volume or a key authorises.
fn content_calls() -> Calls {
    Calls::new()
        .get("/volumecontent/{volumeID}/path", volume_content::stat)
        .add(
            Method::PATCH,
            "/volumecontent/{volumeID}/path",
            volume_content::change,
        )
        .delete("/volumecontent/{volumeID}/path", volume_content::remove)
        .get("/volumecontent/{volumeID}/dir", volume_content::list)
        .post(
            "/volumecontent/{volumeID}/dir",
            volume_content::make_directory,
        )
        .get("/volumecontent/{volumeID}/file", volume_content::read)
        .put("/volumecontent/{volumeID}/file", volume_content::write)
}

/// Calls that need a key.
fn guarded_calls() -> Calls {
    Calls::new()
        .post("/v2/sandboxes", create::create_v2)
        .post("/sandboxes", create::create_v1)
        .get("/v2/sandboxes", list::list_v2)
        .get("/sandboxes", list::list_v1)
        .get("/sandboxes/metrics", guest::all_metrics)
        .get("/sandboxes/{sandboxID}", list::one)
        .delete("/sandboxes/{sandboxID}", pause_resume::delete)
        .add(
            Method::PATCH,
            "/sandboxes/{sandboxID}",
            pause_resume::change,
        )
        .post("/v2/sandboxes/{sandboxID}/connect", pause_resume::connect)
        .post("/sandboxes/{sandboxID}/connect", pause_resume::connect_v1)
        .post("/sandboxes/{sandboxID}/resume", pause_resume::resume)
        .post("/sandboxes/{sandboxID}/pause", pause_resume::pause)
        .post("/sandboxes/{sandboxID}/timeout", timeout::timeout)
        .post("/sandboxes/{sandboxID}/refreshes", timeout::refresh)
        .post("/sandboxes/{sandboxID}/fork", fork::fork)
        .post("/sandboxes/{sandboxID}/promote", fork::promote)
        .post("/sandboxes/{sandboxID}/rollback", rollback::rollback)
        .post("/sandboxes/{sandboxID}/snapshots", snapshot_routes::take)
        .put("/sandboxes/{sandboxID}/network", guest::network)
        .add(
            Method::PATCH,
            "/sandboxes/{sandboxID}/network",
            guest::change_network,
        )
        .post("/sandboxes/{sandboxID}/restart", wait::restart)
        .get("/sandboxes/{sandboxID}/wait", wait::wait)
        .get("/sandboxes/{sandboxID}/metrics", guest::metrics)
        .get("/sandboxes/{sandboxID}/logs", guest::logs_v1)
        .get("/v2/sandboxes/{sandboxID}/logs", guest::logs_v2)
        .get("/sandboxes/{sandboxID}/connections", guest::connections)
        .get("/sandboxes/{sandboxID}/preview", guest::preview)
        .get("/sandboxes/{sandboxID}/process", host::process)
        .get("/sandboxes/{sandboxID}/processes", processes::list)
        .post(
            "/sandboxes/{sandboxID}/processes/{pid}/signal",
            processes::signal,
        )
        .get("/sandboxes/{sandboxID}/ports/{port}", ports::stream)
        .post("/sandboxes/{sandboxID}/lease", lease::lease)
        .get("/lineage", lineage::lineage)
        .get("/compare", compare::compare)
        .get("/snapshots", snapshot_routes::list)
        .get("/snapshots/{snapshotID}", snapshot_routes::one)
        .get("/templates", templates::list)
        .get("/v2/templates", templates::list)
        .get("/default-templates", templates::list_stock)
        .post("/templates", image_templates::create)
        .post("/templates/{templateID}", image_templates::rebuild)
        .put("/templates/{templateID}/alias", image_templates::rename)
        .add(Method::PATCH, "/templates/{templateID}", builds::change)
        .get("/templates/{templateID}/tags/count", template_tags::count)
        .get("/templates/{templateID}/tags/exists", template_tags::exists)
        .get("/templates/{templateID}/tags/groups", template_tags::groups)
        .get(
            "/templates/{templateID}/tags/{tag}/assignments",
            template_tags::assignments,
        )
        .get("/templates/{templateID}", templates::one)
        .delete("/templates/{templateID}", templates::delete)
        .get("/templates/aliases/{alias}", templates::alias)
        .get("/templates/{templateID}/tags", template_tags::list)
        .post("/templates/tags", builds::add_tags)
        .delete("/templates/tags", builds::remove_tags)
        .post("/templates/prune", builds::prune)
        .get("/recipes", recipes::list)
        .get("/recipes/{recipe}/build", recipes::status)
        .post("/recipes/{recipe}/build", recipes::build)
        .add(Method::PATCH, "/v2/templates/{templateID}", builds::change)
        .post("/v3/templates", builds::request)
        .get("/templates/{templateID}/files/{hash}", builds::files)
        .post("/v2/templates/{templateID}/builds/{buildID}", builds::start)
        .get(
            "/templates/{templateID}/builds/{buildID}/status",
            templates::build_status,
        )
        .get(
            "/templates/{templateID}/builds/{buildID}/logs",
            builds::logs,
        )
        .post(
            "/templates/{templateID}/builds/{buildID}/cancel",
            builds::cancel,
        )
        .get(
            "/templates/{templateID}/builds/{buildID}/ssh/{agent}",
            build_ssh::stream,
        )
        .get("/functions", functions::list)
        .get("/functions/{name}", functions::one)
        .post("/functions/{name}", functions::deploy)
        .delete("/functions/{name}", functions::remove)
        .get("/functions/{name}/versions", functions::versions)
        .post("/functions/{name}/rollback", functions::rollback)
        .post("/functions/{name}/enable", functions::enable_one)
        .post("/functions/{name}/disable", functions::disable_one)
        .get("/functions/{name}/logs", functions::logs)
        .get("/functions/{name}/metrics", functions::metrics)
        .get("/teams", templates::teams)
        .post("/snapshots/{snapshotID}/verify", host::verify)
        .get("/engines", host::engines)
        .get("/audit", audit::list)
        .get("/events", events::list)
        .get("/events/sandboxes", events::lifecycle_events)
        .get("/events/sandboxes/{sandboxID}", events::lifecycle_events_of)
        .get("/limits", limits::limits)
        .get("/usage", usage::list)
        .get("/host", host::host)
        .get("/fleet", fleet::fleet)
        .get("/fleet/nodes", fleet::nodes)
        .post("/fleet/nodes/{host}/drain", fleet_operations::drain)
        .post("/fleet/nodes/{host}/undrain", fleet_operations::undrain)
        .post("/fleet/nodes/{host}/remove", fleet_operations::remove)
        .post(
            "/fleet/nodes/{host}/confirm-dead",
            fleet_operations::confirm_dead,
        )
        .post("/fleet/accept-restore", fleet_operations::accept_restore)
        .get("/fleet/why/{sandboxID}", fleet::why)
        .post("/host/stop", host::stop)
        .get("/keys", keys::list)
        .post("/keys", keys::create)
        .add(Method::PATCH, "/keys/{keyID}", keys::change)
        .post("/keys/{keyID}/rotate", keys::rotate)
        .post("/keys/{keyID}/revoke", keys::revoke)
        .get("/events/webhooks", webhooks::list)
        .post("/events/webhooks", webhooks::create)
        .get("/events/webhooks/{webhookID}", webhooks::one)
        .add(
            Method::PATCH,
            "/events/webhooks/{webhookID}",
            webhooks::update,
        )
        .delete("/events/webhooks/{webhookID}", webhooks::remove)
        .get(
            "/events/webhooks/{webhookID}/deliveries",
            webhooks::deliveries,
        )
        .get("/secrets", secrets::list)
        .post("/secrets", secrets::create)
        .get("/secrets/{secretID}", secrets::one)
        .post("/secrets/{secretID}", secrets::update)
        .delete("/secrets/{secretID}", secrets::remove)
        .get("/volumes", volumes::list)
        .post("/volumes", volumes::create)
        .get("/volumes/{volumeID}", volumes::one)
        .delete("/volumes/{volumeID}", volumes::remove)
        .post("/volumes/{volumeID}/snapshots", volume_snapshots::create)
        .get("/volumesnapshots", volume_snapshots::list)
        .delete(
            "/volumesnapshots/{volumeSnapshotID}",
            volume_snapshots::remove,
        )
        .post("/prune", prune::prune)
        .get("/pools", pools::list)
        .put("/pools/{templateID}", pools::set)
}

/// Returns the method and path of every route.
pub fn calls() -> Vec<(Method, &'static str)> {
    let all = [public_calls(), content_calls(), guarded_calls()];
    all.into_iter().flat_map(|calls| calls.routes).collect()
}

/// Returns the router of the control plane.
pub fn router(app: App) -> Router {
    let guarded = guarded_calls().router.merge(functions::invoke::by_path());
    guarded
        // Runs after `authenticate`, which inserts the caller: layers that are added later run
        // earlier.
        .route_layer(from_fn_with_state(app.clone(), members::route))
        // A route layer applies to known paths only: unknown paths are answered with 404 without
        // authentication.
        .route_layer(from_fn_with_state(app.clone(), authenticate))
        .merge(
            content_calls()
                .router
                .route_layer(from_fn_with_state(app.clone(), members::route_content)),
        )
        .merge(public_calls().router)
        // An explicit fallback: the default fallback would be replaced by the fallback of a router
        // with which this router is merged.
        .fallback(async || StatusCode::NOT_FOUND)
        .layer(map_response(convert_error))
        // The outermost layer: it sees the responses that clients receive.
        .layer(from_fn_with_state(app.clone(), record))
        .with_state(app)
}

/// Limits that appear in the OpenAPI document.
pub(crate) mod bounds {
    pub(crate) use super::builds::MAX_PAGE;
    pub(crate) use super::compare::{DEFAULT_DIFFERENCES, MAX_DIFFERENCES, MAX_PATH};
    pub(crate) use super::events::{MAX_LIFECYCLE_EVENTS, MAX_LIFECYCLE_OFFSET};
    pub(crate) use super::functions::{MAX_LOG_WAIT_S, MAX_POSITION};
    pub(crate) use super::guest::{MAX_LINES, MAX_LINK_S, MAX_MOMENT};
    pub(crate) use super::list::STATES;
    pub(crate) use super::processes::{
        DEFAULT_PROCESSES, MAX_PROCESS_FILTER, MAX_PROCESSES, PROCESS_ORDERS,
    };
    pub(crate) use super::secrets::DEFAULT_PAGE as DEFAULT_SECRETS;
    pub(crate) use super::template_tags::{DEFAULT_GROUPS, MAX_GROUPS};
    pub(crate) use super::templates::MAX_UNPAGED;
    pub(crate) use super::volume_content::{
        MAX_DEPTH as MAX_VOLUME_DEPTH, MAX_MODE as MAX_VOLUME_MODE,
    };
    pub(crate) use super::volumes::DEFAULT_PAGE as DEFAULT_VOLUMES;
    pub(crate) use super::wait::{AWAITED, MAX_WAIT_S};
    pub(crate) use super::webhooks::MAX_DELIVERIES;
}
