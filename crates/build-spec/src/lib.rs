//! Descriptions of template builds, and the formats from which they are created.
//!
//! [`spec`] describes a build, which may originate from a Dockerfile, an SDK or the command.
//! [`dockerfile`] parses Dockerfiles, [`context`] packs the files that they copy, and [`expand`]
//! expands variables.

pub mod context;
pub mod dockerfile;
pub mod expand;
pub mod spec;
