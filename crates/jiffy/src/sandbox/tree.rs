//! `jiffy cp -r`: directories into a sandbox or out of it, as `docker cp` has it.
//!
//! Archives of a sandbox are not trusted: each is unpacked beneath one name of ours, through no
//! symbolic link, without devices, named pipes and setuid.

use crate::cli::CpArgs;
use anyhow::Context;
use bytes::{Buf, Bytes};
use jiffy_agent_client::{AgentClient, ArchiveOptions, EntryKind, FileReader};
use jiffy_archive::{PackOptions, Packer, UnpackOptions, UnpackOwner, UnpackStats, unpack};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

const CHUNK_BYTES: usize = 256 * 1024;
/// Pieces under way between files and connection.
const QUEUED_CHUNKS: usize = 4;

/// Sends the tree at `from`, or the archive on standard input if that is `-`.
pub async fn upload(
    args: &CpArgs,
    agent: &AgentClient,
    from: &str,
    to: &str,
) -> anyhow::Result<()> {
    let (directory, source) = match from {
        "-" => (to.to_owned(), from_stdin()),
        from => {
            let found = std::fs::metadata(from).with_context(|| format!("cannot read {from}"))?;
            let contents = from.ends_with("/.") || from == "." || !has_name(from);
            let (directory, name) = target_in_sandbox(args, agent, to, from, contents).await?;
            anyhow::ensure!(found.is_dir() || name != b".", "{from} is not a directory");
            (directory, from_tree(PathBuf::from(from), name))
        }
    };
    let options = ArchiveOptions {
        user: args.user.clone(),
        // An archive on standard input was made with its owners for a reason.
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
    (mut pieces, work): Source,
) -> anyhow::Result<()> {
    let mut writer = agent.archive_write(directory, options);
    let failed = || format!("cannot unpack in {directory} of the sandbox");
    while let Some(piece) = pieces.recv().await {
        writer.write(piece).await.with_context(failed)?;
    }
    // Of a source that broke off nothing is made whole: the archive has no end then.
    work.await??;
    writer.finish().await.with_context(failed)
}

/// The directory of the sandbox that the archive is unpacked in, and the tree's name there; `.` for
/// what is in it alone.
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
        Ok(found) if found.kind == EntryKind::Directory => Ok(match contents {
            true => (to.to_owned(), b".".to_vec()),
            false => (to.to_owned(), name.as_bytes().to_vec()),
        }),
        Ok(_) => anyhow::bail!("{to} in the sandbox is there and is no directory"),
        Err(e) if e.is_not_found() => {
            let trimmed = to.trim_end_matches('/');
            Ok(match trimmed.rsplit_once('/') {
                _ if contents || trimmed.ends_with('.') => (to.to_owned(), b".".to_vec()),
                Some((above, name)) => (format!("{above}/"), name.into()),
                None => (".".to_owned(), trimmed.into()),
            })
        }
        Err(e) => Err(e).with_context(|| format!("cannot look at {to} in the sandbox")),
    }
}

/// Receives the tree at `path`, to `to`, or as an archive to standard output if that is `-`.
pub async fn download(
    args: &CpArgs,
    agent: &AgentClient,
    path: &str,
    to: &str,
) -> anyhow::Result<()> {
    let failed = || format!("cannot read {path} in the sandbox");
    let reader = agent.archive_read(&[path], args.user.as_deref()).await;
    let mut reader = reader.with_context(failed)?;
    if to == "-" {
        let mut out = tokio::io::stdout();
        while let Some(piece) = reader.next().await.with_context(failed)? {
            out.write_all(&piece).await?;
        }
        return Ok(out.flush().await?);
    }
    let (directory, rename) = target_on_host(path, to)?;
    let root =
        File::open(&directory).with_context(|| format!("cannot open {}", directory.display()))?;
    let unpacked = receive(reader, root, rename, ReceiveLimits::default()).await;
    report_skipped(&unpacked.with_context(failed)?);
    Ok(())
}

/// Limits of what a sandbox sends. `None`: any number.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReceiveLimits {
    /// Bytes of files. The archive around them may have as many.
    pub bytes: Option<u64>,
    /// Files and directories.
    pub entries: Option<u64>,
}

/// Reports entries of a sandbox that are not created on this host.
pub fn report_skipped(done: &UnpackStats) {
    if let Some(first) = &done.first_skipped {
        errln!(
            "jiffy: skipped {} devices and named pipes of the sandbox, the first is {first}",
            done.skipped
        );
    }
}

