//! Tools that copy files between host and sandbox.

use crate::catalog::{Effect, Reply, ToolEntry};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::session::Session;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Size of the chunks of an upload in bytes.
const CHUNK_BYTES: usize = 256 << 10;
/// Maximum size of a downloaded file in bytes, which bounds the space that a sandbox can use on the
/// host.
const MAX_DOWNLOAD_BYTES: u64 = 4 << 30;

/// Returns the tools.
pub fn tools() -> Vec<ToolEntry> {
    let group = ToolGroup::Transfer;
    vec![
        ToolEntry::new(
            "upload",
            group,
            Effect::Destructive,
            "Copy a file of the host to a sandbox. The file must be below a directory that the \
             user permitted.",
            upload,
        ),
        ToolEntry::new(
            "download",
            group,
            Effect::Destructive,
            "Copy a file of a sandbox to the host, below a directory that the user permitted.",
            download,
        ),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct TransferArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Path of the file on the host.
    host_path: String,
    /// Path of the file in the sandbox.
    path: String,
}

#[derive(Serialize, JsonSchema)]
struct TransferOutput {
    /// Path of the file in the sandbox.
    path: String,
    /// Path of the file on the host.
    host_path: String,
    /// Size of the file in bytes.
    bytes: u64,
}

/// Copies a file of the host to a sandbox.
async fn upload(
    session: Arc<Session>,
    arguments: TransferArguments,
) -> ToolResult<Reply<TransferOutput>> {
    let (host_path, path) = (arguments.host_path, arguments.path);
    let mut source = File::from_std(session.allowed.open(&host_path)?);
    let agent = session.agent(&arguments.sandbox).await?;
    let mut writer = agent.write_stream(&path, None);
    let failed = |e| ToolError::of_path("write", &path, &e);
    let mut bytes = 0;
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let read = source.read(&mut chunk).await;
        let count = read.map_err(|e| ToolError::new(format!("cannot read `{host_path}`: {e}")))?;
        if count == 0 {
            break;
        }
        chunk.truncate(count);
        writer.write(chunk).await.map_err(failed)?;
        bytes += count as u64;
    }
    writer.finish().await.map_err(failed)?;
    let output = TransferOutput {
        path,
        host_path,
        bytes,
    };
    Ok(output.into())
}

/// Copies a file of a sandbox to the host.
async fn download(
    session: Arc<Session>,
    arguments: TransferArguments,
) -> ToolResult<Reply<TransferOutput>> {
    let (host_path, path) = (arguments.host_path, arguments.path);
    let agent = session.agent(&arguments.sandbox).await?;
    let target = session.allowed.create(&host_path)?;
    let write_failed = |e| ToolError::new(format!("cannot write `{host_path}`: {e}"));
    let file = target.file.try_clone().map_err(write_failed)?;
    let mut file = File::from_std(file);
    let failed = |e| ToolError::of_path("read", &path, &e);
    let mut reader = agent.read_stream(&path, None).await.map_err(failed)?;
    let mut bytes = 0;
    while let Some(chunk) = reader.next().await.map_err(failed)? {
        bytes += chunk.len() as u64;
        if bytes > MAX_DOWNLOAD_BYTES {
            return Err(ToolError::new(format!(
                "`{path}` has more than {MAX_DOWNLOAD_BYTES} bytes: split it with sandbox_exec"
            )));
        }
        file.write_all(&chunk).await.map_err(write_failed)?;
    }
    file.flush().await.map_err(write_failed)?;
    target.finish().map_err(write_failed)?;
    let output = TransferOutput {
        path,
        host_path,
        bytes,
    };
    Ok(output.into())
}
