//! Changes of a sandbox with the states of its files, and hashes of files, by which two sandboxes
//! are compared.

use super::AgentClient;
use crate::error::ClientError;
use crate::request_body::RequestBody;
use serde::Deserialize;

/// Maximum length of a response in bytes.
const MAX_ANSWER_BYTES: usize = 32 << 20;
/// Maximum number of paths in one request for hashes.
const MAX_PATHS: usize = 5000;
/// Maximum length of the paths in one request for hashes, in bytes.
const MAX_PATH_BYTES: usize = 512 << 10;

/// Files that differ from the template, with their states.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct DetailedChanges {
    /// Changes, in the order of the agent.
    pub changes: Vec<DetailedChange>,
    /// Set if changes are missing, because of the limit or of the agent's maximum directory depth.
    pub more: bool,
}

/// File that differs from the template. All fields are chosen by the guest.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DetailedChange {
    /// Absolute path, with U+FFFD for bytes that are not UTF-8.
    pub path: String,
    /// Bytes of a path that is not UTF-8, in base64.
    #[serde(default)]
    pub path_bytes: Option<String>,
    /// `A`: added. `C`: modified. `D`: deleted.
    pub kind: char,
    /// Present state. `None` for a deleted file.
    #[serde(default)]
    pub now: Option<FileState>,
    /// State in the template. `None` for an added file.
    #[serde(default)]
    pub before: Option<FileState>,
    /// Set for a directory that has no files except the listed ones.
    #[serde(default)]
    pub complete: bool,
}

/// State of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct FileState {
    /// `f`: regular file. `d`: directory. `l`: symbolic link. `o`: socket, pipe or device.
    #[serde(rename = "type")]
    pub kind: char,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Number of the user.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
}

impl AgentClient {
    /// Returns files that the sandbox changed compared with its template, with their states. At
    /// most `limit` files.
    pub async fn detailed_changes(&self, limit: u32) -> Result<DetailedChanges, ClientError> {
        let uri = format!("/changes?username=root&details=true&limit={limit}");
        let reader = self.get(&uri).await?;
        let body = reader.answer.collect(MAX_ANSWER_BYTES).await?;
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("invalid response of /changes: {e}")))
    }

    /// Returns the SHA-256 of files in hexadecimal digits, or `None` for each file that cannot be
    /// read. At most `max_bytes` of content are read in total.
    pub async fn hashes(
        &self,
        paths: &[&[u8]],
        max_bytes: u64,
    ) -> Result<Vec<Option<String>>, ClientError> {
        let uri = format!("/changes/hashes?username=root&maxBytes={max_bytes}");
        let mut hashes = Vec::with_capacity(paths.len());
        let mut rest = paths;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |path: &&&[u8]| {
                bytes += path.len() + 1;
                bytes <= MAX_PATH_BYTES
            };
            let count = rest.iter().take(MAX_PATHS).take_while(fits).count();
            // A single path is sent even if it is too long, and the agent rejects it.
            let (part, more) = rest.split_at(count.max(1));
            let body = RequestBody::whole(part.join(&0));
            let answer = self.post_bytes(&uri, body).await?;
            let answer = answer.collect(MAX_ANSWER_BYTES).await?;
            let answer: Vec<Option<String>> = serde_json::from_slice(&answer)
                .map_err(|e| ClientError::Protocol(format!("invalid response of hashes: {e}")))?;
            if answer.len() != part.len() {
                return Err(ClientError::Protocol("wrong number of hashes".to_owned()));
            }
            hashes.extend(answer);
            rest = more;
        }
        Ok(hashes)
    }
}
