//! Templates built step by step in sandboxes.
//!
//! [`spec`] says what is to be built, whoever wrote it: a Dockerfile, an SDK, the command.

pub mod spec;
