//! Volumes of `jiffy run`: directories and files that are copied to the guest and back.
//!
//! A volume is not a shared file system. A tree is copied to the guest before the command, and
//! compared with the guest's copy afterwards. The guest is untrusted: its copy is limited in size
//! and unpacked as an untrusted archive into a temporary directory (`sandbox/tree.rs`). Differences
//! are applied (`volume/apply.rs`) only after the complete copy was received. An incomplete copy
//! changes no file of this host.

mod apply;
mod survey;

use crate::cli::Volume;
use crate::sandbox::tree::{ReceiveLimits, from_tree, receive, report_skipped, send};
use anyhow::{Context, ensure};
use apply::Apply;
use jiffy_agent_client::{AgentClient, ArchiveOptions};
use jiffy_image::Home;
use std::fs::File;
use std::path::{Path, PathBuf};
use survey::TreeEntries;

/// Maximum number of bytes of files in a volume, in either direction.
const MAX_BYTES: u64 = 8 << 30;
/// Maximum number of files and directories in a volume, in either direction.
const MAX_ENTRIES: usize = 500_000;
/// File name of a volume that is a file, in the temporary directory.
const FILE_NAME: &str = "file";

/// Volumes of a command.
pub struct Volumes(Vec<HostTree>);

/// Directory or file of this host with its path in the guest.
struct HostTree {
    /// Path without symbolic links.
    path: PathBuf,
    is_dir: bool,
    guest: String,
    /// Entries that are copied to the guest. `None` if changes are not copied back.
    sent: Option<TreeEntries>,
}

impl Volumes {
    /// Reads the entries of `volumes`. Fails if a volume does not exist or exceeds the limits.
    pub fn open(volumes: &[Volume]) -> anyhow::Result<Self> {
        let open = |volume: &Volume| {
            let name = volume.host.display();
            let path = volume
                .host
                .canonicalize()
                .with_context(|| format!("cannot open volume {name}"))?;
            let is_dir = path.is_dir();
            ensure!(
                is_dir || path.is_file(),
                "cannot open volume {name}: not a directory or regular file"
            );
            ensure!(
                path.parent().is_some(),
                "cannot open volume {name}: / of the host is not allowed; choose a subdirectory"
            );
            // Read the tree in any case: the limits also apply to volumes whose changes are not
            // copied back.
            let entries = TreeEntries::of(&path, MAX_BYTES, MAX_ENTRIES)
                .with_context(|| format!("cannot open volume {name}"))?;
            Ok(HostTree {
                path,
                is_dir,
                guest: volume.guest.clone(),
                sent: (!volume.read_only).then_some(entries),
            })
        };
        Ok(Self(
            volumes.iter().map(open).collect::<anyhow::Result<_>>()?,
        ))
    }

    /// Returns whether there are no volumes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether changes of at least one volume are copied back.
    pub fn are_copied_back(&self) -> bool {
        self.0.iter().any(|tree| tree.sent.is_some())
    }

    /// Copies all volumes to the guest, with `user` as owner of the files.
    pub async fn copy_in(&self, agent: &AgentClient, user: Option<&str>) -> anyhow::Result<()> {
        let options = ArchiveOptions {
            user: user.map(str::to_owned),
            // `@` denotes the user of the request.
            owner: Some("@".to_owned()),
            ..ArchiveOptions::default()
        };
        for tree in &self.0 {
            // A file is archived under its name in the guest, and unpacked in its parent directory.
            let (directory, name) = match (tree.is_dir, tree.guest.rsplit_once('/')) {
                (false, Some((parent, name))) => (format!("{parent}/"), name),
                _ => (tree.guest.clone(), "."),
            };
            let source = from_tree(tree.path.clone(), name.into());
            send(agent, &directory, &options, source)
                .await
                .with_context(|| format!("cannot copy {} to the guest", tree.path.display()))?;
        }
        Ok(())
    }

    /// Copies the changes of the guest to this host, volume by volume.
    pub async fn copy_back(&self, agent: &AgentClient, user: Option<&str>) -> anyhow::Result<()> {
        for tree in &self.0 {
            if let Some(sent) = &tree.sent {
                let result = tree.copy_back(sent, agent, user).await;
                result.with_context(|| {
                    let (guest, host) = (&tree.guest, tree.path.display());
                    format!("cannot copy {guest} back to {host}")
                })?;
            }
        }
        Ok(())
    }
}

impl HostTree {
    /// Receives the guest's copy, and applies its differences to this host.
    async fn copy_back(
        &self,
        sent: &TreeEntries,
        agent: &AgentClient,
        user: Option<&str>,
    ) -> anyhow::Result<()> {
        // The guest's copy is unpacked into this directory before the tree of this host changes.
        // The directory is removed when this function returns, also after a failure.
        let staging = tempfile::tempdir_in(Home::locate()?.run())?;
        let (from, rename) = if self.is_dir {
            (format!("{}/.", self.guest), None)
        } else {
            (self.guest.clone(), Some(FILE_NAME.into()))
        };
        let reader = agent.archive_read(&[&from], user).await?;
        let limits = ReceiveLimits {
            bytes: Some(MAX_BYTES),
            entries: Some(u64::try_from(MAX_ENTRIES)?),
        };
        let root = File::open(staging.path())?;
        report_skipped(&receive(reader, root, rename, limits).await?);
        let (path, is_dir, sent) = (self.path.clone(), self.is_dir, sent.clone());
        tokio::task::spawn_blocking(move || apply_changes(staging.path(), &path, is_dir, &sent))
            .await?
    }
}

/// Applies the differences between `staging` and the tree at `path` to the tree at `path`.
fn apply_changes(
    staging: &Path,
    path: &Path,
    is_dir: bool,
    sent: &TreeEntries,
) -> anyhow::Result<()> {
    // The limits are checked again, because sparse files in `staging` use no space before they are
    // copied.
    TreeEntries::of(staging, MAX_BYTES, MAX_ENTRIES)?;
    let staged = File::open(staging)?;
    let apply = Apply::new(sent);
    if is_dir {
        apply.directory(&staged, &File::open(path)?)
    } else {
        let parent = path.parent().context("the path has no parent directory")?;
        let name = path.file_name().context("the path has no file name")?;
        apply.file(&staged, FILE_NAME.as_ref(), &File::open(parent)?, name)
    }
}
