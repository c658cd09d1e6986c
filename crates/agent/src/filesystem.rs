//! The service `filesystem.Filesystem`: entries, directories and watchers.

pub mod entry;
pub mod listing;
pub mod message;
pub mod metadata;
pub mod operation;
pub mod remove_tree;
pub mod request_path;
pub mod service;
pub mod watch;
pub mod watcher;
