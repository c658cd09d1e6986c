//! `jiffy cp -r`: copies directories to and from a sandbox with the semantics of `docker cp`.
//!
//! Archives from a sandbox are untrusted. They are unpacked in a directory that this process
//! chooses, below a new name unless only the contents of a directory are copied. The unpacker
//! follows no symbolic links, and creates no devices, named pipes or setuid files.

use crate::cli::CpArgs;
use anyhow::Context;
use bytes::Bytes;
use jiffy_agent_client::chunk_channel::{ChunkReader, ChunkWriter, QUEUED_CHUNKS};
use jiffy_agent_client::{AgentClient, ArchiveOptions, EntryKind, FileReader};
use jiffy_archive::{PackOptions, Packer, UnpackOptions, UnpackOwner, UnpackStats, unpack};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

const CHUNK_BYTES: usize = 256 * 1024;

/// Uploads the tree at `from`, or the archive on standard input if `from` is `-`.
pub async fn upload(
    args: &CpArgs,
    agent: &AgentClient,
    from: &str,
    to: &str,
) -> anyhow::Result<()> {
    let (directory, source) = match from {
        "-" => (to.to_owned(), from_stdin()),
        from => {
            let metadata =
                std::fs::metadata(from).with_context(|| format!("cannot read {from}"))?;
            // `DIR/.` denotes the contents of a directory.
            let contents = from.ends_with("/.") || from == "." || !has_name(from);
            let (directory, name) = target_in_sandbox(args, agent, to, from, contents).await?;
            anyhow::ensure!(
                metadata.is_dir() || name != b".",
                "{from} is not a directory"
            );
            (directory, from_tree(PathBuf::from(from), name))
        }
    };
    let options = ArchiveOptions {
        user: args.user.clone(),
        // An archive on standard input retains its owners. Files of a tree belong to the user of
        // the request, which `@` denotes.
        owner: (from != "-").then(|| "@".to_owned()),
        ..ArchiveOptions::default()
    };
    send(agent, &directory, &options, source).await
}

/// Unpacks an archive in a directory of the sandbox.
pub async fn send(
    agent: &AgentClient,
    directory: &str,
    options: &ArchiveOptions,
    (mut chunks, task): Source,
) -> anyhow::Result<()> {
    let mut writer = agent.archive_write(directory, options);
    let context = || format!("cannot unpack in {directory} of the sandbox");
    while let Some(chunk) = chunks.recv().await {
        writer.write(chunk).await.with_context(context)?;
    }
    // If the source failed, the archive is not finished: the agent then reports it as incomplete.
    task.await??;
    writer.finish().await.with_context(context)
}

/// Returns the directory in the sandbox in which the archive is unpacked, and the name of the tree
/// in it. The name is `.` if only the contents of the tree are copied. `contents` states that only
/// the entries of a directory are copied.
async fn target_in_sandbox(
    args: &CpArgs,
    agent: &AgentClient,
    to: &str,
    from: &str,
    contents: bool,
) -> anyhow::Result<(String, Vec<u8>)> {
    let to = if to.is_empty() { "." } else { to };
    let name = Path::new(from).file_name().unwrap_or_default();
    match agent.stat(to, args.user.as_deref()).await {
        Ok(metadata) if metadata.kind == EntryKind::Directory => {
            let name = if contents { b"." } else { name.as_bytes() };
            Ok((to.to_owned(), name.to_vec()))
        }
        Ok(_) => anyhow::bail!("{to} in the sandbox exists and is not a directory"),
        Err(e) if e.is_not_found() => {
            let trimmed = to.trim_end_matches('/');
            // The tree receives the name of the destination, which does not exist yet. A
            // destination that ends with the component `.` or `..` provides no name.
            let (parent, name) = match trimmed.rsplit_once('/') {
                Some((parent, name)) => (format!("{parent}/"), name),
                None => (".".to_owned(), trimmed),
            };
            Ok(if contents || matches!(name, "." | "..") {
                (to.to_owned(), b".".to_vec())
            } else {
                (parent, name.into())
            })
        }
        Err(e) => {
            Err(e).with_context(|| format!("cannot read the metadata of {to} in the sandbox"))
        }
    }
}

/// Downloads the tree at `path` to `to`, or as an archive to standard output if `to` is `-`.
pub async fn download(
    args: &CpArgs,
    agent: &AgentClient,
    path: &str,
    to: &str,
) -> anyhow::Result<()> {
    let context = || format!("cannot read {path} in the sandbox");
    let mut reader = agent
        .archive_read(&[path], args.user.as_deref())
        .await
        .with_context(context)?;
    if to == "-" {
        let mut out = tokio::io::stdout();
        while let Some(chunk) = reader.next().await.with_context(context)? {
            out.write_all(&chunk).await?;
        }
        return Ok(out.flush().await?);
    }
    let (directory, rename) = target_on_host(path, to)?;
    let root =
        File::open(&directory).with_context(|| format!("cannot open {}", directory.display()))?;
    let unpacked = receive(reader, root, rename, ReceiveLimits::default()).await;
    report_skipped(&unpacked.with_context(context)?);
    Ok(())
}

/// Limits of a download. `None` is unlimited.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReceiveLimits {
    /// Maximum number of bytes of files. The archive itself may have twice as many.
    pub bytes: Option<u64>,
    /// Maximum number of files and directories.
    pub entries: Option<u64>,
}

