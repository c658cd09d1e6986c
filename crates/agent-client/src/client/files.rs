//! Calls for files in a sandbox: read, write, list, remove.

use super::AgentClient;
use crate::connection_pool::PooledResponse;
use crate::error::ClientError;
use crate::request_body::RequestBody;
use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Type of an entry. For a symbolic link, the type of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum EntryKind {
    /// Regular file.
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    /// Directory.
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    /// Symbolic link without a target.
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
    /// Socket, pipe or device.
    #[serde(other)]
    Other,
}

/// Description of a file, directory or symbolic link.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last component of the path.
    pub name: String,
    /// Type of the entry.
    #[serde(rename = "type")]
    pub kind: EntryKind,
    /// Absolute path, with U+FFFD for bytes that are not UTF-8.
    pub path: String,
    /// Bytes of a path that is not UTF-8, in base64.
    #[serde(default)]
    pub path_bytes: Option<String>,
    /// Size in bytes, as decimal digits.
    pub size: String,
    /// Permission bits.
    pub mode: u32,
    /// Permissions in the format of `ls -l`.
    pub permissions: String,
    /// User name.
    pub owner: String,
    /// Group name.
    pub group: String,
    /// Modification time in RFC 3339.
    pub modified_time: String,
    /// Target of a symbolic link.
    #[serde(default)]
    pub symlink_target: Option<String>,
    /// Metadata that clients attached.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Set if the entry is a symbolic link.
    #[serde(default)]
    pub is_symlink: bool,
}

/// Response with one file or directory.
#[derive(Deserialize)]
struct EntryMessage {
    entry: EntryInfo,
}

/// Returns path and query of a request for a file.
fn files_path(path: &str, user: Option<&str>) -> String {
    let mut uri = String::from("/files?path=");
    escape(&mut uri, path.as_bytes());
    if let Some(user) = user {
        uri.push_str("&username=");
        escape(&mut uri, user.as_bytes());
    }
    uri
}

/// Percent-encodes the value of a query parameter.
pub(crate) fn escape(into: &mut String, text: &[u8]) {
    into.extend(percent_encode(text, &QUERY_VALUE));
}

/// Bytes that are escaped in a query value: all except the unreserved characters (RFC 3986) and
/// slashes.
const QUERY_VALUE: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// Reader of a file or an archive.
pub struct FileReader {
    pub(crate) answer: PooledResponse,
}

impl FileReader {
    /// Returns the next bytes, or `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        self.answer.next().await
    }
}

/// Writer of a file, or of an archive that is unpacked.
pub struct FileWriter {
    pub(crate) pieces: mpsc::Sender<Bytes>,
    pub(crate) call: JoinHandle<Result<(), ClientError>>,
}

impl FileWriter {
    /// Sends bytes. Waits while two chunks are queued, because the agent reads more slowly.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), ClientError> {
        if self.pieces.send(bytes.into()).await.is_ok() {
            return Ok(());
        }
        // The receiver is dropped only when the call has ended: report the call's error.
        let outcome = outcome(&mut self.call).await;
        Err(outcome.err().unwrap_or_else(|| {
            ClientError::Protocol("the agent closed the upload early".to_owned())
        }))
    }

    /// Waits until the file is written or the archive is completely unpacked.
    pub async fn finish(self) -> Result<(), ClientError> {
        let Self { pieces, mut call } = self;
        // Dropping the sender ends the request's body.
        drop(pieces);
        outcome(&mut call).await
    }
}

/// Waits for the result of an upload.
async fn outcome(call: &mut JoinHandle<Result<(), ClientError>>) -> Result<(), ClientError> {
    match call.await {
        Ok(result) => result,
        Err(e) => Err(ClientError::Protocol(format!(
            "the upload was aborted: {e}"
        ))),
    }
}

impl AgentClient {
    /// Reads a file as a stream. Relative paths are relative to the home directory of `user`.
    pub async fn read_stream(
        &self,
        path: &str,
        user: Option<&str>,
    ) -> Result<FileReader, ClientError> {
        self.get(&files_path(path, user)).await
    }

    /// Reads a file of at most `limit` bytes.
    pub async fn read(
        &self,
        path: &str,
        user: Option<&str>,
        limit: usize,
    ) -> Result<Bytes, ClientError> {
        self.read_stream(path, user)
            .await?
            .answer
            .collect(limit)
            .await
    }

    /// Writes a file. Creates missing parent directories.
    pub async fn write(
        &self,
        path: &str,
        user: Option<&str>,
        content: impl Into<Bytes>,
    ) -> Result<(), ClientError> {
        self.upload(files_path(path, user), RequestBody::whole(content))
            .await
    }

    /// Writes a file from a stream.
    pub fn write_stream(&self, path: &str, user: Option<&str>) -> FileWriter {
        let (pieces, body) = RequestBody::channel();
        let (client, uri) = (self.clone(), files_path(path, user));
        // The call runs in a task of its own, so that the caller can write while the agent stores.
        let call = tokio::spawn(async move { client.upload(uri, body).await });
        FileWriter { pieces, call }
    }

    async fn upload(&self, uri: String, body: RequestBody) -> Result<(), ClientError> {
        let answer = self.post_bytes(&uri, body).await?;
        answer.collect(64 * 1024).await?;
        Ok(())
    }

    /// Describes the file at `path`.
    pub async fn stat(&self, path: &str, user: Option<&str>) -> Result<EntryInfo, ClientError> {
        let request = json!({ "path": path });
        let message: EntryMessage = self
            .unary("/filesystem.Filesystem/Stat", user, &request)
            .await?;
        Ok(message.entry)
    }

    /// Lists a directory down to `depth` levels.
    pub async fn list_dir(
        &self,
        path: &str,
        user: Option<&str>,
        depth: u32,
    ) -> Result<Vec<EntryInfo>, ClientError> {
        /// Response with the entries of a directory.
        #[derive(Deserialize)]
        struct DirectoryList {
            #[serde(default)]
            entries: Vec<EntryInfo>,
        }
        let request = json!({ "path": path, "depth": depth });
        let list: DirectoryList = self
            .unary("/filesystem.Filesystem/ListDir", user, &request)
            .await?;
        Ok(list.entries)
    }

    /// Creates a directory and missing parents. If the directory exists, the error is
    /// [`crate::RpcCode::AlreadyExists`].
    pub async fn make_dir(&self, path: &str, user: Option<&str>) -> Result<EntryInfo, ClientError> {
        let request = json!({ "path": path });
        let message: EntryMessage = self
            .unary("/filesystem.Filesystem/MakeDir", user, &request)
            .await?;
        Ok(message.entry)
    }

    /// Removes a file, or a directory with its contents. A missing file is not an error.
    pub async fn remove(&self, path: &str, user: Option<&str>) -> Result<(), ClientError> {
        let request = json!({ "path": path });
        // The response is an empty object.
        self.unary::<serde::de::IgnoredAny>("/filesystem.Filesystem/Remove", user, &request)
            .await
            .map(drop)
    }

    /// Moves a file or directory.
    pub async fn rename(
        &self,
        from: &str,
        to: &str,
        user: Option<&str>,
    ) -> Result<EntryInfo, ClientError> {
        let request = json!({ "source": from, "destination": to });
        let message: EntryMessage = self
            .unary("/filesystem.Filesystem/Move", user, &request)
            .await?;
        Ok(message.entry)
    }
}
