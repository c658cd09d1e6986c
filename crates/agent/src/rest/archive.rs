//! Trees of files as archives: `GET /archive`, `PUT /archive`, `GET /layer`.
//!
//! The work on files is done by a thread of its own, joined to the connection by a bounded channel:
//! the faster side waits.

pub mod layer;
pub mod receive;
pub mod send;

pub use layer::is_excluded;

use super::error::RestError;
use super::file_query::{decode, decode_bytes, pairs};
use crate::state::Agent;
use crate::users::User;
use hyper::{StatusCode, Uri};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

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

    fn user(&self, agent: &Agent) -> Result<User, RestError> {
        Ok(agent.user(self.username.as_deref())?)
    }
}

/// A client's path, which need not be text, as [`User::resolve`] has it.
fn resolve(user: &User, path: &[u8]) -> PathBuf {
    match std::str::from_utf8(path) {
        Ok(path) => user.resolve(path, None),
        Err(_) => PathBuf::from(&user.home).join(OsStr::from_bytes(path)),
    }
}

/// Waits for room for one more archive.
async fn archive_permit(agent: &Agent) -> Result<OwnedSemaphorePermit, RestError> {
    let room = Arc::clone(&agent.archives).acquire_owned().await;
    room.map_err(|e| RestError::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))
}
