//! Functions of a host, on the daemon's side: modules and versions on disk, one process per owner
//! that runs them, and requests to this process.
//!
//! An *owner* of functions, also called *tenant*, is an API key, or the *operator*: the owner of
//! the host. The *engine* is Wasmtime with its settings: machine code depends on the engine.
//!
//! The process is the program `jiffy-functions` (crates/function-runtime), which links Wasmtime;
//! this crate does not. docs/design-functions.md explains the design.

pub mod compile_slots;
pub mod compiler;
pub mod deploy_step;
pub mod egress;
pub mod function_error;
pub mod function_record;
pub mod functions;
pub mod owner;
pub mod page_scan;
pub mod response_body;
pub mod running_process;
pub mod sandbox_key;
pub mod tenant_process;

mod blocking;
mod direct_link;
mod disk_quota;
mod function_state;
mod function_store;
mod log_buffer;
mod module_digest;
mod module_queue;
mod module_upload;
mod process_connections;
mod process_record;
mod request_body;
mod request_limit;
mod schedule;
mod start_backoff;
mod use_count;

pub use direct_link::{BoxConnectionPermit, ConnectionPermit};
pub use disk_quota::{DeployQuota, DiskQuota};
pub use function_error::FunctionError;
pub use function_record::{Artifact, DeployChanges, FunctionRecord, MAX_VERSIONS, VersionRecord};
pub use functions::{FunctionHostSettings, Functions, LocatedModule, MAX_UPLOADS};
pub use module_digest::{DigestError, ModuleDigest};
pub use module_upload::ModuleUpload;
pub use request_body::{BoxError, RequestBody};
pub use response_body::FunctionBody;
pub use sandbox_key::{SandboxKey, SandboxKeyScope};
pub use schedule::ScheduleStatus;
