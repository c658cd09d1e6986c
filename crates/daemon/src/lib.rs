//! The daemon: the process that owns the sandboxes of a data directory and serves the API.
//!
//! The daemon serves the same API ([`api_server`]) on a TCP address, and to its owner on the socket
//! `<data directory>/run/jiffy.sock`.

mod api_server;
mod confinement;
mod console_server;
mod control_plane_router;
mod direct_connections;
mod direct_listener;
mod documentation;
mod engine;
mod fleet;
pub mod fleet_gateway;
mod front;
mod functions;
mod gateway_sandboxes;
mod guest_call_audit;
mod host_facts;
mod internal;
pub mod local_daemon;
mod log;
mod mcp_server;
mod metrics;
mod network;
mod options;
mod public_address;
pub mod rootless_notice;
mod serve;
mod signing_key;
mod site;
mod status;
mod stop;
mod store;
mod template_progress;
mod tls;
mod traces;
mod volume_mounter;
mod webhook_connector;

pub use engine::{choose as choose_engine, nic_kind};
pub use front::{FrontOptions, run_front};
pub use host_facts::host_facts;
pub use local_daemon::open_client;
pub use options::{
    ConfinementOptions, ConsoleOptions, DiskShare, FeatureMode, LogFormat, LogOptions,
    NetworkOptions, ServeOptions, StoreOptions, TlsOptions,
};
pub use serve::run;
pub use stop::stop;
pub use template_progress::TemplateProgress;
