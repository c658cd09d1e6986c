//! Templates built step by step in sandboxes.
//!
//! * [`spec`] says what is to be built, whoever wrote it: a Dockerfile, an SDK, the command.
//! * [`dockerfile`] reads it from a Dockerfile, and [`context`] finds the files that it copies.
//! * [`expand`]: variables in its words.

pub mod context;
pub mod dockerfile;
pub mod expand;
pub mod spec;
