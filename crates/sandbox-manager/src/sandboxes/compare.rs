//! `compare`: compares the files of two sandboxes or snapshots.
//!
//! A running sandbox is read in place: a fork of it would store a snapshot. A snapshot, and the
//! snapshot of a paused sandbox, is read in a temporary guest ([`temporary_guest`]).
//!
//! The agent of each side lists the *changes* of its guest: the files that differ from the guest's
//! template. The two lists are comparable only if both guests have the same template.

mod slots;
mod temporary_guest;

pub(super) use slots::ComparisonSlots;

use super::lineage::LineageObject;
use super::{OperationError, Sandboxes};
use crate::comparison::{Comparison, FileDifference, FileListing};
use crate::sandbox::SandboxOperation;
use jiffy_agent_client::{AgentClient, ClientError, EntryKind};
use jiffy_api_types::SandboxState;
use jiffy_proto::agent::ENVD_PORT;
use std::time::{Duration, Instant};
use temporary_guest::TemporaryGuest;

/// Maximum number of changes that the agent of one side lists. The agent omits further changes.
const MAX_CHANGES: u32 = 100_000;
/// Maximum number of bytes whose contents are compared, on each side.
const MAX_HASHED_BYTES: u64 = 4 << 30;
/// Maximum number of bytes of a file that are returned.
pub const MAX_COMPARED_CONTENT: usize = 1 << 20;
/// Maximum duration of a comparison, without the start of the temporary guests.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Differences between two sides.
#[derive(Debug)]
pub struct ComparedFiles {
    /// Differences, sorted by path.
    pub differences: Vec<FileDifference>,
    /// True if differences are missing, because an agent has omitted changes of its side.
    pub is_incomplete: bool,
    /// Time for the start of the temporary guests, in milliseconds.
    pub start_ms: f64,
    /// Time of the comparison without the start of the guests, in milliseconds.
    pub compare_ms: f64,
}

/// Content of a file on one side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComparedContent {
    /// Size of the file in bytes.
    pub size: u64,
    /// First [`MAX_COMPARED_CONTENT`] bytes. For a symbolic link: its target.
    pub bytes: Vec<u8>,
    /// True for a symbolic link.
    pub is_symlink: bool,
}

/// Side whose files can be read.
struct OpenSide {
    /// Description of the object, for errors.
    name: String,
    agent: AgentClient,
    /// Template with its version. `None` if the version is unknown.
    template: Option<String>,
    /// Reference of the template.
    template_name: String,
    /// `None` for a running sandbox.
    _guest: Option<TemporaryGuest>,
}

impl Sandboxes {
    /// Compares the files of two objects of one template. `owner` is the key of the caller, whose
    /// simultaneous comparisons are limited.
    ///
    /// # Errors
    /// Fails if the templates differ, or if a guest does not answer in time or not correctly.
    pub async fn compare(
        &self,
        owner: Option<String>,
        a: LineageObject,
        b: LineageObject,
    ) -> Result<ComparedFiles, OperationError> {
        let this = self.clone();
        self.perform("compare", "", async move {
            let _slot = this.0.comparisons.take(owner)?;
            let started_at = Instant::now();
            let (a, b) = this.open_sides(a, b).await?;
            let start_ms = started_at.elapsed().as_secs_f64() * 1000.0;
            let read_at = Instant::now();
            let compared = tokio::time::timeout(TIMEOUT, differences(&a, &b));
            let (differences, is_incomplete) = compared.await.map_err(|_| a.timed_out(&b))??;
            Ok(ComparedFiles {
                differences,
                is_incomplete,
                start_ms,
                compare_ms: read_at.elapsed().as_secs_f64() * 1000.0,
            })
        })
        .await
    }

    /// Returns the contents of a file of two objects of one template. The content is `None` if the
    /// file does not exist.
    ///
    /// # Errors
    /// Fails like [`Self::compare`], and for files that are neither regular nor symbolic links.
    pub async fn compare_file(
        &self,
        owner: Option<String>,
        a: LineageObject,
        b: LineageObject,
        path: String,
    ) -> Result<[Option<ComparedContent>; 2], OperationError> {
        let this = self.clone();
        self.perform("compare", "", async move {
            let _slot = this.0.comparisons.take(owner)?;
            let (a, b) = this.open_sides(a, b).await?;
            let read = async { tokio::try_join!(a.content(&path), b.content(&path)) };
            let contents = tokio::time::timeout(TIMEOUT, read).await;
            let (of_a, of_b) = contents.map_err(|_| a.timed_out(&b))??;
            Ok([of_a, of_b])
        })
        .await
    }

    /// Opens both sides of a comparison. Fails if they have different templates.
    async fn open_sides(
        &self,
        a: LineageObject,
        b: LineageObject,
    ) -> Result<(OpenSide, OpenSide), OperationError> {
        let (a, b) = tokio::try_join!(self.open_side(a), self.open_side(b))?;
        // One version may have several names.
        let version = |side: &OpenSide| {
            let template = side.template.as_deref()?;
            Some(template.rsplit_once('@')?.1.to_owned())
        };
        let is_same = match (version(&a), version(&b)) {
            (Some(a), Some(b)) => a == b,
            _ => a.template_name == b.template_name,
        };
        if is_same {
            return Ok((a, b));
        }
        // The versions are named only if the names do not differ.
        let template = |side: &OpenSide| match &side.template {
            Some(template) if a.template_name == b.template_name => template.clone(),
            _ => side.template_name.clone(),
        };
        Err(OperationError::Incomparable {
            a_template: template(&a),
            b_template: template(&b),
            a: a.name,
            b: b.name,
        })
    }

