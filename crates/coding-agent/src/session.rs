//! Session of a project directory: its sandbox, and the commands in it.
//!
//! Before a command, changed files of the project are copied to the sandbox, and a snapshot is
//! taken. Afterwards, changes of the sandbox are copied back.

mod pull;
mod push;
pub(crate) mod undo;

use crate::history::{CommandStatus, HistoryEntry};
use crate::host_directory::HostDirectory;
use crate::limits::SessionLimits;
use crate::project::Project;
use crate::saved_copies::SavedCopies;
use crate::session_files::{SessionFiles, SessionRecord};
use crate::shell::ShellCommand;
use crate::tree::{SyncedFile, SyncedTree};
use crate::tree_path::TreePath;
use anyhow::{Context, ensure};
use hyper::Method;
use jiffy_agent_client::AgentClient;
use jiffy_client::{Client, NewSandbox, Sandbox, SandboxSettings, SnapshotAck, has_error_code};
use serde_json::json;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;

/// Time without commands after which the sandbox is paused, in seconds.
const IDLE_SECONDS: u32 = 3600;
/// Interval at which the timeout of the sandbox is extended while a command runs.
const EXTENSION_INTERVAL: Duration = Duration::from_secs(1200);
/// Number of SIGKILL.
const SIGKILL: i32 = 9;
/// Key of the metadata with the project directory of a sandbox.
const METADATA: &str = "coding-agent-project";

/// Prepares a template before a sandbox is created from it. Blocks.
pub type Templates = Arc<dyn Fn(&str) -> anyhow::Result<()> + Send + Sync>;

/// Settings of a new session. `None` retains the setting of an existing session.
#[derive(Debug, Clone, Default)]
pub struct SessionOptions {
    /// Template.
    pub template: Option<String>,
    /// Access of the sandbox to the internet.
    pub internet: Option<bool>,
    /// Maximum number of commands in the history.
    pub commands: Option<usize>,
    /// Maximum size of saved copies in bytes.
    pub saved_bytes: Option<u64>,
}

/// Sandbox of a session.
#[derive(Clone)]
pub(crate) struct Guest {
    pub id: String,
    pub agent: AgentClient,
    pub sandbox: Sandbox,
}

/// Command that may start: the sandbox is synchronised and has a snapshot.
pub struct CommandTicket {
    /// Number of the command.
    pub number: u64,
    /// Program and arguments to execute in the sandbox as root.
    pub words: Vec<String>,
    /// Sandbox.
    pub sandbox: Sandbox,
    /// Extends the lifetime of the sandbox.
    _extension: Extension,
    /// Lock of the command.
    _lock: File,
}

/// Task that extends the timeout of the sandbox. Dropping this value stops it.
struct Extension(JoinHandle<()>);

impl Drop for Extension {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Session of a project directory. Other processes wait until it is dropped.
pub struct Session {
    pub(crate) project: Project,
    pub(crate) files: SessionFiles,
    pub(crate) directory: HostDirectory,
    pub(crate) record: SessionRecord,
    pub(crate) synced: SyncedTree,
    /// Commands by number.
    pub(crate) history: BTreeMap<u64, HistoryEntry>,
    pub(crate) saved: SavedCopies,
    pub(crate) client: Client,
    pub(crate) guest: Option<Guest>,
    templates: Templates,
}

impl Session {
    /// Opens the session of a project, and creates it if it does not exist. Waits while another
    /// process uses it. Commands whose process was killed are terminated.
    pub async fn open(
        project: &Project,
        client: Client,
        options: SessionOptions,
        templates: Templates,
    ) -> anyhow::Result<Self> {
        let waiting = project.clone();
        let files = tokio::task::spawn_blocking(move || SessionFiles::lock(&waiting)).await??;
        let mut record = files.record()?.unwrap_or_else(|| SessionRecord {
            project: project.directory().to_owned(),
            template: "base".to_owned(),
            internet: true,
            sandbox: None,
            limits: SessionLimits::default(),
            next: 1,
        });
        record.internet = options.internet.unwrap_or(record.internet);
        let limits = &mut record.limits;
        limits.commands = options.commands.unwrap_or(limits.commands).max(1);
        limits.saved_bytes = options.saved_bytes.unwrap_or(limits.saved_bytes);
        if let Some(template) = options.template {
            let may_set_template = record.sandbox.is_none() || record.template == template;
            ensure!(
                may_set_template,
                "the session uses template `{}`: end it with `jiffy agent-shell end`",
                record.template
            );
            record.template = template;
        }
        files.write_record(&record)?;
        let mut session = Self {
            project: project.clone(),
            directory: HostDirectory::open(project.directory())?,
            synced: files.synced()?,
            history: files.history()?,
            saved: SavedCopies::new(files.path("saved")),
            files,
            record,
            client,
            guest: None,
            templates,
        };
        session.recover().await?;
        Ok(session)
    }

