//! Client of the control plane: the daemon of this host over its socket, or that of another host
//! over http or https.

// Everything that is printed passes `terminal`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod client;
pub mod progress;
pub mod step_bar;
pub mod terminal;

pub use client::{
    Client, Listed, NewSandbox, Sandbox, SandboxLease, SandboxSettings, ServerOptions, SnapshotAck,
    UnknownServer, VERSION, VERSION_HEADER, is_refusal, is_remote,
};
