//! Namespaces of an ordinary user, in which he is root of what is his.
//!
//! [`enter`] moves this process into a user and a mount namespace of its own, before it has
//! threads. They hold a router: a network namespace whose way out is `pasta` or `slirp4netns`.
//! Slots of sandboxes are made beside it as root makes them beside the host's. The process itself
//! stays in the host's network, so that it listens and asks name servers like any other of its user.
//!
//! A *holder* ([`holder`]) keeps the namespaces and the way out while somebody needs them: the
//! process that asked, and, of a daemon, the sandboxes that outlive it.

mod enter;
mod facts;
pub mod holder;
mod ids;
mod join;
mod ranges;
mod rights;
mod router;
mod runtime;
mod uplink;
mod users;

pub use enter::{EnterError, Plan, enter};
pub use facts::{Facts, Missing, usable};
pub use ids::{has_host_ids, is_host_root, maps_only_itself};
pub use rights::give_up_rights;
pub use router::{Current, current};
pub use runtime::directory as runtime_directory;
pub use uplink::Uplink;
