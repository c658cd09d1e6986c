//! Copies changes of the project directory on the host to the sandbox.
//!
//! This step precedes each command, so that the command sees the present files of the project.

use crate::guest_tree;
use crate::host_directory::HostDirectory;
use crate::host_tree;
use crate::ignore_rules::IgnoreRules;
use crate::limits::MAX_COPY_BYTES;
use crate::session::Session;
use crate::tree::{Content, FileState, ListedFile, ListedKind, Stamp, SyncedFile};
use crate::tree_path::TreePath;
use anyhow::{Context, ensure};
use jiffy_agent_client::ArchiveOptions;
use jiffy_agent_client::chunk_channel::{ChunkWriter, QUEUED_CHUNKS};
use jiffy_archive::{ArchiveEntry, ArchiveEntryKind, ArchiveWriter};
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use tokio::sync::mpsc;

/// Size of the chunks of an upload in bytes.
const CHUNK_BYTES: usize = 256 << 10;

/// File that was sent to the sandbox.
struct SentFile {
    path: TreePath,
    state: FileState,
    stamp: Stamp,
}

impl Session {
    /// Copies changes of the host to the sandbox.
    pub(crate) async fn push(&mut self) -> anyhow::Result<()> {
        let mut rules = IgnoreRules::new(&self.directory);
        let listing = host_tree::list(&self.directory, &mut rules, &self.synced)?;
        let deleted = self
            .synced
            .keys()
            .filter(|path| !listing.contains_key(path));
        let mut paths: BTreeSet<TreePath> = deleted.cloned().collect();
        for (path, file) in listing {
            let Some(synced) = self.synced.get(&path) else {
                paths.insert(path);
                continue;
            };
            let known = file.known_state(Some((&synced.state, synced.host)));
            if known.as_ref() == Some(&synced.state) {
                continue;
            }
            match host_tree::state(&self.directory, &path, &self.synced)? {
                Some((state, file)) if state == synced.state => {
                    // Only the metadata on the host differs: the sandbox already has this content.
                    if let Some(synced) = self.synced.get_mut(&path) {
                        synced.host = Some(file.stamp);
                    }
                }
                _ => drop(paths.insert(path)),
            }
        }
        self.push_files(paths).await
    }

    /// Makes files of the sandbox equal to the files of the host.
    pub(crate) async fn push_files(&mut self, paths: BTreeSet<TreePath>) -> anyhow::Result<()> {
        if paths.is_empty() {
            return self.write_synced();
        }
        let guest = self.guest().await?;
        let root = self.project.path_bytes().to_vec();
        let mut removed = Vec::new();
        let mut sent = Vec::new();
        let mut bytes = 0_u64;
        for path in paths {
            let Some(file) = self.directory.stat(&path)? else {
                removed.push(path);
                continue;
            };
            // The agent does not replace a directory by a file, or a file by a directory. The
            // former file or directory is removed first.
            let synced = self.synced.get(&path);
            let is_directory = file.kind == ListedKind::Directory;
            if synced.is_none_or(|synced| synced.state.is_directory() != is_directory) {
                removed.push(path.clone());
            }
            bytes = bytes.saturating_add(file.stamp.size);
            sent.push((path, file));
        }
        ensure!(
            bytes <= MAX_COPY_BYTES,
            "the changed files have more than {} GiB: exclude directories in .gitignore",
            MAX_COPY_BYTES >> 30
        );
        let root_bytes = root.as_slice();
        // The reverse order visits files before their directories.
        let names = removed.iter().rev().map(|path| path.bytes());
        let context = "cannot remove files of the sandbox";
        guest
            .agent
            .remove_from_tree(root_bytes, names)
            .await
            .context(context)?;
        let sent = self.upload(&root, sent).await?;
        let entries = guest.agent.tree(&root).await;
        let listing = guest_tree::listing(entries.context("cannot list files of the sandbox")?)?;
        for path in removed {
            self.set_synced(&path, None);
        }
        for SentFile { path, state, stamp } in sent {
            let is_sent = |file: &&ListedFile| {
                (file.stamp.size, file.stamp.mtime) == (stamp.size, stamp.mtime)
            };
            // A process of the sandbox may have changed the file meanwhile.
            let guest = listing.get(&path).filter(is_sent).map(|file| file.stamp);
            let synced = SyncedFile {
                state,
                host: Some(stamp),
                guest,
            };
            self.set_synced(&path, Some(synced));
        }
        self.write_synced()
    }

