//! Networks of sandboxes: slots made in advance, what may leave them, their DNS, and a record of what did.
//!
//! [`Network`] has the slots of one data directory, [`Lease`] is one that a guest uses, [`Policy`] is what that guest may reach.

mod claim;
mod connections;
mod conntrack;
mod counted;
mod device;
mod dns;
mod error;
mod forwarding;
mod greeting;
pub mod guest;
mod host;
mod names;
mod namespace;
mod network;
mod numbers;
mod outbound;
mod own;
mod pace;
mod policy;
mod program;
mod proxy;
mod slot;
mod special;
mod upstream;
mod veth;

pub use error::NetError;
pub use ipnet::{IpNet, Ipv4Net};
pub use network::{Lease, Network, NetworkConfig};
pub use policy::{Policy, Reach, RulesError};
pub use slot::Card;
