//! Directories and files that a run takes along, and brings back.
//!
//! There is no shared file system. A tree is copied into the guest before the command, and the
//! guest's copy of it is compared with it afterwards. The guest is hostile: its copy is bounded,
//! unpacked as a stranger's archive into a directory of this process (`sandbox/tree.rs`), and only
//! when it is there as a whole are differences carried over (`volume/apply.rs`). A run that does
//! not get that far changes nothing.

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
use survey::Survey;

/// Bytes of files in one volume, either way.
const MAX_BYTES: u64 = 8 << 30;
/// Files and directories in one volume, either way.
const MAX_ENTRIES: usize = 500_000;
/// Name of a volume that is a file, while it is compared.
const FILE_NAME: &str = "file";

/// The volumes of a run.
pub struct Volumes(Vec<HostTree>);

/// A directory or file of this host and its place in the guest.
struct HostTree {
    /// Without symbolic links.
    path: PathBuf,
    is_dir: bool,
    guest: String,
    /// Entries that the guest is given; none: its changes do not count.
    sent: Option<Survey>,
}

impl Volumes {
    /// Looks at `volumes`, all of which must be there and within bounds.
    pub fn open(volumes: &[Volume]) -> anyhow::Result<Self> {
        let open = |volume: &Volume| {
            let named = volume.host.display();
            let path = volume
                .host
                .canonicalize()
                .with_context(|| format!("-v {named}: it is not there"))?;
            let is_dir = path.is_dir();
            ensure!(
                is_dir || path.is_file(),
                "-v {named}: it is neither a directory nor a file"
            );
            ensure!(
                path.parent().is_some(),
                "-v {named}: the root of this host is too much"
            );
            let sent = Survey::of(&path, MAX_BYTES, MAX_ENTRIES);
            let sent = sent.with_context(|| format!("-v {named}"))?;
            Ok(HostTree {
                path,
                is_dir,
                guest: volume.guest.clone(),
                sent: (!volume.read_only).then_some(sent),
            })
        };
        Ok(Self(
            volumes.iter().map(open).collect::<anyhow::Result<_>>()?,
        ))
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if changes of any of them are copied back.
    pub fn are_copied_back(&self) -> bool {
        self.0.iter().any(|tree| tree.sent.is_some())
    }

    /// Copies all into the guest, where they belong to `user`.
    pub async fn copy_in(&self, agent: &AgentClient, user: Option<&str>) -> anyhow::Result<()> {
        let options = ArchiveOptions {
            user: user.map(str::to_owned),
            owner: Some("@".to_owned()),
            ..ArchiveOptions::default()
        };
        for tree in &self.0 {
            let (directory, name) = match (tree.is_dir, tree.guest.rsplit_once('/')) {
                (false, Some((above, name))) => (format!("{above}/"), name),
                _ => (tree.guest.clone(), "."),
            };
            let source = from_tree(tree.path.clone(), name.into());
            let sent = send(agent, &directory, &options, source).await;
            sent.with_context(|| format!("cannot copy {} into the guest", tree.path.display()))?;
        }
        Ok(())
    }

    /// Carries over what the guest changed, volume by volume.
    pub async fn copy_back(&self, agent: &AgentClient, user: Option<&str>) -> anyhow::Result<()> {
        for tree in &self.0 {
            if let Some(sent) = &tree.sent {
                let back = tree.copy_back(sent, agent, user).await;
                back.with_context(|| {
                    let (guest, here) = (&tree.guest, tree.path.display());
                    format!("cannot copy {guest} back to {here}")
                })?;
            }
        }
        Ok(())
    }
}

impl HostTree {
    async fn copy_back(
        &self,
        sent: &Survey,
        agent: &AgentClient,
        user: Option<&str>,
    ) -> anyhow::Result<()> {
        let staging = tempfile::tempdir_in(Home::locate()?.run())?;
        let (from, rename) = match self.is_dir {
            true => (format!("{}/.", self.guest), None),
            false => (self.guest.clone(), Some(FILE_NAME.into())),
        };
        let reader = agent.archive_read(&[&from], user).await?;
        let limits = ReceiveLimits {
            bytes: Some(MAX_BYTES),
            entries: Some(u64::try_from(MAX_ENTRIES)?),
        };
        let root = File::open(staging.path())?;
        report_skipped(&receive(reader, root, rename, limits).await?);
        let (path, is_dir, sent) = (self.path.clone(), self.is_dir, sent.clone());
        tokio::task::spawn_blocking(move || carry_over(staging.path(), &path, is_dir, &sent))
            .await?
    }
}

/// Carries differences between `staging` and the tree at `path` over to the latter.
fn carry_over(staging: &Path, path: &Path, is_dir: bool, sent: &Survey) -> anyhow::Result<()> {
    // Sparse files cost nothing until they are copied.
    Survey::of(staging, MAX_BYTES, MAX_ENTRIES)?;
    let staged = File::open(staging)?;
    let apply = Apply::new(sent);
    match is_dir {
        true => apply.directory(&staged, &File::open(path)?),
        false => {
            let above = path.parent().context("it has no directory")?;
            let name = path.file_name().context("it has no name")?;
            apply.file(&staged, FILE_NAME.as_ref(), &File::open(above)?, name)
        }
    }
}
