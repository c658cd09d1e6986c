//! Trees of files, as tar archives.

use crate::client::{AgentCall, AgentClient};
use crate::error::ClientError;
use crate::files::{FileReader, FileWriter, escape};
use crate::request_body::RequestBody;
use hyper::Method;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Options for unpacking an archive in the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArchiveOptions {
    /// Owner of the directories that are made above it; its home is where relative paths begin.
    pub user: Option<String>,
    /// `user`, `user:group`, by name or number: owner of every entry, instead of the archive's. `@`
    /// is the user above.
    pub owner: Option<String>,
    /// Permissions of everything in it, in octal digits.
    pub mode: Option<String>,
    /// The bytes are compressed with gzip.
    pub gzip: bool,
}

/// Longest answer with changes, in bytes.
const MAX_CHANGES_BYTES: usize = 64 << 20;

/// Files that differ from the template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChanges {
    /// By path.
    pub changes: Vec<FileChange>,
    /// Further changes were left out.
    pub more: bool,
}

/// File that differs from the template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// Path from the root.
    pub path: String,
    /// `A`: added; `C`: modified; `D`: deleted.
    pub kind: char,
}

impl AgentClient {
    /// Reads files and directories as one tar archive, as a stream. Each has the name at the end of
    /// its path; `DIRECTORY/.` means the entries of the directory. When something fails midway,
    /// [`FileReader::next`] does, too.
    pub async fn archive_read(
        &self,
        paths: &[impl AsRef<[u8]>],
        user: Option<&str>,
    ) -> Result<FileReader, ClientError> {
        let mut query = UriBuilder::new("/archive");
        for path in paths {
            query.add("path", path.as_ref());
        }
        query.add_text("username", user);
        self.get(&query.uri).await
    }

    /// Unpacks a tar archive beneath a directory, which is made if it is missing.
    ///
    /// An archive that is broken is [`ClientError::Status`] with status 400, a full disk one with
    /// 507; the message names the entry.
    pub fn archive_write(
        &self,
        directory: impl AsRef<[u8]>,
        options: &ArchiveOptions,
    ) -> FileWriter {
        let mut query = UriBuilder::new("/archive");
        query.add("path", directory.as_ref());
        query.add_text("username", options.user.as_deref());
        query.add_text("owner", options.owner.as_deref());
        query.add_text("mode", options.mode.as_deref());
        let (pieces, body) = RequestBody::channel();
        let (client, gzip) = (self.clone(), options.gzip);
        let call = tokio::spawn(async move { client.put(query.uri, gzip, body).await });
        FileWriter { pieces, call }
    }

    /// Reads the sandbox's changes against its template, as a layer of an OCI image (a tar
    /// archive).
    pub async fn layer(&self) -> Result<FileReader, ClientError> {
        self.get("/layer?username=root").await
    }

    /// Returns files that the sandbox changed against its template, at most so many, by path.
    pub async fn changes(&self, most: u32) -> Result<FileChanges, ClientError> {
        let uri = format!("/changes?username=root&limit={most}");
        let mut reader = self.get(&uri).await?;
        let mut body = Vec::new();
        while let Some(piece) = reader.next().await? {
            if body.len() + piece.len() > MAX_CHANGES_BYTES {
                return Err(ClientError::Protocol("too many changes".to_owned()));
            }
            body.extend_from_slice(&piece);
        }
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("answer of /changes: {e}")))
    }

    /// Ends every process of the sandbox: SIGTERM, and SIGKILL after `grace`.
    pub async fn end_processes(&self, grace: Duration) -> Result<(), ClientError> {
        let uri = format!("/restart?username=root&grace_ms={}", grace.as_millis());
        self.post_nothing(&uri).await
    }

    /// Has the sandbox's kernel tell the host of all free memory; returns when that is done.
    pub async fn report_free_memory(&self) -> Result<(), ClientError> {
        self.post_nothing("/free-memory/report?username=root").await
    }

    async fn post_nothing(&self, uri: &str) -> Result<(), ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path: uri,
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::Whole(None)).await?;
        self.expect_success(answer).await?.collect(1024).await?;
        Ok(())
    }

    /// Removes the certificate authorities and the proxy of the host's network from the sandbox.
    pub async fn withdraw_site(&self) -> Result<(), ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path: "/init",
            content: "application/json",
            user: None,
            headers: &[],
        };
        let body = serde_json::json!({ "withdrawSite": true }).to_string();
        let answer = self
            .send(call, RequestBody::Whole(Some(body.into())))
            .await?;
        self.expect_success(answer).await?.collect(1024).await?;
        Ok(())
    }

    /// Reads the answer of `uri` as a stream.
    pub(crate) async fn get(&self, uri: &str) -> Result<FileReader, ClientError> {
        let call = AgentCall {
            method: Method::GET,
            path: uri,
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::Whole(None)).await?;
        let answer = self.expect_success(answer).await?;
        Ok(FileReader { answer })
    }

    async fn put(&self, uri: String, gzip: bool, body: RequestBody) -> Result<(), ClientError> {
        let encoding = if gzip { "gzip" } else { "identity" };
        let call = AgentCall {
            method: Method::PUT,
            path: &uri,
            content: "application/x-tar",
            user: None,
            headers: &[("content-encoding", encoding.to_owned())],
        };
        let answer = self.send(call, body).await?;
        self.expect_success(answer)
            .await?
            .collect(64 * 1024)
            .await?;
        Ok(())
    }
}

/// A path with a query.
struct UriBuilder {
    uri: String,
    next: char,
}

impl UriBuilder {
    fn new(path: &str) -> Self {
        Self {
            uri: path.to_owned(),
            next: '?',
        }
    }

    fn add(&mut self, name: &str, value: &[u8]) {
        self.uri.push(self.next);
        self.next = '&';
        self.uri.push_str(name);
        self.uri.push('=');
        escape(&mut self.uri, value);
    }

    fn add_text(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.add(name, value.as_bytes());
        }
    }
}
