//! Pulling of images from registries by an unprivileged process.
//!
//! Everything that a registry sends is untrusted: TLS, HTTP, tokens, redirects. A puller process
//! reads it ([`process`]): it has a user of its own, empty namespaces, no files, and no system call
//! that opens a file or socket. The parent opens its connections ([`Gate`]): in a network slot with
//! the sandboxes' egress rules, or to a registry that the host's owner allows. The parent receives
//! bounded frames, enforces deadlines and rates, writes and verifies the bytes, and kills the
//! process at a limit or a cancellation.

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
