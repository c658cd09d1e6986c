//! Tests of an agent that runs as a program of the host.

mod archives;
mod common;
mod files;
mod process;
mod processes;
mod protocol;
mod stuck_files;
mod watchers;
