//! Namespaces in which an ordinary user is root.
//!
//! [`enter`] moves this process into a user and a mount namespace of its own, before it has
//! threads. They contain a router: a network namespace whose uplink is `pasta` or `slirp4netns`.
//! Slots of sandboxes are connected to it as root connects them to the host's network. The process
//! itself stays in the host's network, so it listens and resolves names like any other of its user.
//!
//! A *holder* ([`holder`]) keeps the namespaces and the uplink while they are in use: by the
//! process that started it, and by sandboxes that outlive a daemon.

mod chroot;
mod enter;
pub mod holder;
mod ids;
mod join;
mod namespace_processes;
mod router;
mod runtime;
mod subordinate_ids;
mod support;
mod uplink;

pub use chroot::{CHROOT_REMEDY, is_chroot};
pub use enter::{EnterError, EnterOptions, enter};
pub use ids::{has_host_ids, is_host_root, maps_only_itself};
pub use router::{RootlessNamespaces, current};
pub use runtime::directory as runtime_directory;
pub use support::{MissingRequirement, RootlessSupport, usable};
pub use uplink::Uplink;
