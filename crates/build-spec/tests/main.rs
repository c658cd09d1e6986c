//! Tests of build contexts and Dockerfiles.

mod contexts;
mod dockerfiles;
mod mounts_and_triggers;
