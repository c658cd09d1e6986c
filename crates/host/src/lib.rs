//! Life of sandboxes on one host: from a template's name and a size to a guest whose agent has answered.

mod host;
mod identity;
mod programs;

pub use host::{CreateError, Host, HostError, Prepared, SandboxSpec};
pub use identity::{IdentityError, new_id};
pub use programs::{ProgramError, Programs};
