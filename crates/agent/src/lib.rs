//! The agent inside a sandbox.
//!
//! * [`boot`]: what pid 1 does before anything else, and the greeting with the host.
//! * [`server`]: connections, routing, access.
//! * [`rpc`]: Connect framing and errors.
//! * [`process`]: processes and terminals.
//! * [`filesystem`]: the file system service and its watchers.
//! * [`rest`]: plain HTTP calls, above all `/files`.
//! * [`link`]: the agent's ports where there is no vsock.
//! * [`forward`]: joins a stream to a TCP port of the guest.

pub mod body;
pub mod boot;
pub mod filesystem;
pub mod forward;
pub mod link;
pub mod modprobe;
pub mod process;
pub mod rest;
pub mod rpc;
pub mod runtime;
pub mod server;
pub mod settings;
pub mod standalone;
pub mod state;
pub mod sys;
pub mod users;
pub mod vsock;
