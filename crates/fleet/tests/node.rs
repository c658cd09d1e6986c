//! Several nodes in one process: membership, verdicts, directory and reservations.
//!
//! A *node* is the process of a member. It drives the decisions of the crate `jiffy-fleet-core`. A
//! *verdict* is the decision of the coordinator that a member is dead.
#![allow(clippy::unwrap_used, clippy::panic)]

mod directory;
mod membership;
mod placement;
mod support;
mod transport;
