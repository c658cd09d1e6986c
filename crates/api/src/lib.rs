//! Control plane of one host: the REST API that E2B's clients use, with extensions in the same
//! style.
//!
//! [`router`] gives clients with an API key access to [`jiffy_sandbox_manager::Sandboxes`].
//! Requests of a listener for the host's owner have the caller [`Caller::Owner`] and need no key.
//! The document at `/openapi.json` describes all calls.

mod app;
mod audit;
mod audit_pages;
mod authentication_limit;
mod auto_resume;
mod body;
mod caller;
mod comparisons;
mod console_times;
mod displayed_usage;
mod egress_proxy;
mod ending;
mod error;
mod event_streams;
mod events;
mod fleet;
mod function_key;
mod guest_audit;
mod header_rules;
mod hooks;
mod idempotency;
mod identity_tokens;
mod ignored_fields;
mod key_events;
mod keys;
mod lookup;
mod mcp_servers;
mod network;
pub mod openapi;
mod owned_objects;
mod page;
mod query;
mod quota;
mod recipe_builds;
mod resumable;
mod routes;
mod session_access;
mod snapshot_content;
mod usage;
mod usage_counts;
mod wire;

pub use app::{App, Config};
pub use audit::{ConsoleSession, count_rejections};
pub use auto_resume::{AutoResume, ResumeError};
pub use caller::{Caller, ClientAddress, MCP_PATH, authenticated, guarded, key_of_request};
pub use ending::{Ended, end_revoked};
pub use error::{ApiError, ERROR_CODES};
pub use event_streams::{EventFollower, FollowedEvents};
pub use fleet::{
    ByteStream, COMPARISON_TIMEOUT, Fleet, FleetIdentityKeys, FleetProbe, FleetSecrets,
    FleetWebhooks, ForwardError, Forwarder, HomedVolume, ImportError, ImportedObjects,
    NamedTemplate, TableNames, TemplateHashes, TemplateNames, VolumeTable, VolumeTableError,
    import_owned, receive_forwarded, receive_forwarded_stream,
};
pub use function_key::FunctionCaller;
pub use guest_audit::{GuestNames, PendingGuestAudit, SharedGuestNames, TerminalAudit};
pub use hooks::{
    FunctionCall, FunctionInvoker, Invoking, Opening, PortRefusal, Ports, PreviewLinks,
    TemplateInfo, TemplateRefusal, TemplateSource,
};
pub use key_events::report_keys;
pub use keys::{
    Key, KeyError, KeyStatus, Keys, LimitChanges, Limits, NewKey, Revocation, Scope, Validity,
    Verdict, import_keys, local_key,
};
pub use quota::ExchangePermit;
pub use routes::{FunctionHost, calls, function_router, router};
pub use session_access::GuestAccess;
pub use usage_counts::count_usage;
pub use wire::event::webhook_event;
pub use wire::moment;
