//! Directory trees as tar archives, and the sandbox's changes compared with its template.

use super::files::{FileReader, FileWriter, escape};
use super::{AgentCall, AgentClient};
use crate::error::ClientError;
use crate::request_body::RequestBody;
use hyper::Method;
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Options for unpacking an archive in the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArchiveOptions {
    /// User that owns directories created above the target. Relative paths are relative to this
    /// user's home directory.
    pub user: Option<String>,
    /// Owner of every entry, as `user` or `user:group`, by name or number. `@` stands for the user
    /// in the field `user`. Defaults to the owners in the archive.
    pub owner: Option<String>,
    /// Permissions of every entry in octal digits. Defaults to the permissions in the archive.
    pub mode: Option<String>,
    /// Set if the archive is compressed with gzip.
    pub gzip: bool,
    /// Set if the archive is a layer of an image, whose marks delete files, as in
    /// [`AgentClient::layer`].
    pub layer: bool,
}

/// Maximum length of a response with changes, in bytes.
const MAX_CHANGES_BYTES: usize = 64 << 20;

/// Files that differ from the template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChanges {
    /// Changes, sorted by path.
    pub changes: Vec<FileChange>,
    /// Set if changes are missing, because of the limit or of the agent's maximum directory depth.
    pub more: bool,
}

/// File that differs from the template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// Absolute path.
    pub path: String,
    /// `A`: added. `C`: modified. `D`: deleted.
    pub kind: char,
}

impl AgentClient {
    /// Reads files and directories as one tar archive, as a stream. The name of each entry is the
    /// last component of its path. `DIRECTORY/.` stands for the entries of the directory. If an
    /// error occurs after the start, [`FileReader::next`] returns it.
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

    /// Unpacks a tar archive below a directory, which is created if it is missing.
    ///
    /// Fails with [`ClientError::Status`]: status 400 for a damaged archive, status 507 for a full
    /// disk. The message names the entry.
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
        query.add_text("layer", options.layer.then_some("true"));
        let (pieces, body) = RequestBody::channel();
        let (client, gzip) = (self.clone(), options.gzip);
        // The call runs in a task of its own, so that the caller can write while the agent unpacks.
        let call = tokio::spawn(async move { client.put(query.uri, gzip, body).await });
        FileWriter { pieces, call }
    }

    /// Reads the changes of the sandbox compared with its template, as a layer of an OCI image (a
    /// tar archive). Before, the agent removes the certificate authorities and the proxy of the
    /// host's network from the sandbox.
    pub async fn layer(&self) -> Result<FileReader, ClientError> {
        // If the sandbox has no access token, the agent answers this call, and the calls below,
        // only if the parameter `username` names root.
        self.get("/layer?username=root").await
    }

    /// Returns files that the sandbox changed compared with its template, sorted by path. At most
    /// `limit` files.
    pub async fn changes(&self, limit: u32) -> Result<FileChanges, ClientError> {
        let uri = format!("/changes?username=root&limit={limit}");
        let mut reader = self.get(&uri).await?;
        let mut body = Vec::new();
        while let Some(piece) = reader.next().await? {
            // The guest determines the number of changes.
            if body.len() + piece.len() > MAX_CHANGES_BYTES {
                return Err(ClientError::Protocol("too many changes".to_owned()));
            }
            body.extend_from_slice(&piece);
        }
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("invalid response of /changes: {e}")))
    }

    /// Terminates every process of the sandbox except the agent: with SIGTERM, and after `grace`
    /// with SIGKILL. The agent limits `grace` to 60 s.
    pub async fn end_processes(&self, grace: Duration) -> Result<(), ClientError> {
        let uri = format!("/restart?username=root&grace_ms={}", grace.as_millis());
        self.post_empty(&uri).await
    }

    /// Makes the kernel of the sandbox report all free memory to the host. Returns when this is
    /// done.
    pub async fn report_free_memory(&self) -> Result<(), ClientError> {
        self.post_empty("/free-memory/report?username=root").await
    }

    /// Writes all changes of the sandbox's file system to its disk, and blocks further changes
    /// until [`Self::thaw_disk`]. The agent thaws the file system after some seconds in any case.
    pub async fn freeze_disk(&self) -> Result<(), ClientError> {
        self.post_empty("/disk/freeze?username=root").await
    }

    /// Ends [`Self::freeze_disk`].
    pub async fn thaw_disk(&self) -> Result<(), ClientError> {
        self.post_empty("/disk/thaw?username=root").await
    }

    /// Sends a request without a body. Reads and discards the response's body, so that the
    /// connection returns to the pool.
    async fn post_empty(&self, uri: &str) -> Result<(), ClientError> {
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
        self.init(&serde_json::json!({ "withdrawSite": true }))
            .await
    }

    /// Installs certificate authorities and the proxy in place of the present ones.
    pub async fn install_site(&self, site: &SiteSettings) -> Result<(), ClientError> {
        self.init(&serde_json::json!({ "site": site })).await
    }

    /// Changes settings of the sandbox.
    async fn init(&self, body: &serde_json::Value) -> Result<(), ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path: "/init",
            content: "application/json",
            user: None,
            headers: &[],
        };
        let body = body.to_string();
        let answer = self
            .send(call, RequestBody::Whole(Some(body.into())))
            .await?;
        self.expect_success(answer).await?.collect(1024).await?;
        Ok(())
    }

    /// Reads the response of `uri` as a stream.
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

    /// Sends an archive to be unpacked. Succeeds if the agent has unpacked all of it. With `gzip`,
    /// the body is compressed.
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

/// Builder of a URI with a path and a query.
struct UriBuilder {
    uri: String,
    /// Character before the next parameter: `?` or `&`.
    separator: char,
}

impl UriBuilder {
    fn new(path: &str) -> Self {
        Self {
            uri: path.to_owned(),
            separator: '?',
        }
    }

    fn add(&mut self, name: &str, value: &[u8]) {
        self.uri.push(self.separator);
        self.separator = '&';
        self.uri.push_str(name);
        self.uri.push('=');
        // Paths are bytes and need not be UTF-8.
        escape(&mut self.uri, value);
    }

    fn add_text(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.add(name, value.as_bytes());
        }
    }
}
