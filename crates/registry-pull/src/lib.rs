//! Pulling of images from registries by an unprivileged process.
//!
//! Everything that a registry sends is untrusted: TLS, HTTP, tokens, redirects. A puller process
//! reads it ([`process`]): it has a user of its own, empty namespaces, no files, and no system call
//! that opens a file or socket. The parent opens its connections ([`ConnectionGate`]): in a network
//! slot with the sandboxes' egress rules, or to a registry that the host's owner allows. The parent
//! receives bounded frames, enforces deadlines and rates, writes and verifies the bytes, and kills
//! the process at a limit or a cancellation.

mod cancel;
mod connection_gate;
mod error;
mod file_url;
pub mod process;
mod proxy;
mod puller;
mod puller_link;
mod queue;
mod registries;
mod registry_address;
mod response_deadlines;
mod socket;
mod wire;

pub use cancel::{Cancel, CancelGuard};
pub use connection_gate::ConnectionGate;
pub use error::{PullError, PullFault};
pub use file_url::FileUrl;
pub use puller::{Credentials, PullTarget, Puller, PullerProgram};
pub use queue::{PullPermit, PullQueue};
pub use registries::{PullSettings, Registries};
pub use registry_address::RegistryAddress;