    /// Reads the history of a project without waiting for its lock.
    pub fn read_history(project: &Project) -> anyhow::Result<Vec<HistoryEntry>> {
        let mut entries = Vec::new();
        for file in std::fs::read_dir(project.state().join("history"))
            .into_iter()
            .flatten()
        {
            let path = file?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "json")
                && let Some(entry) = crate::session_files::read::<HistoryEntry>(&path)?
            {
                entries.push(entry);
            }
        }
        entries.sort_by_key(|entry| entry.number);
        Ok(entries)
    }

    /// Returns the recorded sandbox of a project without waiting for its lock. `None` before the
    /// first command.
    pub fn recorded_sandbox(project: &Project) -> anyhow::Result<Option<String>> {
        let path = project.state().join("session.json");
        let record = crate::session_files::read::<SessionRecord>(&path)?;
        Ok(record.and_then(|record| record.sandbox))
    }

    /// Creates the sandbox if it does not exist, and copies the project to it.
    pub async fn prepare(&mut self) -> anyhow::Result<String> {
        self.synchronise().await?;
        Ok(self.guest().await?.id)
    }

    /// Synchronises both sides, takes a snapshot and records the command. The returned ticket has
    /// the program to start.
    pub async fn begin(&mut self, command: &ShellCommand) -> anyhow::Result<CommandTicket> {
        command.check()?;
        self.synchronise().await?;
        let guest = self.guest().await?;
        let number = self.record.next;
        let tag = tag(number);
        let project = self.project.directory();
        let words = command.upload(&guest.agent, &tag, project).await?;
        self.record.next += 1;
        self.files.write_record(&self.record)?;
        let lock = self.files.lock_command(number)?;
        let lock = lock.context("another process has the lock of the command")?;
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut entry = HistoryEntry {
            number,
            command: command.text.clone(),
            started_ms: u64::try_from(started.unwrap_or_default().as_millis())?,
            status: CommandStatus::Preparing,
            snapshot: None,
            changes: BTreeMap::new(),
            rejected: Vec::new(),
            synced_before: BTreeMap::new(),
        };
        self.files.write_entry(&entry)?;
        let name = self.snapshot_name(number);
        let captured = SnapshotAck::Captured;
        let take = |name| self.client.snapshot_sandbox(&guest.id, name, captured);
        let snapshot = match take(Some(name.as_str())).await {
            // A snapshot of an earlier session, whose state was removed, has this name.
            Err(e) if has_error_code(&e, "name_taken") => take(None).await,
            result => result,
        };
        let snapshot = snapshot.context("cannot take a snapshot before the command")?;
        entry.snapshot = Some(snapshot.id);
        entry.status = CommandStatus::Running;
        self.files.write_entry(&entry)?;
        self.history.insert(number, entry);
        Ok(CommandTicket {
            number,
            words,
            sandbox: guest.sandbox,
            _extension: extend(self.client.clone(), guest.id),
            _lock: lock,
        })
    }

    /// Records the end of a command, and copies its changes to the host. `code` is `None` if the
    /// exit code is unknown. Returns the entry of the history, or `None` if the command was undone.
    pub async fn finish(
        &mut self,
        ticket: CommandTicket,
        code: Option<u8>,
    ) -> anyhow::Result<Option<HistoryEntry>> {
        let Some(entry) = self.history.get_mut(&ticket.number) else {
            return Ok(None);
        };
        let rejected_before = entry.rejected.len();
        entry.status = code.map_or(CommandStatus::Interrupted, CommandStatus::Exited);
        self.files.write_entry(entry)?;
        let pulled = self.pull().await;
        self.prune().await?;
        pulled?;
        let mut entry = self.history.get(&ticket.number).cloned();
        if let Some(entry) = &mut entry {
            // Other processes may have added rejections while the command ran. Omit them.
            entry.rejected.drain(..rejected_before);
        }
        Ok(entry)
    }

