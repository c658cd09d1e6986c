//! Client of the guest agent, from the host's side.
//!
//! [`Greeting`] tells an agent who it is; [`AgentClient`] runs commands and moves files over the envd protocol, on whatever connections a connector opens.
//!
//! A guest is hostile: everything it sends is bounded and checked.

pub mod archive;
pub mod body;
pub mod client;
pub mod error;
pub mod files;
pub mod frame;
pub mod greeting;
pub mod metrics;
pub mod pool;
pub mod process;
pub mod stdin;

pub use archive::{ArchiveOptions, Change, Changes};
pub use body::Outgoing;
pub use client::AgentClient;
pub use error::{ClientError, Code};
pub use files::{EntryInfo, EntryKind, FileReader, FileWriter};
pub use greeting::{Greeting, GreetingError};
pub use metrics::GuestMetrics;
pub use pool::{Answer, Connections};
pub use process::{ExitStatus, Limits, Process, ProcessEvent, ProcessInfo, ProcessSpec, PtySize};
pub use stdin::StdinStream;
