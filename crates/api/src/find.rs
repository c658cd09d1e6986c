//! What exists for a caller.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::{TemplateInfo, TemplateRefusal};
use jiffy_build::{BuilderError, DEFAULT_TAG};
use jiffy_engine::Engine;
use jiffy_host::{OperationError, Purpose, SandboxRecord, SnapshotRecord, State};

/// Longest id or name that is looked for.
const MAX_NAME: usize = 256;
/// Tags that every template answers to.
const OWN_TAGS: [&str; 2] = [DEFAULT_TAG, "latest"];

/// In which state a sandbox must be to exist for those who are not the host's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Running or paused.
    Alive,
    /// Also broken.
    Mendable,
}

/// What a sandbox is made from.
#[derive(Debug)]
pub(crate) enum Origin {
    Template(TemplateInfo),
    Snapshot(Box<SnapshotRecord>),
}

impl<E: Engine> App<E> {
    /// A sandbox by its id. The host's owner finds it also by the beginning of its id, and whatever its state is.
    pub(crate) fn sandbox(
        &self,
        caller: &Caller,
        id: &str,
        wanted: Wanted,
    ) -> Result<SandboxRecord, ApiError> {
        let unknown = || {
            let message = format!("there is no sandbox `{}`", short(id));
            ApiError::not_found("sandbox_not_found", message)
        };
        let record = match self.sandboxes.get(id) {
            Ok(record) => record,
            Err(e @ OperationError::Ambiguous { .. }) if caller.is_owner() => return Err(e.into()),
            Err(_) => return Err(unknown()),
        };
        if caller.is_owner() {
            return Ok(record);
        }
        if record.id != id || !caller.sees(record.terms.owner.as_deref()) {
            return Err(unknown());
        }
        match &record.state {
            State::Running | State::Paused => Ok(record),
            State::Broken { .. } if wanted == Wanted::Mendable => Ok(record),
            State::Broken { cause } => Err(ApiError::not_found(
                "sandbox_broken",
                format!(
                    "sandbox {id} is broken ({cause}): roll it back to a snapshot, or delete it"
                ),
            )),
            State::Creating | State::Killed => Err(unknown()),
        }
    }

    /// Whether a snapshot exists for a caller: the host's owner has all, others those that were asked for.
    pub(crate) fn shows(&self, caller: &Caller, snapshot: &SnapshotRecord) -> bool {
        let asked = snapshot.purpose == Purpose::Asked && snapshot.kept;
        caller.is_owner() || (asked && caller.sees(snapshot.owner.as_deref()))
    }

    /// A snapshot by its id or name. The host's owner finds it also by the beginning of its id.
    pub(crate) fn snapshot(&self, caller: &Caller, id: &str) -> Result<SnapshotRecord, ApiError> {
        let unknown = || {
            let message = format!("there is no snapshot `{}`", short(id));
            ApiError::not_found("snapshot_not_found", message)
        };
        let mut all = self.sandboxes.snapshots(None)?;
        all.retain(|s| self.shows(caller, s));
        choose(&all, id, caller.is_owner()).ok_or_else(unknown)
    }

    /// A snapshot that a sandbox can be rolled back to: one that exists for the caller, or any that the sandbox descends from.
    pub(crate) fn ancestor(
        &self,
        caller: &Caller,
        sandbox: &SandboxRecord,
        id: &str,
    ) -> Result<SnapshotRecord, ApiError> {
        let lineage = self.sandboxes.snapshots(Some(&sandbox.id))?;
        match choose(&lineage, id, caller.is_owner()) {
            Some(found) => Ok(found),
            None => self.snapshot(caller, id),
        }
    }

    /// What `templateID` means: a template by name or id, perhaps with a tag, or a snapshot.
    pub(crate) fn origin(&self, caller: &Caller, id: &str) -> Result<Origin, ApiError> {
        match self.template(caller, id) {
            Ok(info) => Ok(Origin::Template(info)),
            Err(e) if e.error_code == "template_not_found" => match self.snapshot(caller, id) {
                Ok(snapshot) => Ok(Origin::Snapshot(Box::new(snapshot))),
                Err(_) => Err(e),
            },
            Err(e) => Err(e),
        }
    }

    /// A template by name or id, perhaps with a tag, if the caller may use it.
    pub(crate) fn template(&self, caller: &Caller, id: &str) -> Result<TemplateInfo, ApiError> {
        let unknown = |why: &str| {
            let message = format!("there is no template or snapshot `{}`{why}", short(id));
            ApiError::not_found("template_not_found", message)
        };
        const WHERE: &str = "; `jiffy template ls` and `jiffy snapshots` list them, as do `GET /templates` and `GET /snapshots`";
        if id.contains('/') {
            return Err(unknown(
                ": templates of this host are named without a namespace",
            ));
        }
        let name = match &self.builder {
            Some(builder) => builder.resolve(id, caller.bounds()),
            None => Ok(id.to_owned()),
        };
        let name = match name {
            Ok(name) => name,
            Err(BuilderError::UnknownTemplate(_)) => return Err(unknown(WHERE)),
            Err(e) => return Err(e.into()),
        };
        let (bare, tag) = name.split_once(':').unwrap_or((&name, DEFAULT_TAG));
        let found = match self.templates.find(&name) {
            // What has no tag of that name is meant as it is.
            Err(TemplateRefusal::Unknown(_)) if OWN_TAGS.contains(&tag) => {
                self.templates.find(bare)
            }
            found => found,
        };
        match found {
            Ok(info) => Ok(info),
            Err(TemplateRefusal::Unknown(_)) if self.templates.find(bare).is_ok() => {
                Err(unknown(&format!(": template `{bare}` has no such tag")))
            }
            Err(TemplateRefusal::Unknown(_)) => Err(unknown(WHERE)),
            Err(TemplateRefusal::Failed(why)) => Err(ApiError::internal(why)),
        }
    }
}

/// The one with this id, else the newest with this name, else, if that is allowed, the only one whose id begins so.
fn choose(all: &[SnapshotRecord], id: &str, short_ids: bool) -> Option<SnapshotRecord> {
    let named = |s: &&SnapshotRecord| s.name.as_deref() == Some(id);
    let exact = all.iter().find(|s| s.id == id);
    let found = exact.or_else(|| all.iter().rfind(named));
    let found = found.or_else(|| {
        let mut begins = all.iter().filter(|s| s.id.starts_with(id));
        let first = begins.next().filter(|_| short_ids && !id.is_empty());
        first.filter(|_| begins.next().is_none())
    });
    found.cloned()
}

/// As much of what was asked for as a message can take.
pub(crate) fn short(id: &str) -> String {
    let clean = id.chars().take(MAX_NAME);
    clean
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}
