//! Descriptions of template builds, and the Dockerfiles and files from which clients create them.
//!
//! [`spec`] describes a build, which may originate from a Dockerfile, an SDK or the command line.
//! [`dockerfile`] parses Dockerfiles, [`context`] packs the files that they copy, and [`expand`]
//! expands variables. The template builder (`crates/template-builder`) executes the description.

pub mod context;
pub mod dockerfile;
pub mod expand;
pub mod spec;
