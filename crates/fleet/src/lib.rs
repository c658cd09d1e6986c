//! Agreement of several hosts.
//!
//! Hosts agree through [`Records`]: small versioned objects that change by conditional writes only,
//! so that exactly one of several concurrent writers succeeds. The records are in the object store
//! of the snapshots ([`StoreRecords`]) or in etcd (`EtcdRecords`). [`SealedRecords`] encrypts them,
//! and detects a store that returned to an older state.
//!
//! [`Heads`] decides which host may run a sandbox that is stored. [`node`] is the process of a
//! member: heartbeats, coordinator and directory. [`tables`] has the API keys and template names,
//! which every host holds in memory. Members call each other through the `channel`. [`roster`] has
//! the list of each host's sandboxes in the store, which other hosts read after its loss. `front`
//! is for machines without sandboxes that pass requests of clients to the hosts.

#[cfg(feature = "client")]
mod access;
#[cfg(feature = "client")]
pub mod certificates;
#[cfg(feature = "client")]
pub mod channel;
pub mod check;
mod facts;
#[cfg(feature = "client")]
mod files;
#[cfg(feature = "client")]
pub mod front;
mod heads;
pub mod init;
pub mod join;
pub mod node;
pub mod records;
pub mod roster;
#[cfg(feature = "client")]
pub mod settings;
mod setup_error;
pub mod tables;
pub mod tokens;

#[cfg(feature = "client")]
pub use access::{CONTROL_TENANT, FleetAccess};
pub use facts::{HostFacts, level_name};
pub use setup_error::SetupError;

pub use heads::{
    Authority, Claim, HeadError, Heads, LocalSandbox, MAX_SHARED_RECORD_BYTES, Publication,
    StoredSandbox, UnneededState,
};
#[cfg(feature = "client")]
pub use records::{EtcdRecords, EtcdSettings, EtcdUrl};
pub use records::{
    MAX_RECORD_BYTES, MemoryRecords, Page, Record, RecordError, RecordKey, Records, SealedRecords,
    StoreRecords, Version, Versioned, Written,
};
