//! Files in a sandbox.

use crate::client::{AgentCall, AgentClient};
use crate::connection_pool::PooledResponse;
use crate::error::ClientError;
use crate::request_body::RequestBody;
use bytes::Bytes;
use hyper::Method;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Type of an entry; for a link that of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum EntryKind {
    /// Regular file.
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    /// Directory.
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    /// Link without a target.
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
    /// Socket, pipe, device.
    #[serde(other)]
    Other,
}

/// A file, directory or link.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last part of the path.
    pub name: String,
    /// Type of the entry.
    #[serde(rename = "type")]
    pub kind: EntryKind,
    /// Absolute path, with U+FFFD for bytes that are not UTF-8.
    pub path: String,
    /// Bytes of a path that is not UTF-8, in base64.
    #[serde(default)]
    pub path_bytes: Option<String>,
    /// Bytes, as decimal digits.
    pub size: String,
    /// Permission bits.
    pub mode: u32,
    /// As `ls -l` shows them.
    pub permissions: String,
    /// User name.
    pub owner: String,
    /// Group name.
    pub group: String,
    /// RFC 3339.
    pub modified_time: String,
    /// Target of a link.
    #[serde(default)]
    pub symlink_target: Option<String>,
    /// Metadata that clients attached.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The entry is a link.
    #[serde(default)]
    pub is_symlink: bool,
}

#[derive(Deserialize)]
struct EntryMessage {
    entry: EntryInfo,
}

fn files_path(path: &str, user: Option<&str>) -> String {
    let mut uri = String::from("/files?path=");
    escape(&mut uri, path.as_bytes());
    if let Some(user) = user {
        uri.push_str("&username=");
        escape(&mut uri, user.as_bytes());
    }
    uri
}

/// Percent encoding of a query's value.
pub(crate) fn escape(into: &mut String, text: &[u8]) {
    into.extend(percent_encode(text, &QUERY_VALUE));
}

/// Bytes that are escaped in a query's value: all but the unreserved ones (RFC 3986) and slashes.
const QUERY_VALUE: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// A file, or an archive, that is being read.
pub struct FileReader {
    pub(crate) answer: PooledResponse,
}

impl FileReader {
    /// Returns the next bytes; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        self.answer.next().await
    }
}

/// A file that is being written, or an archive that is being unpacked.
pub struct FileWriter {
    pub(crate) pieces: mpsc::Sender<Bytes>,
    pub(crate) call: JoinHandle<Result<(), ClientError>>,
}

impl FileWriter {
    /// Sends bytes, at the agent's pace.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), ClientError> {
        if self.pieces.send(bytes.into()).await.is_ok() {
            return Ok(());
        }
        let outcome = outcome(&mut self.call).await;
        Err(outcome.err().unwrap_or_else(|| {
            ClientError::Protocol("the agent ended the upload early".to_owned())
        }))
    }

    /// Waits until the file, or all of the archive, is in its place.
    pub async fn finish(self) -> Result<(), ClientError> {
        let Self { pieces, mut call } = self;
        drop(pieces);
        outcome(&mut call).await
    }
}

async fn outcome(call: &mut JoinHandle<Result<(), ClientError>>) -> Result<(), ClientError> {
    match call.await {
        Ok(result) => result,
        Err(e) => Err(ClientError::Protocol(format!(
            "the upload was aborted: {e}"
        ))),
    }
}

impl AgentClient {
    /// Reads a file as a stream. Relative paths begin at the home of `user`.
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

    /// Writes a file, creating the directories above it.
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
        let call = tokio::spawn(async move { client.upload(uri, body).await });
        FileWriter { pieces, call }
    }

    async fn upload(&self, uri: String, body: RequestBody) -> Result<(), ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path: &uri,
            content: "application/octet-stream",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, body).await?;
        self.expect_success(answer)
            .await?
            .collect(64 * 1024)
            .await?;
        Ok(())
    }

    /// Describes the file at a path.
    pub async fn stat(&self, path: &str, user: Option<&str>) -> Result<EntryInfo, ClientError> {
        let request = json!({ "path": path });
        let found: EntryMessage = self
            .unary("/filesystem.Filesystem/Stat", user, &request)
            .await?;
        Ok(found.entry)
    }

    /// Lists a directory, down to `depth` levels.
    pub async fn list_dir(
        &self,
        path: &str,
        user: Option<&str>,
        depth: u32,
    ) -> Result<Vec<EntryInfo>, ClientError> {
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

    /// Creates a directory and those above it. One that exists is
    /// [`crate::RpcCode::AlreadyExists`].
    pub async fn make_dir(&self, path: &str, user: Option<&str>) -> Result<EntryInfo, ClientError> {
        let request = json!({ "path": path });
        let made: EntryMessage = self
            .unary("/filesystem.Filesystem/MakeDir", user, &request)
            .await?;
        Ok(made.entry)
    }

    /// Removes a file, or a directory with its contents. A missing one is no error.
    pub async fn remove(&self, path: &str, user: Option<&str>) -> Result<(), ClientError> {
        let request = json!({ "path": path });
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
        let moved: EntryMessage = self
            .unary("/filesystem.Filesystem/Move", user, &request)
            .await?;
        Ok(moved.entry)
    }
}