/// Prints a warning if entries were not created on this host.
pub fn report_skipped(stats: &UnpackStats) {
    if let Some(first) = &stats.first_skipped {
        errln!(
            "jiffy: skipped {} devices and named pipes of the sandbox, first {first}",
            stats.skipped
        );
    }
}

/// Unpacks a download below `root` as an untrusted archive. `rename`, if present, replaces the root
/// name of the archive. Limits are checked before data beyond them is written.
pub async fn receive(
    reader: FileReader,
    root: File,
    rename: Option<Vec<u8>>,
    limits: ReceiveLimits,
) -> anyhow::Result<UnpackStats> {
    let options = UnpackOptions {
        owner: UnpackOwner::Process,
        mode: None,
        confined: true,
        rename,
        max_bytes: limits.bytes,
        max_entries: limits.entries,
        layer: false,
    };
    // The unpacker blocks on the file system, and therefore runs on a thread of its own.
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let task = tokio::task::spawn_blocking(move || {
        unpack(ChunkReader::new(receiver), root.as_fd(), &options)
    });
    // Headers of many small files can be as large as their contents.
    let max_archive = limits.bytes.map_or(u64::MAX, |max| max.saturating_mul(2));
    let forwarded = forward(reader, sender, max_archive).await;
    let unpacked = task.await?;
    // A failed connection is reported instead of the truncated archive that it causes.
    forwarded?;
    unpacked.context("cannot unpack the archive on this host")
}

/// Returns the directory on this host in which the archive is unpacked, and the name that replaces
/// the root name of the archive. The name is `None` if only the contents of a directory are copied.
fn target_on_host(path: &str, to: &str) -> anyhow::Result<(PathBuf, Option<Vec<u8>>)> {
    let contents = path.ends_with("/.") || !has_name(path);
    let target = Path::new(to);
    let name = |path: &Path| path.file_name().map(|name| name.as_bytes().to_vec());
    if target.is_dir() {
        let rename = (!contents).then(|| name(Path::new(path))).flatten();
        return Ok((target.to_path_buf(), rename));
    }
    // As by `docker cp`, only the last directory is created.
    if contents {
        std::fs::create_dir(target).with_context(|| format!("cannot create {to}"))?;
        return Ok((target.to_path_buf(), None));
    }
    let parent = match target.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let rename = name(target).with_context(|| format!("{to} does not exist"))?;
    Ok((parent.to_path_buf(), Some(rename)))
}

/// Returns whether a path ends with a name, and not with `/`, `.` or `..`.
fn has_name(path: &str) -> bool {
    Path::new(path).file_name().is_some()
}

/// Chunks of an archive, and the task that creates them.
pub type Source = (mpsc::Receiver<Bytes>, JoinHandle<anyhow::Result<()>>);

/// Reads an archive from standard input.
fn from_stdin() -> Source {
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let task = tokio::spawn(async move {
        let mut input = tokio::io::stdin();
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let n = input.read(&mut chunk).await?;
            chunk.truncate(n);
            if n == 0 || sender.send(chunk.into()).await.is_err() {
                return Ok(());
            }
        }
    });
    (receiver, task)
}

/// Packs the tree at `path` with the name `name`.
pub fn from_tree(path: PathBuf, name: Vec<u8>) -> Source {
    from_tree_with(path, name, PackOptions::TREE)
}

/// Packs the part of the tree at `path` that `contents` selects, with the name `name`.
pub fn from_tree_with(path: PathBuf, name: Vec<u8>, contents: PackOptions) -> Source {
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let task = tokio::task::spawn_blocking(move || {
        let chunks = io::BufWriter::with_capacity(CHUNK_BYTES, ChunkWriter(sender));
        let mut packer = Packer::new(chunks, contents);
        packer.add(&path, &name)?;
        packer.finish()?;
        Ok(())
    });
    (receiver, task)
}

/// Passes the chunks of a download to the unpacker. Fails if the archive exceeds `max_bytes`.
async fn forward(
    mut reader: FileReader,
    sender: mpsc::Sender<Bytes>,
    max_bytes: u64,
) -> anyhow::Result<()> {
    let mut remaining = max_bytes;
    while let Some(chunk) = reader.next().await? {
        let size = u64::try_from(chunk.len())?;
        remaining = remaining
            .checked_sub(size)
            .with_context(|| format!("the archive exceeds {} MiB", max_bytes >> 20))?;
        // The unpacker may have stopped, for example at a limit; its error is reported by the
        // caller.
        if sender.send(chunk).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_copied_to_the_same_path_as_by_docker() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().to_str().unwrap();
        let new = format!("{there}/new");
        let target = |path, to| target_on_host(path, to).unwrap();
        let renamed = |name: &str| Some(name.as_bytes().to_vec());
        assert_eq!(target("/a/b", there), (there.into(), renamed("b")));
        assert_eq!(target("/a/b", &new), (there.into(), renamed("new")));
        assert_eq!(target("/", there), (there.into(), None));
        assert_eq!(target("/a/b/.", &new), ((&new).into(), None));
        assert!(Path::new(&new).is_dir());
        assert!(target_on_host("/a/b/.", &format!("{there}/x/y")).is_err());
    }
}
