//! Copies changes of the sandbox to the project directory on the host.
//!
//! This step follows each command. The guest is not trusted: it determines only the content of
//! files below the project directory.

use crate::conflict_copies;
use crate::guest_tree;
use crate::history::{FileChange, Rejection, SavedFile};
use crate::host_directory::{HostDirectory, NewFile, Replacement};
use crate::host_tree;
use crate::ignore_rules::{IgnoreRules, RULES_NAME};
use crate::limits::{MAX_COPY_BYTES, MAX_FILES};
use crate::protected;
use crate::saved_copies::check_size;
use crate::session::Session;
use crate::tree::{Content, FileState, ListedFile, ListedKind, Listing, SyncedFile, SyncedTree};
use crate::tree_path::TreePath;
use crate::unpack;
use anyhow::Context;
use jiffy_archive::ArchiveError;
use std::collections::BTreeSet;

/// Reason of a conflict.
const CONFLICT: &str = "it was changed in the sandbox and on the host";

/// Change of a file in the sandbox.
struct GuestChange {
    path: TreePath,
    /// State at the last synchronisation.
    old: Option<FileState>,
    /// State in the sandbox, with its metadata.
    new: Option<(FileState, ListedFile)>,
}

impl GuestChange {
    fn new_state(&self) -> Option<&FileState> {
        self.new.as_ref().map(|(state, _)| state)
    }
}

/// Change of a file on the host that is about to be made.
struct HostChange {
    change: GuestChange,
    /// File on the host, which is replaced or removed.
    host: Option<(FileState, ListedFile)>,
}

impl Session {
    /// Copies changes of the sandbox to the host, as changes of the latest command. A file that was
    /// also changed on the host is not overwritten. The sandbox receives the host's version, and
    /// the version of the sandbox is stored.
    pub(crate) async fn pull(&mut self) -> anyhow::Result<()> {
        let guest = self.guest().await?;
        let root = self.project.path_bytes().to_vec();
        let entries = guest.agent.tree(&root).await;
        let entries = entries.context("cannot list the files of the sandbox")?;
        let listing = guest_tree::listing(entries)?;
        let is_rules = |path: &TreePath| path.name() == RULES_NAME;
        // `.gitignore` files come first: their new rules apply to the files that the same command
        // created.
        self.pull_files(&listing, is_rules).await?;
        self.pull_files(&listing, |path| !is_rules(path)).await
    }

    /// Copies the selected changes of the sandbox to the project directory. A change is rejected if
    /// the file is protected, or if the host has changed the file as well.
    async fn pull_files(
        &mut self,
        listing: &Listing,
        is_selected: impl Fn(&TreePath) -> bool,
    ) -> anyhow::Result<()> {
        let candidates = self.candidates(listing, is_selected)?;
        if candidates.is_empty() {
            return Ok(());
        }
        let is_regular_file = |file: &&ListedFile| file.kind == ListedKind::File;
        let contents: Vec<&TreePath> = candidates
            .iter()
            .filter(|(_, file)| file.as_ref().filter(is_regular_file).is_some())
            .map(|(path, _)| path)
            .collect();
        let staging = self.download(&contents).await?;
        let mut planned = Vec::new();
        let mut rejected = Vec::new();
        for (path, file) in candidates {
            let Some(change) = self.change(path, file, &staging)? else {
                continue;
            };
            let host = host_tree::state(&self.directory, &change.path, &self.synced)?;
            let host_state = host.as_ref().map(|(state, _)| state);
            if host_state == change.new_state() {
                // Both sides are equal, for example after an interruption.
                self.set_equal(&change);
                continue;
            }
            let project = self.project.directory();
            if let Some(reason) = protected::reason(&change.path, change.new_state(), project) {
                rejected.push((change, reason, false));
            } else if host_state != change.old.as_ref() {
                rejected.push((change, CONFLICT, true));
            } else {
                planned.push(HostChange { change, host });
            }
        }
        self.save_copies(&mut planned, &mut rejected)?;
        for change in self.apply(planned, &staging)? {
            rejected.push((change, CONFLICT, true));
        }
        self.reject(rejected, &staging).await?;
        self.write_synced()
    }

