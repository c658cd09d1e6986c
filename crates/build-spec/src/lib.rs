//! Contents of builds of templates, and the formats that they are read from.
//!
//! [`spec`] describes a build, from a Dockerfile, an SDK or the command. [`dockerfile`] parses
//! Dockerfiles, [`context`] packs the files that they copy, and [`expand`] puts in variables.

pub mod context;
pub mod dockerfile;
pub mod expand;
pub mod spec;
