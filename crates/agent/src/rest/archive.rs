//! Trees of files as archives: `GET /archive`, `PUT /archive`, `GET /layer`.
//!
//! A worker reads or writes the files. A bounded channel connects the worker to the HTTP
//! connection, so that the faster side waits.

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

/// Maximum number of chunks in the channel between worker and connection.
const MAX_QUEUED_CHUNKS: usize = 4;

/// Query parameters of a request for an archive.
#[derive(Debug, Default, PartialEq, Eq)]
struct ArchiveQuery {
    paths: Vec<Vec<u8>>,
    username: Option<String>,
    /// Only for `PUT`: owner of all unpacked files. `@` is the user of the request.
    owner: Option<String>,
    /// Only for `PUT`: permissions of all unpacked files, as an octal number.
    mode: Option<String>,
    /// Only for `PUT`: the archive is a layer of an image (`true`).
    layer: bool,
}

impl ArchiveQuery {
    /// Parses the query of a request. Empty parameters count as missing.
    fn of(uri: &Uri) -> Self {
        let mut query = Self::default();
        for (name, value) in pairs(uri).filter(|(_, value)| !value.is_empty()) {
            match name {
                "path" => query.paths.push(decode_bytes(value)),
                "username" => query.username = Some(decode(value)),
                "owner" => query.owner = Some(decode(value)),
                "mode" => query.mode = Some(decode(value)),
                "layer" => query.layer = value == "true",
                _ => {}
            }
        }
        query
    }

    /// Returns the user of the request, before the look-up.
    fn lookup(&self, agent: &Agent) -> UserLookup {
        agent.lookup(self.username.as_deref())
    }
}

/// Resolves a client's path as [`User::resolve`] does. The path may be invalid UTF-8.
fn resolve(user: &User, path: &[u8]) -> PathBuf {
    RequestPath::from_bytes(path.to_vec()).resolve(user)
}
