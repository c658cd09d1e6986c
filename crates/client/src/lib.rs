//! Client of the API of a daemon on this host (over a Unix socket) or on another host (over HTTP or
//! HTTPS). Also has the terminal output of the command line.

// All output is printed through `terminal`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod client;
pub mod progress;
pub mod step_bar;
pub mod terminal;

pub use client::{
    Client, Listed, NewSandbox, Sandbox, SandboxChanges, SandboxLease, SandboxOrSnapshot,
    SandboxSettings, ServerOptions, SnapshotAck, UnknownServer, VERSION, VERSION_HEADER,
    has_error_code, is_remote,
};
