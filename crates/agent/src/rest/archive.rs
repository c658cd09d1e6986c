//! Trees of files as archives: `GET /archive`, `PUT /archive`, `GET /layer`.
//!
//! A worker reads and writes the files, connected to the HTTP connection by a bounded channel: the
//! faster side waits.

pub mod layer;
pub mod receive;
pub mod send;

pub use layer::is_excluded;

use super::file_query::{decode, decode_bytes, pairs};
use crate::filesystem::request_path::RequestPath;
use crate::state::Agent;
use crate::users::{User, UserLookup};
use hyper::Uri;
use std::path::PathBuf;

/// Pieces under way between thread and connection.
const MAX_QUEUED_CHUNKS: usize = 4;

/// Parameters of an archive in a query.
#[derive(Debug, Default, PartialEq, Eq)]
struct ArchiveQuery {
    paths: Vec<Vec<u8>>,
    username: Option<String>,
    owner: Option<String>,
    mode: Option<String>,
}

impl ArchiveQuery {
    fn of(uri: &Uri) -> Self {
        let mut query = Self::default();
        for (name, value) in pairs(uri).filter(|(_, value)| !value.is_empty()) {
            match name {
                "path" => query.paths.push(decode_bytes(value)),
                "username" => query.username = Some(decode(value)),
                "owner" => query.owner = Some(decode(value)),
                "mode" => query.mode = Some(decode(value)),
                _ => {}
            }
        }
        query
    }

    fn lookup(&self, agent: &Agent) -> UserLookup {
        agent.lookup(self.username.as_deref())
    }
}

/// A client's path, which need not be text, as [`User::resolve`] resolves it.
fn resolve(user: &User, path: &[u8]) -> PathBuf {
    RequestPath::from_bytes(path.to_vec()).resolve(user)
}
