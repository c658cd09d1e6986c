//! Images are pulled from registries by a process without privileges.
//!
//! Everything that a registry sends is hostile: TLS, HTTP, tokens, redirects. A puller process reads it
//! ([`process`]): a user of its own in empty namespaces, without a file, a socket or a system call that
//! makes one. It asks the parent for each connection, and the parent makes it ([`Gate`]): in a network
//! slot with the sandboxes' egress policy, or to a registry that the host's owner has named. The parent
//! receives bounded frames, measures time and rate, writes and verifies the bytes itself, and kills the
//! process when a limit is passed or the import is cancelled.

mod cancel;
mod destination;
mod error;
mod gate;
mod link;
mod pace;
pub mod process;
mod proxy;
mod puller;
mod queue;
mod registries;
mod socket;
mod wire;

pub use cancel::{Cancel, CancelGuard};
pub use destination::Destination;
pub use error::{Fault, PullError};
pub use gate::Gate;
pub use puller::{Credentials, Program, Puller, Setup};
pub use queue::{Permit, Queue};
pub use registries::{Pull, Registries};
