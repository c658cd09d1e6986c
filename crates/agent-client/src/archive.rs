//! Trees of files, as tar archives.

use crate::body::Outgoing;
use crate::client::{AgentClient, Call};
use crate::error::ClientError;
use crate::files::{FileReader, FileWriter, escape};
use hyper::Method;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How an archive is unpacked in the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArchiveOptions {
    /// Whom directories belong to that are made above it, and where relative paths begin.
    pub user: Option<String>,
    /// `user`, `user:group`, by name or number: whom everything in it belongs to, instead of whom it says. `@` is the user
    /// above.
    pub owner: Option<String>,
    /// Permissions of everything in it, in octal digits.
    pub mode: Option<String>,
    /// Whether the bytes are compressed with gzip.
    pub gzip: bool,
}

/// Longest list of changes, in bytes.
const MAX_CHANGES_ANSWER: usize = 64 << 20;

/// Files that are not as the template has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// By path.
    pub changes: Vec<Change>,
    /// There are more, which are not told.
    pub more: bool,
}

/// A file that is not as the template has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// From the root.
    pub path: String,
    /// `A`: it is new; `C`: it is another; `D`: it is gone.
    pub kind: char,
}

impl AgentClient {
    /// Reads files and directories as one tar archive, as it comes. Each is named in it as its path ends; `DIRECTORY/.` gives what
    /// is in the directory. When something fails midway, [`FileReader::next`] does, too.
    pub async fn archive_read(
        &self,
        paths: &[impl AsRef<[u8]>],
        user: Option<&str>,
    ) -> Result<FileReader, ClientError> {
        let mut query = Query::new("/archive");
        for path in paths {
            query.add("path", path.as_ref());
        }
        query.add_text("username", user);
        self.get(&query.uri).await
    }

    /// Unpacks a tar archive beneath a directory, which is made if it is not there.
    ///
    /// An archive that is broken is [`ClientError::Status`] with status 400, a disk without room one with 507; the message names
    /// the entry.
    pub fn archive_write(
        &self,
        directory: impl AsRef<[u8]>,
        options: &ArchiveOptions,
    ) -> FileWriter {
        let mut query = Query::new("/archive");
        query.add("path", directory.as_ref());
        query.add_text("username", options.user.as_deref());
        query.add_text("owner", options.owner.as_deref());
        query.add_text("mode", options.mode.as_deref());
        let (pieces, body) = Outgoing::channel();
        let (client, gzip) = (self.clone(), options.gzip);
        let call = tokio::spawn(async move { client.put(query.uri, gzip, body).await });
        FileWriter { pieces, call }
    }

    /// Reads what the sandbox changed against its template, as a layer of an OCI image (a tar archive).
    pub async fn layer(&self) -> Result<FileReader, ClientError> {
        self.get("/layer?username=root").await
    }

    /// Files that the sandbox changed against its template, at most so many, by path.
    pub async fn changes(&self, most: u32) -> Result<Changes, ClientError> {
        let uri = format!("/changes?username=root&limit={most}");
        let mut reader = self.get(&uri).await?;
        let mut body = Vec::new();
        while let Some(piece) = reader.next().await? {
            if body.len() + piece.len() > MAX_CHANGES_ANSWER {
                return Err(ClientError::Protocol("too many changes".to_owned()));
            }
            body.extend_from_slice(&piece);
        }
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("answer of /changes: {e}")))
    }

    /// Ends every process of the sandbox, which have `grace` to do so by themselves.
    pub async fn end_processes(&self, grace: Duration) -> Result<(), ClientError> {
        let uri = format!("/restart?username=root&grace_ms={}", grace.as_millis());
        let call = Call {
            method: Method::POST,
            path: &uri,
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, Outgoing::Whole(None)).await?;
        self.expect_success(answer).await?.collect(1024).await?;
        Ok(())
    }

    /// Takes the certificate authorities and the proxy of the host's network out of the sandbox.
    pub async fn withdraw_site(&self) -> Result<(), ClientError> {
        let call = Call {
            method: Method::POST,
            path: "/init",
            content: "application/json",
            user: None,
            headers: &[],
        };
        let body = serde_json::json!({ "withdrawSite": true }).to_string();
        let answer = self.send(call, Outgoing::Whole(Some(body.into()))).await?;
        self.expect_success(answer).await?.collect(1024).await?;
        Ok(())
    }

    /// What is at `uri`, as it comes.
    pub(crate) async fn get(&self, uri: &str) -> Result<FileReader, ClientError> {
        let call = Call {
            method: Method::GET,
            path: uri,
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, Outgoing::Whole(None)).await?;
        let answer = self.expect_success(answer).await?;
        Ok(FileReader { answer })
    }

    async fn put(&self, uri: String, gzip: bool, body: Outgoing) -> Result<(), ClientError> {
        let encoding = match gzip {
            true => "gzip",
            false => "identity",
        };
        let call = Call {
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
struct Query {
    uri: String,
    next: char,
}

impl Query {
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
