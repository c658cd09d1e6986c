//! `filesystem.Filesystem`: entries, directories and watchers.

pub mod entry;
pub mod message;
pub mod metadata;
pub mod operation;
pub mod service;
pub mod watch;
pub mod watcher;
