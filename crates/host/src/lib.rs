//! Life of sandboxes on one host: from a template's name and a size to a guest whose agent has answered.

mod host;
mod identity;
mod journal;
mod microvm_engine;
mod programs;
mod record;
mod sandboxes;

pub use host::{CreateError, Host, HostError, Prepared, SandboxSpec};
pub use identity::{IdentityError, new_id};
pub use journal::{Change, Journal, JournalError, JournalledSnapshot};
pub use microvm_engine::{MicroVmArrival, MicroVmEngine, MicroVmGuest};
pub use programs::{ProgramError, Programs};
pub use record::{Operation, Purpose, SandboxRecord, SnapshotRecord, State};
pub use sandboxes::{Child, CreateSpec, ForkReport, OperationError, Options, Sandboxes, Source};
