//! Transfer of files into and out of a build's sandboxes, as archives. The host passes archives on
//! without unpacking them.

use super::copy::{CopyRequest, ROOT_USER, StagedFile};
use super::failure::BuildFailure;
use bytes::Bytes;
use jiffy_agent_client::files::{FileReader, FileWriter};
use jiffy_agent_client::{AgentClient, ArchiveOptions, ClientError};
use std::io::{self, Read};
use std::path::Path;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::sync::mpsc;

/// Size of a chunk in bytes.
const CHUNK_BYTES: usize = 256 * 1024;
/// Maximum number of queued chunks.
const MAX_QUEUED_CHUNKS: usize = 8;
/// Size of a block of a tar archive in bytes.
const TAR_BLOCK: u64 = 512;
/// First bytes of gzip data.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Returns the options of an extraction. `owner` applies if the request has no owner. Without both,
/// the owners in the archive apply. `gzip` states whether the archive is compressed.
fn archive_options(request: &CopyRequest, owner: Option<&str>, gzip: bool) -> ArchiveOptions {
    ArchiveOptions {
        user: Some(ROOT_USER.to_owned()),
        owner: request.owner.clone().or(owner.map(str::to_owned)),
        mode: request.mode.clone(),
        gzip,
        layer: false,
    }
}

fn failed(error: ClientError) -> BuildFailure {
    BuildFailure::agent("unpack the files", error)
}

/// Unpacks an uploaded archive below `into`. Files belong to root by default.
pub async fn unpack_upload(
    agent: &AgentClient,
    archive: &Path,
    into: &str,
    request: &CopyRequest,
) -> Result<(), BuildFailure> {
    let file = File::open(archive).await.map_err(unreadable)?;
    send_archive(agent, file, into, |gzip| {
        archive_options(request, Some("0:0"), gzip)
    })
    .await
}

/// Unpacks an archive below `into`. Files have the owners in the archive.
pub async fn unpack_archive(
    agent: &AgentClient,
    archive: &Path,
    into: &str,
) -> Result<(), BuildFailure> {
    let file = File::open(archive).await.map_err(unreadable)?;
    let options = |gzip| ArchiveOptions {
        user: Some(ROOT_USER.to_owned()),
        gzip,
        ..ArchiveOptions::default()
    };
    send_archive(agent, file, into, options).await
}

fn unreadable(error: io::Error) -> BuildFailure {
    BuildFailure::new(format!("cannot read the files: {error}"))
}

/// Sends an archive. `options` returns the options of an archive that may be compressed.
async fn send_archive(
    agent: &AgentClient,
    mut file: File,
    into: &str,
    options: impl FnOnce(bool) -> ArchiveOptions,
) -> Result<(), BuildFailure> {
    let mut chunk = vec![0; CHUNK_BYTES];
    // The first chunk shows whether the archive is compressed.
    let mut read = file.read(&mut chunk).await.map_err(unreadable)?;
    let gzip = chunk
        .get(..read)
        .is_some_and(|b| b.starts_with(&GZIP_MAGIC));
    let mut writer = agent.archive_write(into, &options(gzip));
    while read > 0 {
        chunk.truncate(read);
        writer.write(chunk).await.map_err(failed)?;
        chunk = vec![0; CHUNK_BYTES];
        read = file.read(&mut chunk).await.map_err(unreadable)?;
    }
    writer.finish().await.map_err(failed)
}

/// Copies files between sandboxes, each into a separate directory below `into`. Returns their new
/// paths.
pub async fn copy_between(
    from: &AgentClient,
    to: &AgentClient,
    items: &[StagedFile],
    into: &str,
    request: &CopyRequest,
) -> Result<Vec<StagedFile>, BuildFailure> {
    let mut copied = Vec::new();
    for (number, item) in items.iter().enumerate() {
        // A number, because sources of different directories can have the same name.
        let target = format!("{into}/{number}");
        // A directory is archived by its contents, without its name.
        let path = if item.directory {
            format!("{}/.", item.path.trim_end_matches('/'))
        } else {
            item.path.clone()
        };
        let reader = from.archive_read(&[path], Some(ROOT_USER)).await;
        let reader = reader.map_err(|e| BuildFailure::agent(&format!("read {}", item.path), e))?;
        let writer = to.archive_write(&target, &archive_options(request, None, false));
        forward(reader, writer).await?;
        copied.push(if item.directory {
            StagedFile {
                path: target,
                ..item.clone()
            }
        } else {
            StagedFile {
                path: format!("{target}/{}", item.name),
                ..item.clone()
            }
        });
    }
    Ok(copied)
}

/// Applies the changes of a sandbox to a new sandbox of the same template.
pub async fn copy_layer(layer: FileReader, to: &AgentClient) -> Result<(), BuildFailure> {
    let options = ArchiveOptions {
        user: Some(ROOT_USER.to_owned()),
        layer: true,
        ..ArchiveOptions::default()
    };
    forward(layer, to.archive_write("/", &options)).await
}

async fn forward(mut reader: FileReader, mut writer: FileWriter) -> Result<(), BuildFailure> {
    let unreadable = |e| BuildFailure::agent("read the files", e);
    while let Some(piece) = reader.next().await.map_err(unreadable)? {
        writer.write(piece).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)
}

