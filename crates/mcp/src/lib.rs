//! MCP server: sandboxes as tools of coding agents.
//!
//! The *client* of the server is a coding agent. The *agent* of a sandbox is the program in the
//! guest that starts processes and accesses files ([`jiffy_agent_client`]).
//!
//! Data from a sandbox is not trusted: all results are bounded and passed on as data.
//!
//! [`serve_stdio`] serves one client over standard input and output, and [`HttpServer`] the callers
//! of a listener. A call of a tool consists of requests to the API and to the agent of a sandbox,
//! with the client library of the command line.

mod catalog;
mod command;
mod edit;
mod error;
mod host_paths;
mod http;
mod images;
mod install;
mod options;
mod output;
mod resources;
mod server;
mod session;
mod stdio;
mod subscriptions;
mod tools;

pub use http::{ApiClients, HttpCaller, HttpResponse, HttpServer, LastAddress};
pub use images::{PrepareFuture, Templates};
pub use install::{ConfigurationChange, McpClient, jsonc};
pub use options::{McpOptions, ToolGroup};
pub use stdio::serve_stdio;
