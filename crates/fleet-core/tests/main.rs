//! Tests of the decisions of members and coordinators, and the simulator.

mod budgets;
mod directory;
#[path = "support/fleet.rs"]
mod fleet;
mod heads;
mod membership;
#[path = "support/random.rs"]
mod random;
mod records;
#[path = "support/samples.rs"]
mod samples;
mod simulator;
