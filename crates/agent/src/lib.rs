//! Agent in a sandbox.
//!
//! * [`boot`]: file systems, network and identity of a guest, and the greeting of the host.
//! * [`server`]: connections, routing, access.
//! * [`rpc`]: Connect framing and errors.
//! * [`process`]: processes and terminals.
//! * [`filesystem`]: the file system service and its watchers.
//! * [`rest`]: plain HTTP calls, above all `/files`.
//! * [`link_socket`]: the agent's ports on engines without vsock.
//! * [`workers`]: threads for calls that may wait for a file system.
//! * [`volume_mount`]: volumes, whose files the host serves.
//! * [`port_forward`]: connections from the host to TCP ports of the guest.
//! * [`guest_sockets`]: Unix sockets of the guest whose connections lead to the host.

pub mod body;
pub mod boot;
pub mod calendar;
pub mod cpu_sample;
pub mod filesystem;
pub mod guest_sockets;
pub mod hook_directory;
pub mod huge_text;
pub mod link_socket;
pub mod modprobe;
pub mod port_forward;
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
pub mod volume_mount;
pub mod vsock;
pub mod workers;