/// Unpacks what a sandbox sends below `root`, as an untrusted archive. Limits are checked before
/// anything beyond them is written.
pub async fn receive(
    reader: FileReader,
    root: File,
    rename: Option<Vec<u8>>,
    limits: ReceiveLimits,
) -> anyhow::Result<UnpackStats> {
    let rules = UnpackOptions {
        owner: UnpackOwner::Ours,
        mode: None,
        confined: true,
        rename,
        max_bytes: limits.bytes,
        max_entries: limits.entries,
    };
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let work =
        tokio::task::spawn_blocking(move || unpack(Received::new(receiver), root.as_fd(), &rules));
    let max_archive = limits.bytes.map_or(u64::MAX, |max| max.saturating_mul(2));
    let sent = forward(reader, sender, max_archive).await;
    let unpacked = work.await?;
    // A broken connection is the cause of an archive that ends too early.
    sent?;
    unpacked.context("cannot unpack it here")
}

/// The directory here that is unpacked in, and the one name that everything is put beneath,
/// whatever the sandbox calls it; none if what is in a directory is asked for.
fn target_on_host(path: &str, to: &str) -> anyhow::Result<(PathBuf, Option<Vec<u8>>)> {
    let contents = path.ends_with("/.") || !has_name(path);
    let target = Path::new(to);
    let name = |path: &Path| path.file_name().map(|name| name.as_bytes().to_vec());
    if target.is_dir() {
        let rename = (!contents).then(|| name(Path::new(path))).flatten();
        return Ok((target.to_path_buf(), rename));
    }
    if contents {
        std::fs::create_dir(target).with_context(|| format!("cannot make {to}"))?;
        return Ok((target.to_path_buf(), None));
    }
    let above = match target.parent() {
        Some(above) if above != Path::new("") => above,
        _ => Path::new("."),
    };
    let rename = name(target).with_context(|| format!("{to} is not there"))?;
    Ok((above.to_path_buf(), Some(rename)))
}

/// True if a path ends with a name: `/`, `.` and `..` do not.
fn has_name(path: &str) -> bool {
    Path::new(path).file_name().is_some()
}

/// Pieces of an archive, and the work that makes them.
pub type Source = (mpsc::Receiver<Bytes>, JoinHandle<anyhow::Result<()>>);

fn from_stdin() -> Source {
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let work = tokio::spawn(async move {
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
    (receiver, work)
}

/// The tree at `path`, called `name` in the archive.
pub fn from_tree(path: PathBuf, name: Vec<u8>) -> Source {
    from_tree_with(path, name, PackOptions::TREE)
}

/// The part of the tree at `path` that `contents` says, under `name`.
pub fn from_tree_with(path: PathBuf, name: Vec<u8>, contents: PackOptions) -> Source {
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let work = tokio::task::spawn_blocking(move || {
        let pieces = io::BufWriter::with_capacity(CHUNK_BYTES, Sent(sender));
        let mut packer = Packer::new(pieces, contents);
        packer.add(&path, &name)?;
        packer.finish()?;
        Ok(())
    });
    (receiver, work)
}

/// Writes into a channel.
struct Sent(mpsc::Sender<Bytes>);

impl Write for Sent {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Bytes::copy_from_slice(bytes));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn forward(
    mut reader: FileReader,
    sender: mpsc::Sender<Bytes>,
    max_bytes: u64,
) -> anyhow::Result<()> {
    let mut left = max_bytes;
    while let Some(piece) = reader.next().await? {
        let size = u64::try_from(piece.len())?;
        left = left
            .checked_sub(size)
            .with_context(|| format!("it is more than {} MiB", max_bytes >> 20))?;
        // The unpacking side may have had enough of it.
        if sender.send(piece).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Reads out of a channel.
struct Received {
    pieces: mpsc::Receiver<Bytes>,
    piece: Bytes,
}

impl Received {
    fn new(pieces: mpsc::Receiver<Bytes>) -> Self {
        let piece = Bytes::new();
        Self { pieces, piece }
    }
}

impl Read for Received {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = piece,
                None => return Ok(0),
            }
        }
        let n = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_copied_to_the_same_path_as_by_docker() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().to_str().unwrap();
        let new = format!("{there}/new");
        let place = |path, to| target_on_host(path, to).unwrap();
        let renamed = |name: &str| Some(name.as_bytes().to_vec());
        assert_eq!(place("/a/b", there), (there.into(), renamed("b")));
        assert_eq!(place("/a/b", &new), (there.into(), renamed("new")));
        assert_eq!(place("/", there), (there.into(), None));
        assert_eq!(place("/a/b/.", &new), ((&new).into(), None));
        assert!(Path::new(&new).is_dir());
        assert!(target_on_host("/a/b/.", &format!("{there}/x/y")).is_err());
    }
}
