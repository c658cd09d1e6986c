//! Shell commands of coding agents in a sandbox, with undo.
//!
//! A *coding agent* is a program on the host, such as Claude Code. The *agent of the sandbox* is
//! the program in the guest that starts processes and accesses files.
//!
//! A session belongs to a project directory of the host and has one sandbox. Before each command,
//! changed files of the project are copied to the sandbox and a snapshot is taken. After the
//! command, its changes are copied back. [`Session::undo`] restores sandbox and project directory.
//!
//! The guest is not trusted: it determines only the content of files below the project directory.

mod conflict_copies;
mod guest_tree;
mod history;
mod hook;
mod host_directory;
mod host_tree;
mod ignore_rules;
mod limits;
mod project;
mod protected;
mod saved_copies;
mod session;
mod session_files;
mod shell;
mod tree;
mod tree_path;
mod unpack;

pub use history::{CommandStatus, HistoryEntry, Rejection};
pub use hook::{HookOptions, answer as answer_hook, quote};
pub use limits::SessionLimits;
pub use project::Project;
pub use session::undo::{UndoOptions, UndoReport};
pub use session::{CommandTicket, Session, SessionOptions, Templates};
pub use shell::{MAX_COMMAND_BYTES, ShellCommand};
pub use tree_path::TreePath;