    /// Removes the sandbox, the snapshots and all other data of the session.
    pub async fn end(self) -> anyhow::Result<()> {
        for entry in self.history.values() {
            self.remove_snapshot(entry).await;
        }
        if let Some(id) = &self.record.sandbox {
            let forget_record = true;
            match self.client.delete(id, forget_record).await {
                Err(e) if !has_error_code(&e, "sandbox_not_found") => return Err(e),
                _ => {}
            }
        }
        self.files.remove()
    }

    /// Copies changes in both directions.
    async fn synchronise(&mut self) -> anyhow::Result<()> {
        self.guest().await?;
        if !self.history.is_empty() {
            // Processes of earlier commands may have changed files.
            self.pull().await?;
        }
        self.push().await
    }

    /// Returns the running sandbox. Resumes a paused sandbox, and creates a missing one.
    pub(crate) async fn guest(&mut self) -> anyhow::Result<Guest> {
        if let Some(guest) = &self.guest {
            return Ok(guest.clone());
        }
        if let Some(id) = self.record.sandbox.clone() {
            let path = format!("/sandboxes/{id}/connect");
            let body = json!({ "timeout": IDLE_SECONDS });
            match self
                .client
                .call::<Sandbox>(Method::POST, &path, &body)
                .await
            {
                Ok(sandbox) => return self.use_sandbox(sandbox),
                Err(e) if has_error_code(&e, "sandbox_not_found") => {}
                Err(e) => {
                    return Err(e.context(format!("cannot use the sandbox {id} of the session")));
                }
            }
        }
        let sandbox = self.create().await?;
        self.use_sandbox(sandbox)
    }

    /// Uses a sandbox for the session. Its id is stored first, so that a later process finds it.
    pub(crate) fn use_sandbox(&mut self, sandbox: Sandbox) -> anyhow::Result<Guest> {
        let id = sandbox.record.id.clone();
        if self.record.sandbox.as_ref() != Some(&id) {
            self.record.sandbox = Some(id.clone());
            self.files.write_record(&self.record)?;
        }
        let agent = self.client.agent(&sandbox)?;
        let guest = Guest { id, agent, sandbox };
        self.guest = Some(guest.clone());
        Ok(guest)
    }

    /// Creates a sandbox: from the snapshot of the latest command if there is one, otherwise from
    /// the template.
    async fn create(&mut self) -> anyhow::Result<Sandbox> {
        let latest = self.history.last_key_value();
        let latest = latest.and_then(|(n, entry)| Some((*n, entry.snapshot.clone()?)));
        if let Some((number, snapshot)) = latest
            && let Ok(sandbox) = self.create_from(&snapshot).await
        {
            self.revert_synced(number);
            self.files.write_synced(&self.synced)?;
            return Ok(sandbox);
        }
        // Without the snapshots, the earlier sandbox cannot be restored.
        for entry in self.history.values_mut() {
            entry.snapshot = None;
            entry.synced_before.clear();
            self.files.write_entry(entry)?;
        }
        self.synced.clear();
        self.files.write_synced(&self.synced)?;
        let (templates, template) = (Arc::clone(&self.templates), self.record.template.clone());
        let prepared = tokio::task::spawn_blocking(move || templates(&template)).await?;
        prepared.with_context(|| format!("cannot prepare template `{}`", self.record.template))?;
        let template = self.record.template.clone();
        let created = self.create_from(&template).await;
        created.context("cannot create the sandbox of the session")
    }

    async fn create_from(&self, source: &str) -> anyhow::Result<Sandbox> {
        let name = self.project.sandbox_name();
        match self.create_named(source, Some(name)).await {
            // A sandbox of an earlier session, whose state was removed, has this name.
            Err(e) if has_error_code(&e, "name_taken") => self.create_named(source, None).await,
            result => result,
        }
    }

    /// Creates the sandbox of the project from a template or snapshot.
    async fn create_named(&self, source: &str, name: Option<String>) -> anyhow::Result<Sandbox> {
        let project = self.project.directory().display().to_string();
        let settings = SandboxSettings {
            name,
            metadata: BTreeMap::from([(METADATA.to_owned(), project)]),
            auto_pause: Some(true),
            internet: (!self.record.internet).then_some(false),
            ..SandboxSettings::default()
        };
        let request = NewSandbox::of(source, BTreeMap::new())
            .with_settings(settings)
            .with_timeout_s(IDLE_SECONDS);
        self.client.create(&request).await
    }

    /// Sets the entries of the synchronised tree to their values at the snapshot of a command.
    pub(crate) fn revert_synced(&mut self, number: u64) {
        for (_, entry) in self.history.range_mut(number..).rev() {
            for (path, old) in std::mem::take(&mut entry.synced_before) {
                match old {
                    Some(old) => self.synced.insert(path, old),
                    None => self.synced.remove(&path),
                };
            }
        }
    }

