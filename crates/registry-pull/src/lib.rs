//! Pulling of images from registries by an unprivileged process.
//!
//! All data from a registry is untrusted: TLS, HTTP, tokens, redirects. A puller process
//! ([`process`]) parses this data. The process has its own user, empty namespaces and no files, and
//! cannot open files or sockets. Its parent opens the connections ([`ConnectionGate`]): in a
//! network slot with the sandboxes' egress rules, or to a registry that the host's owner allows.
//! The parent receives bounded frames, enforces deadlines and rates, and writes and verifies the
//! data. It kills the process at a limit or a cancellation.
//!
//! A *slot* is a network namespace with its devices and rules, which the host prepares in advance.

mod cancel;
mod connection_gate;
mod error;
mod file_url;
mod login;
pub mod process;
mod proxy;
mod puller;
mod puller_link;
mod queue;
mod registries;
mod registry_address;
mod registry_mirror;
mod response_deadlines;
mod socket;
mod wire;

pub use cancel::{Cancel, CancelGuard};
pub use connection_gate::ConnectionGate;
pub use error::{PullError, PullFault};
pub use file_url::FileUrl;
pub use login::{Credentials, RegistryLogin};
pub use puller::{PullTarget, Puller, PullerProgram};
pub use queue::{PullPermit, PullQueue};
pub use registries::{PullSettings, Registries};
pub use registry_address::RegistryAddress;
pub use registry_mirror::RegistryMirror;
