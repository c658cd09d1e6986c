//! An engine whose guests are a line of text, and whose every step can be made to fail or to hang.
// Each test program uses its own part of this.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

mod bench;
mod engine;
mod files;
mod guest;
mod world;

pub use bench::{Bench, Plenty, base, create_id, snapshot_id, until};
pub use engine::{DAMAGED, FakeEngine};
pub use world::{Body, Dice, World};

/// An engine beside the default one.
pub const OTHER: &str = "other";
