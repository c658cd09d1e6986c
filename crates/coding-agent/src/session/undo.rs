//! Undo: rolls back the sandbox and restores the project directory.
//!
//! Each command has a snapshot of the sandbox before it, and copies of the files that it changed on
//! the host.

use crate::conflict_copies;
use crate::history::SavedFile;
use crate::host_directory::{NewFile, Replacement};
use crate::host_tree;
use crate::limits::MAX_SHOWN_PATHS;
use crate::session::Session;
use crate::session_files;
use crate::tree::{Content, FileState, ListedFile};
use crate::tree_path::TreePath;
use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Name of the file with an undo that has started.
const UNDO_FILE: &str = "undo.json";

/// Options of undo.
#[derive(Debug, Clone, Copy)]
pub struct UndoOptions {
    /// Number of commands.
    pub commands: usize,
    /// True to restore files that were changed on the host after the command. Their present
    /// versions are stored.
    pub force: bool,
    /// True to restore only the project directory. The sandbox is removed.
    pub files_only: bool,
}

/// Result of undo.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UndoReport {
    /// Commands that were undone, the latest first.
    pub commands: Vec<String>,
    /// Restored files.
    pub restored: Vec<TreePath>,
    /// Directory with the present versions of files that were overwritten with `force`.
    pub overwritten: Option<PathBuf>,
}

/// Record of an undo that has started. It is completed after an interruption.
#[derive(Debug, Serialize, Deserialize)]
struct StartedUndo {
    /// First command that is undone.
    first: u64,
    /// Files before the command. `None` if the file did not exist.
    targets: BTreeMap<TreePath, Option<SavedFile>>,
    /// True to remove the sandbox instead of rolling it back.
    files_only: bool,
}

/// Changes of a file by the commands that are undone.
#[derive(Default)]
struct FileHistory {
    /// State before the first command.
    target: Option<SavedFile>,
    /// States that the commands found or left.
    states: Vec<Option<FileState>>,
    /// True if the file was changed on the host between two commands.
    edited: bool,
}

impl Session {
    /// Rolls back sandbox and project directory to before the latest commands.
    pub async fn undo(&mut self, options: UndoOptions) -> anyhow::Result<UndoReport> {
        ensure!(
            options.commands > 0 && !self.history.is_empty(),
            "the session of {} has no command to undo",
            self.project.directory().display()
        );
        ensure!(
            options.commands <= self.history.len(),
            "the history has only {} commands: list them with `jiffy history`",
            self.history.len()
        );
        let mut entries = self.history.iter().rev().take(options.commands);
        let commands = entries.clone().map(|(_, entry)| entry.command.clone());
        let mut report = UndoReport {
            commands: commands.collect(),
            ..UndoReport::default()
        };
        let Some((&first, entry)) = entries.next_back() else {
            bail!("the session has no command to undo");
        };
        ensure!(
            options.files_only || entry.snapshot.is_some(),
            "the sandbox has no snapshot before the command: restore only the project directory, \
             with a new sandbox, by `jiffy undo --files-only`"
        );
        let files = self.file_histories(first);
        let conflicts = self.conflicts(&files)?;
        if !conflicts.is_empty() {
            ensure!(options.force, "{}", conflict_message(&conflicts));
            report.overwritten = self.store_present_versions(first, &conflicts)?;
        }
        let targets = files.into_iter().map(|(path, file)| (path, file.target));
        let started = StartedUndo {
            first,
            targets: targets.collect(),
            files_only: options.files_only,
        };
        for saved in started.targets.values().flatten() {
            if let Content::File { hash, .. } = &saved.state.content {
                // A missing copy is reported before the first change.
                self.saved.open(hash)?;
            }
        }
        session_files::write(&self.files.path(UNDO_FILE), &started)?;
        report.restored = self.complete(&started).await?;
        Ok(report)
    }

    /// Completes an undo that was interrupted.
    pub(crate) async fn resume_undo(&mut self) -> anyhow::Result<()> {
        let started = session_files::read::<StartedUndo>(&self.files.path(UNDO_FILE))?;
        if let Some(started) = started {
            self.complete(&started).await?;
        }
        Ok(())
    }

    /// Returns the changes by the commands from `first` on, by file.
    fn file_histories(&self, first: u64) -> BTreeMap<TreePath, FileHistory> {
        let mut files = BTreeMap::<TreePath, FileHistory>::new();
        for (_, entry) in self.history.range(first..) {
            for (path, change) in &entry.changes {
                let before = change.before.as_ref().map(|saved| saved.state.clone());
                let file = files.entry(path.clone()).or_insert_with(|| FileHistory {
                    target: change.before.clone(),
                    ..FileHistory::default()
                });
                file.edited |= file.states.last().is_some_and(|last| *last != before);
                file.states.extend([before, change.after.clone()]);
            }
        }
        files
    }

    /// Returns the files whose restoration would destroy a change on the host.
    fn conflicts(&self, files: &BTreeMap<TreePath, FileHistory>) -> anyhow::Result<Vec<TreePath>> {
        let mut conflicts = Vec::new();
        for (path, file) in files {
            let present = host_tree::state(&self.directory, path, &self.synced)?;
            let present = present.map(|(state, _)| state);
            let target = file.target.as_ref().map(|saved| &saved.state);
            let is_known = file.states.contains(&present) && !file.edited;
            // A directory has no content that could be lost.
            let is_directory = present.as_ref().is_some_and(FileState::is_directory);
            if present.as_ref() != target && !is_known && !is_directory {
                conflicts.push(path.clone());
            }
        }
        Ok(conflicts)
    }