    /// Sets an entry of the synchronised tree, and records its earlier value in the history.
    pub(crate) fn set_synced(&mut self, path: &TreePath, new: Option<SyncedFile>) {
        let old = match new {
            Some(new) => self.synced.insert(path.clone(), new),
            None => self.synced.remove(path),
        };
        if let Some((_, entry)) = self.history.iter_mut().next_back() {
            entry.synced_before.entry(path.clone()).or_insert(old);
        }
    }

    /// Writes the synchronised tree and the latest entry of the history.
    pub(crate) fn write_synced(&self) -> anyhow::Result<()> {
        // The entry is written first. If the tree is not written afterwards, the entry still has
        // the correct earlier values.
        if let Some((_, entry)) = self.history.last_key_value() {
            self.files.write_entry(entry)?;
        }
        self.files.write_synced(&self.synced)
    }

    /// Completes an interrupted undo, and handles commands whose process was killed.
    async fn recover(&mut self) -> anyhow::Result<()> {
        self.resume_undo().await?;
        let numbers: Vec<u64> = self.history.keys().copied().collect();
        for number in numbers {
            let Some(entry) = self.history.get(&number) else {
                continue;
            };
            match entry.status {
                CommandStatus::Exited(_) | CommandStatus::Interrupted => continue,
                CommandStatus::Preparing | CommandStatus::Running => {}
            }
            // If another process holds the lock, it still runs the command.
            if self.files.lock_command(number)?.is_none() {
                continue;
            }
            if entry.status == CommandStatus::Preparing {
                let name = self.snapshot_name(number);
                // Ignore the error: the snapshot may not exist.
                let _ = self.client.remove_snapshot(&name).await;
                self.files.remove_entry(number)?;
                self.history.remove(&number);
                continue;
            }
            let guest = self.guest().await?;
            let processes = guest.agent.list().await.context("cannot list processes")?;
            let tag = tag(number);
            for process in processes.iter().filter(|p| p.config.args.contains(&tag)) {
                // Ignore the error: the process may have exited.
                let _ = guest.agent.signal(process.pid, SIGKILL).await;
            }
            if let Some(entry) = self.history.get_mut(&number) {
                entry.status = CommandStatus::Interrupted;
                self.files.write_entry(entry)?;
            }
            self.pull().await?;
        }
        Ok(())
    }

    /// Removes the oldest entries of the history until the limits hold.
    async fn prune(&mut self) -> anyhow::Result<()> {
        let limits = self.record.limits;
        loop {
            self.retain_saved()?;
            let is_small = self.saved.bytes() <= limits.saved_bytes;
            if self.history.len() <= 1 || is_small && self.history.len() <= limits.commands {
                return Ok(());
            }
            let Some((number, entry)) = self.history.first_key_value() else {
                return Ok(());
            };
            let number = *number;
            self.remove_snapshot(entry).await;
            self.files.remove_entry(number)?;
            self.history.remove(&number);
        }
    }

    /// Removes saved copies that no entry of the history needs.
    pub(crate) fn retain_saved(&self) -> anyhow::Result<()> {
        let entries = self.history.values();
        let needed: HashSet<&str> = entries.flat_map(HistoryEntry::saved_hashes).collect();
        self.saved
            .retain(&needed)
            .context("cannot remove saved copies")
    }

    pub(crate) async fn remove_snapshot(&self, entry: &HistoryEntry) {
        if let Some(snapshot) = &entry.snapshot {
            // Ignore the error: the snapshot may have been removed by the user.
            let _ = self.client.remove_snapshot(snapshot).await;
        }
    }

    fn snapshot_name(&self, number: u64) -> String {
        format!("{}-{number}", self.project.sandbox_name())
    }
}

/// Returns the name of a command in the sandbox.
fn tag(number: u64) -> String {
    format!("command-{number}")
}

/// Extends the lifetime of a sandbox until the returned value is dropped.
fn extend(client: Client, id: String) -> Extension {
    Extension(tokio::spawn(async move {
        let path = format!("/sandboxes/{id}/timeout");
        let body = json!({ "timeout": IDLE_SECONDS });
        loop {
            tokio::time::sleep(EXTENSION_INTERVAL).await;
            // Ignore the error: the command reports a lost sandbox.
            let _ = client.call::<()>(Method::POST, &path, &body).await;
        }
    }))
}
