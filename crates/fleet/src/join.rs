//! Join of a host: request ([`JoinRequest`]), its answer by a member (`JoinService`), and the host
//! that joins (`join_fleet`).
//!
//! The host proves with a token that an operator permits the join, and sends the public key for its
//! certificate. The member checks that the host can exchange sandboxes with the fleet, that its
//! clock is right, and that it can be reached at its address. It then answers with a certificate,
//! the master keys of the store and the settings of the records.

#[cfg(feature = "client")]
mod attempts;
#[cfg(feature = "client")]
mod host;
mod message;
#[cfg(feature = "client")]
mod registry;
#[cfg(feature = "client")]
mod service;

#[cfg(feature = "client")]
pub use host::{JoinOptions, Joined, join_fleet};
pub use message::{EtcdFiles, JoinAnswer, JoinRequest, MAX_REQUEST_BYTES};
#[cfg(feature = "client")]
pub(crate) use registry::HostRecord;
#[cfg(feature = "client")]
pub use service::{JoinService, StockTemplates};