    /// Returns the files whose metadata in the sandbox differs from the last synchronisation.
    /// `None` stands for a deleted file.
    fn candidates(
        &self,
        listing: &Listing,
        is_selected: impl Fn(&TreePath) -> bool,
    ) -> anyhow::Result<Vec<(TreePath, Option<ListedFile>)>> {
        let mut rules = IgnoreRules::new(&self.directory);
        let mut candidates = Vec::new();
        for (path, file) in listing.iter().filter(|(path, _)| is_selected(path)) {
            let synced = self.synced.get(path);
            let is_directory = file.kind == ListedKind::Directory;
            if synced.is_none() && rules.is_ignored(path, is_directory) {
                continue;
            }
            let known = file.known_state(synced.map(|s| (&s.state, s.guest)));
            if known.is_none() || known.as_ref() != synced.map(|s| &s.state) {
                candidates.push((path.clone(), Some(file.clone())));
            }
        }
        let deleted = self
            .synced
            .keys()
            .filter(|path| !listing.contains_key(path));
        candidates.extend(
            deleted
                .filter(|p| is_selected(p))
                .map(|p| (p.clone(), None)),
        );
        anyhow::ensure!(
            candidates.len() <= MAX_FILES,
            "the sandbox has more than {MAX_FILES} changed files: exclude directories in .gitignore"
        );
        Ok(candidates)
    }

    /// Copies the content of files of the sandbox to an empty directory.
    async fn download(&self, paths: &[&TreePath]) -> anyhow::Result<HostDirectory> {
        let staging = self.files.staging()?;
        if !paths.is_empty() {
            let agent = &self.guest.as_ref().context("no sandbox")?.agent;
            let root = self.project.path_bytes();
            let names = paths.iter().map(|path| path.bytes());
            let context = "cannot read changed files of the sandbox";
            let reader = agent.tree_files(root, names).await.context(context)?;
            unpack::receive(reader, &staging, MAX_COPY_BYTES)
                .await
                .context(context)?;
        }
        HostDirectory::open(&staging)
    }

    /// Returns the change of a file. `None` if its state did not change, or if the file was removed
    /// meanwhile.
    fn change(
        &mut self,
        path: TreePath,
        file: Option<ListedFile>,
        staging: &HostDirectory,
    ) -> anyhow::Result<Option<GuestChange>> {
        let old = self.synced.get(&path).map(|synced| synced.state.clone());
        let new = match file {
            None => None,
            Some(file) if file.kind == ListedKind::File => {
                let Some((staged, _)) = host_tree::state(staging, &path, &SyncedTree::new())?
                else {
                    return Ok(None);
                };
                let state = FileState {
                    mode: file.mode,
                    content: staged.content,
                };
                Some((state, file))
            }
            Some(file) => Some((file.state(String::new), file)),
        };
        let change = GuestChange { path, old, new };
        if change.new_state() != change.old.as_ref() {
            return Ok(Some(change));
        }
        // Only the metadata differs.
        if let (Some(synced), Some((_, file))) = (self.synced.get(&change.path), &change.new) {
            let synced = SyncedFile {
                guest: Some(file.stamp),
                ..synced.clone()
            };
            self.set_synced(&change.path, Some(synced));
        }
        Ok(None)
    }

    /// Records that a file of the host is equal to the file of the sandbox.
    fn set_equal(&mut self, change: &GuestChange) {
        let synced = change.new.as_ref().map(|(state, file)| SyncedFile {
            state: state.clone(),
            // The next comparison reads the file of the host: another program may have changed it.
            host: None,
            guest: Some(file.stamp),
        });
        self.set_synced(&change.path, synced);
    }

