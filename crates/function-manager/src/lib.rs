//! Functions of a host: modules and versions on disk, a process per tenant that runs them, and
//! requests to it.
//!
//! The process is the program `jiffy-functions` (crates/function-runtime), which links Wasmtime;
//! this crate does not. Why it is so: docs/design-functions.md.

pub mod compile_turns;
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
mod disk_room;
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
pub use disk_room::{DeployRoom, DiskRoom};
pub use function_error::FunctionError;
pub use function_record::{Artifact, DeployChanges, FunctionRecord, MAX_VERSIONS, VersionRecord};
pub use functions::{FoundModule, FunctionHostSettings, Functions, MAX_UPLOADS};
pub use module_digest::{DigestError, ModuleDigest};
pub use module_upload::ModuleUpload;
pub use request_body::{BoxError, RequestBody};
pub use response_body::FunctionBody;
pub use sandbox_key::{SandboxKey, SandboxKeyScope};
pub use schedule::ScheduleStatus;