    /// Opens one side of a comparison: the guest of a running sandbox, or a temporary guest of a
    /// snapshot.
    async fn open_side(&self, object: LineageObject) -> Result<OpenSide, OperationError> {
        let snapshot = match object {
            LineageObject::Snapshot(id) => id,
            LineageObject::Sandbox(id) => {
                let entry = self.0.entry(&id)?;
                let record = entry.record();
                if record.state == SandboxState::Running {
                    let guest = entry.running(SandboxOperation::Connect, "compare")?;
                    entry.uses().record();
                    let connect = move || {
                        let guest = guest.clone();
                        async move { guest.connect(ENVD_PORT).await }
                    };
                    let agent = AgentClient::new(connect);
                    return Ok(OpenSide {
                        name: format!("sandbox {}", record.id),
                        agent: match record.agent_token {
                            Some(token) => agent.with_token(token),
                            None => agent,
                        },
                        template: self.template_version(record.snapshot).await,
                        template_name: record.template,
                        _guest: None,
                    });
                }
                // A broken sandbox has no present files.
                let snapshot = record
                    .snapshot
                    .filter(|_| record.state == SandboxState::Paused);
                snapshot.ok_or_else(|| entry.refuse("compare"))?
            }
        };
        let guest = self.start_temporary(&snapshot).await?;
        Ok(OpenSide {
            name: format!("snapshot {snapshot}"),
            agent: guest.agent(),
            template: self.template_version(Some(snapshot)).await,
            template_name: guest.template().to_owned(),
            _guest: Some(guest),
        })
    }

    /// Returns the template of a snapshot with its version, as the engine recorded it.
    async fn template_version(&self, snapshot: Option<String>) -> Option<String> {
        let (engines, snapshot) = (self.0.snapshot_engines.clone(), snapshot?);
        // Reads the disk.
        let read = move || {
            Some(
                engines
                    .files_of(&snapshot)
                    .ok()?
                    .parts(&snapshot)
                    .ok()?
                    .template,
            )
        };
        tokio::task::spawn_blocking(read).await.ok()?
    }
}

/// Returns the differences, and whether some are missing.
async fn differences(
    a: &OpenSide,
    b: &OpenSide,
) -> Result<(Vec<FileDifference>, bool), OperationError> {
    let (of_a, of_b) = tokio::try_join!(a.listing(), b.listing())?;
    let is_incomplete = of_a.is_incomplete || of_b.is_incomplete;
    let compare = move || Comparison::of(&of_a, &of_b);
    let comparison = tokio::task::spawn_blocking(compare).await;
    let comparison = comparison.map_err(|e| OperationError::Lost(e.to_string()))?;
    let paths = comparison.candidates.iter().map(|c| c.path.as_slice());
    let paths: Vec<_> = paths.collect();
    let (hashes_a, hashes_b) = tokio::try_join!(a.hashes(&paths), b.hashes(&paths))?;
    Ok((comparison.with_hashes(&hashes_a, &hashes_b), is_incomplete))
}

impl OpenSide {
    fn failed(&self, problem: impl ToString) -> OperationError {
        OperationError::Comparison {
            object: self.name.clone(),
            problem: problem.to_string(),
        }
    }

    fn timed_out(&self, other: &Self) -> OperationError {
        OperationError::Comparison {
            object: format!("{} and {}", self.name, other.name),
            problem: format!("the guests did not answer within {} s", TIMEOUT.as_secs()),
        }
    }

    /// Returns the files that the guest has changed.
    async fn listing(&self) -> Result<FileListing, OperationError> {
        let changes = self.agent.detailed_changes(MAX_CHANGES).await;
        let changes = changes.map_err(|e| self.failed(e))?;
        // An agent ends its list at the limit, so only a faulty or hostile agent sends more.
        if changes.changes.len() > MAX_CHANGES as usize {
            return Err(self.failed("its agent reported too many files"));
        }
        FileListing::of(changes).map_err(|e| self.failed(e))
    }

    async fn hashes(&self, paths: &[&[u8]]) -> Result<Vec<Option<String>>, OperationError> {
        let hashes = self.agent.hashes(paths, MAX_HASHED_BYTES).await;
        hashes.map_err(|e| self.failed(e))
    }

    /// Reads a file or the target of a symbolic link, at most [`MAX_COMPARED_CONTENT`] bytes.
    /// `None` if the file does not exist.
    async fn content(&self, path: &str) -> Result<Option<ComparedContent>, OperationError> {
        let root = Some("root");
        let found = match self.agent.stat(path, root).await {
            Err(e) if e.is_not_found() => return Ok(None),
            found => found.map_err(|e| self.failed(e))?,
        };
        if let Some(target) = found.symlink_target.filter(|_| found.is_symlink) {
            return Ok(Some(ComparedContent {
                size: target.len() as u64,
                bytes: cut(target.into_bytes()),
                is_symlink: true,
            }));
        }
        if found.kind != EntryKind::File {
            return Err(OperationError::NotAFile {
                path: path.to_owned(),
                object: self.name.clone(),
            });
        }
        let read = async {
            let mut reader = self.agent.read_stream(path, root).await?;
            let mut bytes = Vec::new();
            while bytes.len() <= MAX_COMPARED_CONTENT
                && let Some(piece) = reader.next().await?
            {
                bytes.extend_from_slice(&piece);
            }
            Ok::<_, ClientError>(bytes)
        };
        let bytes = match read.await {
            Err(e) if e.is_not_found() => return Ok(None),
            read => read.map_err(|e| self.failed(e))?,
        };
        // The guest reports the size.
        let size = found.size.parse().unwrap_or(0).max(bytes.len() as u64);
        Ok(Some(ComparedContent {
            size,
            bytes: cut(bytes),
            is_symlink: false,
        }))
    }
}

fn cut(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(MAX_COMPARED_CONTENT);
    bytes
}
