//! Fake engine in which the memory of a guest is a text, and each step can fail or hang.
// Each test program uses only a part of this module.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

mod bench;
mod engine;
mod files;
mod guest;
mod world;

pub use bench::{Bench, Plenty, base, create_id, snapshot_id, until};
pub use engine::{DAMAGED, FakeEngine};
pub use world::{Body, Dice, World};

/// Name of an engine in addition to the default one.
pub const OTHER: &str = "other";
