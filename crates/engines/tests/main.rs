//! Tests of the engines with real guests.

mod balloon;
mod connections;
mod contract;
mod hostile_driver;
mod many;
mod network;
mod sizes;
mod support;
mod usage;
