//! Proxy that adds headers with secrets to requests of sandboxes ([`HeaderProxy`]).
//!
//! The network of a sandbox passes connections to hosts that rules name. The proxy terminates TLS
//! with an authority of the sandbox ([`SandboxAuthority`]), connects to the server, verifies its
//! certificate, and forwards requests with the headers of the rules. The guest never receives the
//! values. Requests whose host differs from the connection's receive no header, and are rejected.

mod authority;
mod connection_limit;
mod exchange;
mod header_proxy;
mod leaf_certificates;
mod request_target;
mod rule_match;
mod server_connection;
mod task_set;
mod verdict;

pub use authority::{AuthorityError, SandboxAuthority};
pub use header_proxy::HeaderProxy;
