//! Tests of volumes and of sessions with their server.

mod locks;
mod session;
mod volume;