    /// Saves copies of the files of the host that are replaced or removed, and records the changes
    /// in the history. Files that change meanwhile are moved to `rejected`, with the reason and
    /// `true` for a conflict.
    fn save_copies(
        &mut self,
        planned: &mut Vec<HostChange>,
        rejected: &mut Vec<(GuestChange, &'static str, bool)>,
    ) -> anyhow::Result<()> {
        let size = |state: &FileState| match &state.content {
            Content::File { size, hash } if !self.saved.contains(hash) => *size,
            _ => 0,
        };
        let replaced = planned
            .iter()
            .filter_map(|p| p.host.as_ref())
            .map(|h| size(&h.0));
        // The limit also applies to the conflict copies of rejected files.
        let refused = rejected.iter().filter_map(|r| r.0.new_state()).map(size);
        check_size(
            replaced.chain(refused).sum(),
            self.record.limits.saved_bytes,
        )?;
        let Some((_, entry)) = self.history.iter_mut().next_back() else {
            anyhow::bail!("the session has no command");
        };
        let mut all = std::mem::take(planned).into_iter();
        for planned_change in &mut all {
            let HostChange { change, host } = &planned_change;
            if let Some((state, _)) = host
                && let Content::File { hash, .. } = &state.content
                && !self.saved.save(&self.directory, &change.path, hash)?
            {
                rejected.push((planned_change.change, CONFLICT, true));
                continue;
            }
            let before = host.as_ref().map(|(state, file)| SavedFile {
                state: state.clone(),
                mtime: file.stamp.mtime,
            });
            let after = change.new_state().cloned();
            let recorded = entry.changes.entry(change.path.clone());
            let recorded = recorded.or_insert(FileChange {
                before,
                after: None,
            });
            recorded.after = after;
            planned.push(planned_change);
        }
        // Write the entry before the first file changes: undo needs it after an interruption.
        self.files.write_entry(entry)
    }

    /// Changes files of the host. Returns the changes that were not possible because of a change by
    /// another program.
    fn apply(
        &mut self,
        planned: Vec<HostChange>,
        staging: &HostDirectory,
    ) -> anyhow::Result<Vec<GuestChange>> {
        let mut failed = BTreeSet::new();
        // The reverse order visits files before their directories.
        for HostChange { change, host } in planned.iter().rev() {
            let Some((_, file)) = host else { continue };
            let becomes_directory = change.new_state().map(FileState::is_directory);
            let was_directory = file.kind == ListedKind::Directory;
            let is_removed = becomes_directory.is_none_or(|becomes| becomes != was_directory);
            if is_removed
                && self.directory.remove(&change.path, file)? == Replacement::Changed
                // A directory with files that are not synchronised remains.
                && !(was_directory && becomes_directory.is_none())
            {
                failed.insert(change.path.clone());
            }
        }
        for HostChange { change, host } in &planned {
            let Some((state, file)) = &change.new else {
                continue;
            };
            if failed.contains(&change.path) {
                continue;
            }
            let is_same_kind =
                |old: &&ListedFile| (old.kind == ListedKind::Directory) == state.is_directory();
            let expected = host.as_ref().map(|(_, old)| old).filter(is_same_kind);
            let result = self.write(&change.path, state, file, expected, staging);
            if is_changed(result)? {
                failed.insert(change.path.clone());
            }
        }
        let mut rejected = Vec::new();
        for HostChange { change, .. } in planned.into_iter().rev() {
            if failed.contains(&change.path) {
                if let Some((_, entry)) = self.history.iter_mut().next_back() {
                    entry.changes.remove(&change.path);
                }
                rejected.push(change);
                continue;
            }
            if let Some((state, _)) = &change.new
                && state.is_directory()
            {
                self.directory.set_mode(&change.path, state.mode)?;
            }
            self.set_equal(&change);
        }
        Ok(rejected)
    }

    /// Writes a file of the host.
    fn write(
        &self,
        path: &TreePath,
        state: &FileState,
        file: &ListedFile,
        expected: Option<&ListedFile>,
        staging: &HostDirectory,
    ) -> anyhow::Result<Replacement> {
        match &state.content {
            Content::Directory => self.directory.make_directory(path),
            Content::Symlink(target) => {
                let new = NewFile::Symlink(&target.0);
                self.directory.replace(path, expected, new)
            }
            Content::File { .. } => {
                let context = || format!("cannot read {}", staging.shown(path));
                let staged = staging.read(path).with_context(context)?;
                let (mut content, _) = staged.with_context(context)?;
                let new = NewFile::File {
                    content: &mut content,
                    mode: state.mode,
                    mtime: file.stamp.mtime,
                };
                self.directory.replace(path, expected, new)
            }
        }
    }

    /// Stores the sandbox's versions of rejected files, records them, and gives the sandbox the
    /// host's versions. Each entry of `rejected` has the change, the reason, and whether the file
    /// was changed on both sides.
    async fn reject(
        &mut self,
        rejected: Vec<(GuestChange, &'static str, bool)>,
        staging: &HostDirectory,
    ) -> anyhow::Result<()> {
        if rejected.is_empty() {
            return Ok(());
        }
        let mut paths = BTreeSet::new();
        let Some((number, entry)) = self.history.iter_mut().next_back() else {
            return Ok(());
        };
        let directory = self.files.conflict_path(*number);
        for (change, reason, is_conflict) in rejected {
            let copy = match change.new_state() {
                Some(state) => conflict_copies::save(&directory, &change.path, state, staging)?,
                None => None,
            };
            paths.insert(change.path.clone());
            if change.new_state().is_some_and(FileState::is_directory) {
                continue;
            }
            entry.rejected.retain(|other| other.path != change.path);
            entry.rejected.push(Rejection {
                path: change.path,
                reason: reason.to_owned(),
                copy,
                is_conflict,
            });
        }
        self.files.write_entry(entry)?;
        self.push_files(paths).await
    }
}

/// Returns whether a change was not possible because of a change by another program.
fn is_changed(result: anyhow::Result<Replacement>) -> anyhow::Result<bool> {
    match result {
        Ok(replacement) => Ok(replacement == Replacement::Changed),
        // For example, a parent is a file or a symbolic link on the host.
        Err(e)
            if e.downcast_ref::<ArchiveError>()
                .is_some_and(ArchiveError::is_malformed) =>
        {
            Ok(true)
        }
        Err(e) => Err(e),
    }
}