    /// Stores the present versions of files of the host.
    fn store_present_versions(
        &self,
        number: u64,
        paths: &[TreePath],
    ) -> anyhow::Result<Option<PathBuf>> {
        let directory = self.files.path("overwritten").join(number.to_string());
        for path in paths {
            if let Some((state, _)) = host_tree::state(&self.directory, path, &self.synced)? {
                conflict_copies::save(&directory, path, &state, &self.directory)?;
            }
        }
        Ok(directory.exists().then_some(directory))
    }

    /// Rolls back the sandbox, restores the files and removes the commands from the history. All
    /// steps can be repeated.
    async fn complete(&mut self, undo: &StartedUndo) -> anyhow::Result<Vec<TreePath>> {
        if undo.files_only {
            self.remove_sandbox().await?;
        } else {
            self.roll_back(undo.first).await?;
        }
        let restored = self.restore(&undo.targets)?;
        self.revert_synced(undo.first);
        if undo.files_only {
            self.synced.clear();
        }
        self.files.write_synced(&self.synced)?;
        for (number, entry) in self.history.split_off(&undo.first).into_iter().rev() {
            self.remove_snapshot(&entry).await;
            self.files.remove_entry(number)?;
        }
        std::fs::remove_file(self.files.path(UNDO_FILE)).context("cannot complete the undo")?;
        self.retain_saved()?;
        Ok(restored)
    }

    /// Removes the sandbox of the project. The next command creates another one.
    async fn remove_sandbox(&mut self) -> anyhow::Result<()> {
        if let Some(id) = self.record.sandbox.take() {
            let forget_record = true;
            // Ignore the error: the sandbox may not exist.
            let _ = self.client.delete(&id, forget_record).await;
            self.files.write_record(&self.record)?;
        }
        self.guest = None;
        // A new sandbox has no history.
        for entry in self.history.values_mut() {
            entry.snapshot = None;
            entry.synced_before.clear();
            self.files.write_entry(entry)?;
        }
        Ok(())
    }

    /// Rolls the sandbox back to the snapshot before command `first`.
    async fn roll_back(&mut self, first: u64) -> anyhow::Result<()> {
        let entry = self.history.get(&first);
        let Some(snapshot) = entry.and_then(|entry| entry.snapshot.clone()) else {
            // The history was already removed before an interruption.
            return Ok(());
        };
        let guest = self.guest().await?;
        let rolled_back = self.client.rollback(&guest.id, &snapshot).await;
        rolled_back.context(
            "cannot roll back the sandbox: to restore only the project directory, use `jiffy undo \
             --files-only`",
        )?;
        Ok(())
    }

    /// Restores files of the host. Returns the changed files.
    fn restore(
        &self,
        targets: &BTreeMap<TreePath, Option<SavedFile>>,
    ) -> anyhow::Result<Vec<TreePath>> {
        let mut restored = BTreeSet::new();
        // The reverse order visits files before their directories.
        for (path, target) in targets.iter().rev() {
            let present = host_tree::state(&self.directory, path, &self.synced)?;
            let Some((state, file)) = present else {
                continue;
            };
            let target = target.as_ref().map(|target| &target.state);
            let is_kept = target.is_some_and(|t| t.is_directory() == state.is_directory());
            if !is_kept {
                let removed = self.directory.remove(path, &file)?;
                // A directory with other files remains.
                if removed == Replacement::Done {
                    restored.insert(path.clone());
                } else {
                    ensure!(
                        state.is_directory() && target.is_none(),
                        "cannot restore {}: another program changed it; repeat `jiffy undo`",
                        self.directory.shown(path)
                    );
                }
            }
        }
        for (path, target) in targets {
            let Some(target) = target else { continue };
            let present = host_tree::state(&self.directory, path, &self.synced)?;
            if present.as_ref().map(|(state, _)| state) == Some(&target.state) {
                continue;
            }
            let written = self.write_saved(path, target, present.map(|(_, file)| file))?;
            ensure!(
                written == Replacement::Done,
                "cannot restore {}: another program changed it; repeat `jiffy undo`",
                self.directory.shown(path)
            );
            restored.insert(path.clone());
        }
        for (path, target) in targets.iter().rev() {
            let state = target.as_ref().map(|target| &target.state);
            if let Some(state) = state.filter(|state| state.is_directory()) {
                self.directory.set_mode(path, state.mode)?;
            }
        }
        Ok(restored.into_iter().collect())
    }

    /// Writes a file as it was saved before the command, in place of the present one.
    fn write_saved(
        &self,
        path: &TreePath,
        saved: &SavedFile,
        present: Option<ListedFile>,
    ) -> anyhow::Result<Replacement> {
        match &saved.state.content {
            Content::Directory => self.directory.make_directory(path),
            Content::Symlink(target) => {
                let new = NewFile::Symlink(&target.0);
                self.directory.replace(path, present.as_ref(), new)
            }
            Content::File { hash, .. } => {
                let new = NewFile::File {
                    content: &mut self.saved.open(hash)?,
                    mode: saved.state.mode,
                    mtime: saved.mtime,
                };
                self.directory.replace(path, present.as_ref(), new)
            }
        }
    }
}

/// Returns the message for an undo that would overwrite changes on the host.
fn conflict_message(conflicts: &[TreePath]) -> String {
    let shown = conflicts.iter().take(MAX_SHOWN_PATHS);
    let mut text = "files were changed on the host after the commands:".to_owned();
    for path in shown {
        text += &format!("\n  {path}");
    }
    if conflicts.len() > MAX_SHOWN_PATHS {
        text += &format!("\n  and {} more", conflicts.len() - MAX_SHOWN_PATHS);
    }
    text + "\nnothing was undone; `jiffy undo --force` restores these files and stores their \
            present versions"
}
