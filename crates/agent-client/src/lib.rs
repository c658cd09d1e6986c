//! Client of the guest agent, for the host and for the command line.
//!
//! [`Greeting`] assigns an identity to an agent. [`AgentClient`] runs commands and transfers files
//! with the protocol of envd, the guest agent of E2B, on connections that a connector opens.
//!
//! A guest is not trusted: all data from it is bounded and checked.

pub mod chunk_channel;
pub mod client;
mod clock_correction;
pub mod connection_pool;
pub mod error;
pub mod frame;
pub mod greeting;
pub mod request_body;
pub mod stdin_stream;

pub use client::AgentClient;
pub use client::archive::{ArchiveOptions, FileChange, FileChanges};
pub use client::commands::ClientCommands;
pub use client::files::{EntryInfo, EntryKind, FileReader, FileWriter};
pub use client::metrics::GuestMetrics;
pub use client::process::{
    ExitStatus, Process, ProcessEvent, ProcessInfo, ProcessLimits, ProcessSpec, PtySize,
};
pub use client::process_list::GuestProcess;
pub use client::tree::{TreeEntry, TreeEntryKind};
pub use client::{archive, comparison, files, metrics, process, process_list, tree};
pub use connection_pool::{ConnectionPool, PooledResponse};
pub use error::{ClientError, RpcCode};
pub use greeting::{AssignedGreeting, Greeting, GreetingError, ReadyAgent};
pub use request_body::RequestBody;
pub use stdin_stream::StdinStream;