    /// Sends files to the sandbox as an archive.
    async fn upload(
        &self,
        root: &[u8],
        files: Vec<(TreePath, ListedFile)>,
    ) -> anyhow::Result<Vec<SentFile>> {
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let agent = &self.guest.as_ref().context("no sandbox")?.agent;
        let options = ArchiveOptions {
            user: Some("root".to_owned()),
            owner: Some("root".to_owned()),
            ..ArchiveOptions::default()
        };
        let mut writer = agent.archive_write(root, &options);
        let (sender, mut chunks) = mpsc::channel(QUEUED_CHUNKS);
        let directory = HostDirectory::open(self.project.directory())?;
        let task = tokio::task::spawn_blocking(move || pack(&directory, files, sender));
        let context = "cannot copy files to the sandbox";
        while let Some(chunk) = chunks.recv().await {
            writer.write(chunk).await.context(context)?;
        }
        // If reading failed, the archive is incomplete, which the agent reports.
        let sent = task.await??;
        writer.finish().await.context(context)?;
        Ok(sent)
    }
}

/// Writes files of the host to an archive. Files that were removed meanwhile are omitted.
fn pack(
    directory: &HostDirectory,
    files: Vec<(TreePath, ListedFile)>,
    sender: mpsc::Sender<bytes::Bytes>,
) -> anyhow::Result<Vec<SentFile>> {
    let chunks = io::BufWriter::with_capacity(CHUNK_BYTES, ChunkWriter(sender));
    let mut archive = ArchiveWriter::new(chunks);
    let mut sent = Vec::new();
    for (path, file) in files {
        let context = || format!("cannot read {}", directory.shown(&path));
        let entry = |kind, file: &ListedFile| {
            let mut entry = ArchiveEntry::new(kind, path.bytes(), file.mode);
            entry.mtime = file.stamp.mtime;
            entry
        };
        match &file.kind {
            ListedKind::Directory => {
                archive.add(&entry(ArchiveEntryKind::Directory, &file), b"")?;
                sent.push((file.state(String::new), file.stamp, path));
            }
            ListedKind::Symlink(target) => {
                let mut entry = entry(ArchiveEntryKind::Symlink, &file);
                (entry.link, entry.mode) = (target.0.clone(), 0o777);
                archive.add(&entry, b"")?;
                sent.push((file.state(String::new), file.stamp, path));
            }
            ListedKind::File => {
                let Some((content, file)) = directory.read(&path).with_context(context)? else {
                    continue;
                };
                let size = file.stamp.size;
                archive.begin(&entry(ArchiveEntryKind::File, &file).with_size(size))?;
                let hash = copy(content, &mut archive, size).with_context(context)?;
                archive.end()?;
                let content = Content::File { size, hash };
                let state = FileState {
                    mode: file.mode,
                    content,
                };
                sent.push((state, file.stamp, path));
            }
        }
    }
    archive.finish()?;
    let sent = sent.into_iter();
    Ok(sent
        .map(|(state, stamp, path)| SentFile { path, state, stamp })
        .collect())
}

/// Copies `size` bytes and returns their hash. A file that shrinks meanwhile is padded with zeros.
fn copy(
    content: impl Read,
    archive: &mut ArchiveWriter<impl Write>,
    size: u64,
) -> io::Result<String> {
    let mut content = content.chain(io::repeat(0)).take(size);
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let n = content.read(&mut buffer)?;
        if n == 0 {
            return Ok(hasher.finalize().to_hex().to_string());
        }
        hasher.update(&buffer[..n]);
        archive.write_all(&buffer[..n])?;
    }
}
