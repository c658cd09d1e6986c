//! Networks of sandboxes: slots (network namespaces with devices, created in advance), egress
//! rules, DNS and connection records.
//!
//! [`Network`] manages the slots of one data directory, [`SlotLease`] is a slot in use by a guest,
//! and [`EgressPolicy`] has the rules for that guest. The engines attach guests to slots, and the
//! daemon changes the rules.
//!
//! docs/design-network.md explains slots and rules.

mod claim;
mod connections;
mod conntrack;
mod counted_stream;
mod device;
mod dns;
mod egress_connector;
mod error;
mod forwarding;
pub mod guest;
mod guest_connections;
mod happy_eyeballs;
mod header_connection;
mod host;
mod host_address;
mod host_addresses;
mod host_names;
mod namespace;
mod netlink_batch;
mod network;
mod network_state;
mod policy;
mod policy_tables;
mod private_network;
mod private_networks;
mod program;
mod proxy;
mod rate_limiter;
mod read_ahead;
mod resolved_addresses;
mod rtnetlink;
mod ruleset;
mod slot;
mod slot_layout;
mod slot_lease;
mod slot_numbers;
mod slot_rules;
mod sniff;
mod special_ranges;
#[cfg(test)]
mod test_slot;
mod upstream;
mod used_versions;
mod veth;

pub use egress_connector::{EgressConnector, EgressTarget, OpeningTunnel};
pub use error::NetError;
pub use header_connection::{
    Connecting, GuestStream, HeaderConnection, HeaderInjector, ServerConnector,
};
pub use ipnet::{IpNet, Ipv4Net};
pub use network::{Network, NetworkConfig};
pub use policy::{EgressPolicy, HostReachability, RulesError};
pub use slot::NicKind;
pub use slot_lease::SlotLease;