/// Writes a step's inline files below `into`.
pub async fn write_inline(
    agent: &AgentClient,
    files: &[(String, String)],
    into: &str,
    request: &CopyRequest,
) -> Result<(), BuildFailure> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        // Equal contents give an equal archive, because times and owners are constant.
        header.set_mtime(0);
        header.set_size(u64::try_from(content.len()).unwrap_or(u64::MAX));
        let added = archive.append_data(&mut header, name, content.as_bytes());
        added.map_err(|e| {
            BuildFailure::new(format!("cannot create the inline file `{name}`: {e}"))
        })?;
    }
    let archive = archive.into_inner();
    let archive = archive.map_err(|e| BuildFailure::new(format!("cannot pack the files: {e}")))?;
    let mut writer = agent.archive_write(into, &archive_options(request, Some("0:0"), false));
    writer.write(archive).await.map_err(failed)?;
    writer.finish().await.map_err(failed)
}

/// Writes an open file below `into` under `name`.
pub async fn write_file(
    agent: &AgentClient,
    content: std::fs::File,
    name: &str,
    into: &str,
    request: &CopyRequest,
) -> Result<(), BuildFailure> {
    let mut content = File::from_std(content);
    content.rewind().await.map_err(unreadable)?;
    let size = content.metadata().await.map_err(unreadable)?.len();
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o600);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    let mut head = tar::Builder::new(Vec::new());
    // A long name needs a header of its own, which `append_data` writes. The content follows below.
    let added = head.append_data(&mut header, name, io::empty());
    added.map_err(|e| BuildFailure::new(format!("cannot pack the file `{name}`: {e}")))?;
    let head = std::mem::take(head.get_mut());
    let mut writer = agent.archive_write(into, &archive_options(request, Some("0:0"), false));
    writer.write(head).await.map_err(failed)?;
    let mut rest = content.take(size);
    let mut sent = 0;
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let read = rest.read(&mut chunk).await.map_err(unreadable)?;
        if read == 0 {
            break;
        }
        sent += read as u64;
        chunk.truncate(read);
        writer.write(chunk).await.map_err(failed)?;
    }
    // The last block is padded, and two empty blocks end the archive.
    let padding = sent.next_multiple_of(TAR_BLOCK) - sent + 2 * TAR_BLOCK;
    let padding = vec![0; usize::try_from(padding).unwrap_or(0)];
    writer.write(padding).await.map_err(failed)?;
    writer.finish().await.map_err(failed)
}

/// Creates the directory `name` below `into` with this owner, group and mode.
pub async fn write_directory(
    agent: &AgentClient,
    into: &str,
    name: &str,
    (uid, gid, mode): (u32, u32, u32),
) -> Result<(), BuildFailure> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(mode);
    header.set_uid(uid.into());
    header.set_gid(gid.into());
    header.set_mtime(0);
    header.set_size(0);
    let added = archive.append_data(&mut header, name, io::empty());
    let archive = added.and_then(|()| archive.into_inner());
    let archive = archive.map_err(unreadable)?;
    let options = ArchiveOptions {
        user: Some(ROOT_USER.to_owned()),
        ..ArchiveOptions::default()
    };
    let mut writer = agent.archive_write(into, &options);
    writer.write(archive).await.map_err(failed)?;
    writer.finish().await.map_err(failed)
}

/// Returns whether `ADD` unpacks a file, judging by its name.
pub fn is_archive(item: &StagedFile) -> bool {
    let ends = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"];
    !item.directory && ends.iter().any(|end| item.name.ends_with(end))
}

/// Unpacks the archives among `items` below `to`.
pub async fn unpack_archives(
    agent: &AgentClient,
    items: &[StagedFile],
    to: &str,
) -> Result<(), BuildFailure> {
    for item in items.iter().filter(|item| is_archive(item)) {
        let unreadable = |e| BuildFailure::agent(&format!("read {}", item.name), e);
        let mut reader = agent
            .read_stream(&item.path, Some(ROOT_USER))
            .await
            .map_err(unreadable)?;
        let mut piece = reader.next().await.map_err(unreadable)?;
        let gzip = piece.as_ref().is_some_and(|b| b.starts_with(&GZIP_MAGIC));
        // Check the format before the transfer: the agent decompresses gzip only.
        if !gzip && !item.name.ends_with(".tar") {
            return Err(BuildFailure::new(format!(
                "cannot unpack {}: ADD supports only tar and gzipped tar; unpack the archive with RUN",
                item.name
            )));
        }
        let options = ArchiveOptions {
            user: Some(ROOT_USER.to_owned()),
            gzip,
            ..ArchiveOptions::default()
        };
        let mut writer = agent.archive_write(to, &options);
        while let Some(bytes) = piece {
            writer.write(bytes).await.map_err(failed)?;
            piece = reader.next().await.map_err(unreadable)?;
        }
        writer.finish().await.map_err(failed)?;
    }
    Ok(())
}

/// Returns a blocking reader of a file that the agent sends. A task receives the file and passes
/// its chunks through a bounded channel. Must be called inside a runtime. Only a thread that may
/// block can use the reader.
pub fn blocking_reader(mut from: FileReader) -> impl Read + Send {
    let (pieces, received) = mpsc::channel(MAX_QUEUED_CHUNKS);
    tokio::spawn(async move {
        loop {
            let piece = match from.next().await {
                Ok(Some(piece)) => Ok(piece),
                Ok(None) => return,
                Err(e) => Err(io::Error::other(e)),
            };
            let failed = piece.is_err();
            // Stop if the reader was dropped, or after an error, which the reader reports.
            if pieces.send(piece).await.is_err() || failed {
                return;
            }
        }
    });
    ChunkReader {
        received,
        current: Bytes::new(),
    }
}

/// Reader of the chunks that a task receives.
struct ChunkReader {
    received: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for ChunkReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.received.blocking_recv() {
                Some(piece) => self.current = piece?,
                // The task has sent all chunks.
                None => return Ok(0),
            }
        }
        let n = into.len().min(self.current.len());
        into[..n].copy_from_slice(&self.current.split_to(n));
        Ok(n)
    }
}
