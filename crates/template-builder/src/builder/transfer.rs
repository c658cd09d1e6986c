//! Files on their way into and out of the sandboxes of a build, as archives. Nothing of them is unpacked on the host.

use super::copy::{CopyRequest, ROOT_USER, StagedFile};
use super::failure::BuildFailure;
use bytes::Bytes;
use jiffy_agent_client::files::{FileReader, FileWriter};
use jiffy_agent_client::{AgentClient, ArchiveOptions, ClientError};
use std::io::{self, Read};
use std::path::Path;
use tokio::fs::File;
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;

/// Most bytes of one piece.
const CHUNK_BYTES: usize = 256 * 1024;
/// Pieces that wait.
const MAX_QUEUED_CHUNKS: usize = 8;
/// How gzipped files begin.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How files are to arrive; `owner` is theirs unless the step says otherwise.
fn options(wanted: &CopyRequest, owner: Option<&str>, gzip: bool) -> ArchiveOptions {
    ArchiveOptions {
        user: Some(ROOT_USER.to_owned()),
        owner: wanted.owner.clone().or(owner.map(str::to_owned)),
        mode: wanted.mode.clone(),
        gzip,
    }
}

fn failed(error: ClientError) -> BuildFailure {
    BuildFailure::agent("unpack the files", error)
}

/// Unpacks an uploaded archive beneath `into`. Its files are the superuser's.
pub async fn upload(
    agent: &AgentClient,
    archive: &Path,
    into: &str,
    wanted: &CopyRequest,
) -> Result<(), BuildFailure> {
    let unreadable =
        |e: io::Error| BuildFailure::of(format!("cannot read the uploaded files: {e}"));
    let mut file = File::open(archive).await.map_err(unreadable)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut read = file.read(&mut chunk).await.map_err(unreadable)?;
    let gzip = chunk
        .get(..read)
        .is_some_and(|b| b.starts_with(&GZIP_MAGIC));
    let mut writer = agent.archive_write(into, &options(wanted, Some("0:0"), gzip));
    while read > 0 {
        chunk.truncate(read);
        writer.write(chunk).await.map_err(failed)?;
        chunk = vec![0; CHUNK_BYTES];
        read = file.read(&mut chunk).await.map_err(unreadable)?;
    }
    writer.finish().await.map_err(failed)
}

/// Brings files of one sandbox into another, each beneath a directory of its own in `into`, and says where they are then.
pub async fn between(
    from: &AgentClient,
    to: &AgentClient,
    items: &[StagedFile],
    into: &str,
    wanted: &CopyRequest,
) -> Result<Vec<StagedFile>, BuildFailure> {
    let mut arrived = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let target = format!("{into}/{number}");
        // Of a directory what is in it, however it is called.
        let path = match item.directory {
            true => format!("{}/.", item.path.trim_end_matches('/')),
            false => item.path.clone(),
        };
        let reader = from.archive_read(&[path], Some(ROOT_USER)).await;
        let reader = reader.map_err(|e| BuildFailure::agent(&format!("read {}", item.path), e))?;
        let writer = to.archive_write(&target, &options(wanted, None, false));
        pass(reader, writer).await?;
        arrived.push(match item.directory {
            true => StagedFile {
                path: target,
                ..item.clone()
            },
            false => StagedFile {
                path: format!("{target}/{}", item.name),
                ..item.clone()
            },
        });
    }
    Ok(arrived)
}

async fn pass(mut reader: FileReader, mut writer: FileWriter) -> Result<(), BuildFailure> {
    let unreadable = |e| BuildFailure::agent("read the files", e);
    while let Some(piece) = reader.next().await.map_err(unreadable)? {
        writer.write(piece).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)
}

/// Writes files that the step itself holds beneath `into`.
pub async fn inline(
    agent: &AgentClient,
    files: &[(String, String)],
    into: &str,
    wanted: &CopyRequest,
) -> Result<(), BuildFailure> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(u64::try_from(content.len()).unwrap_or(u64::MAX));
        let added = archive.append_data(&mut header, name, content.as_bytes());
        added.map_err(|e| BuildFailure::of(format!("`{name}` cannot be a file: {e}")))?;
    }
    let archive = archive.into_inner();
    let archive = archive.map_err(|e| BuildFailure::of(format!("cannot pack the files: {e}")))?;
    let mut writer = agent.archive_write(into, &options(wanted, Some("0:0"), false));
    writer.write(archive).await.map_err(failed)?;
    writer.finish().await.map_err(failed)
}

/// Whether a file is an archive that `ADD` unpacks, going by its name.
pub fn is_archive(item: &StagedFile) -> bool {
    let ends = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"];
    !item.directory && ends.iter().any(|end| item.name.ends_with(end))
}

/// Unpacks the archives among `items` beneath `to`.
pub async fn unpack(
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
        if !gzip && !item.name.ends_with(".tar") {
            return Err(BuildFailure::of(format!(
                "{} cannot be unpacked: only tar and gzipped tar can, so unpack it with RUN",
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

/// A reader for threads that block, of what the agent sends.
pub fn reader(mut from: FileReader) -> impl Read + Send {
    let (pieces, received) = mpsc::channel(MAX_QUEUED_CHUNKS);
    tokio::spawn(async move {
        loop {
            let piece = match from.next().await {
                Ok(Some(piece)) => Ok(piece),
                Ok(None) => return,
                Err(e) => Err(io::Error::other(e)),
            };
            let failed = piece.is_err();
            // Whoever does not read any more has said why.
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

struct ChunkReader {
    received: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for ChunkReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.received.blocking_recv() {
                Some(piece) => self.current = piece?,
                None => return Ok(0),
            }
        }
        let n = into.len().min(self.current.len());
        into[..n].copy_from_slice(&self.current.split_to(n));
        Ok(n)
    }
}
