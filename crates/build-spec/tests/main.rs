//! Tests of build contexts and Dockerfiles.

mod contexts;
mod dockerfiles;
