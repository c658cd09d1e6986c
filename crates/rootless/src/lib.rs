//! Rootless mode: namespaces in which an unprivileged user is root.
//!
//! [`enter`] moves this single-threaded process into a user and a mount namespace. They contain a
//! router: a network namespace whose uplink is `pasta` or `slirp4netns`. Slots of sandboxes are
//! connected to the router in the same way as root connects them to the host's network. The process
//! itself remains in the network namespace of the host, so that it can listen on ports and resolve
//! names.
//!
//! A *holder* ([`holder`]) keeps the namespaces and the uplink open while its parent process uses
//! them, or while sandboxes that outlive this process (a daemon) use them.
//!
//! A *slot* is a network namespace with its devices and rules, which is assigned to one guest.

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
