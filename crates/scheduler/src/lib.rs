//! Placement of sandboxes on the hosts of a fleet, and shares of budgets. The *coordinator* is the
//! host of the fleet that selects the hosts of new sandboxes.
//!
//! The crate performs no I/O, starts no threads and reads no clock: times are arguments. The same
//! code therefore runs in a coordinator and in a simulation.
//!
//! - [`Scheduler`] holds the free resources of all hosts, selects a host for a sandbox and reserves
//!   its resources.
//! - [`BudgetShares`] divides a limit of an owner (an API key) among the members (hosts) of a
//!   fleet.

mod bucket_index;
mod budget_shares;
mod explanation;
mod host;
mod reservations;
mod resources;
mod scheduler;

pub use budget_shares::{BudgetShares, MIN_SHARE, MemberId};
pub use explanation::{Considered, Explanation, MAX_CONSIDERED, Rejection, Verdict};
pub use host::{
    CpuLevel, EngineSet, HostId, HostReport, HostSpec, Label, PlacementRequest, TemplateId,
};
pub use reservations::{RESERVATION_TIME_MS, ReservationId};
pub use resources::{Resource, Resources};
pub use scheduler::{LOCALITY_DISTANCE, LOCALITY_PERCENT, Placement, PlacementError, Scheduler};
