//! Tests of volumes and of sessions with their server.

mod session;
mod volume;
