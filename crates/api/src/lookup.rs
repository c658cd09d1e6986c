//! Look-up of the sandbox, snapshot or template that a request names, by id, name or prefix. A
//! caller finds only objects that it may see; all others are reported as missing.

mod object;

use crate::app::App;
use crate::caller::{Caller, SHORT_ID};
use crate::error::ApiError;
use crate::hooks::{TemplateInfo, TemplateRefusal};
use crate::keys::Scope;
use axum::http::StatusCode;
use jiffy_engine_api::is_id;
use jiffy_image::Reference;
use jiffy_sandbox_manager::{
    FetchScope, OperationError, PinnedSnapshot, Sandbox, SandboxState, Snapshot,
};
use jiffy_template_builder::{
    DEFAULT_TAG, ResolvedBy, ResolvedTemplate, StoredTemplate, is_visible, resolve,
};
use std::ops::ControlFlow;

/// Maximum number of characters of an id or name in a message.
const MAX_NAME: usize = 256;
/// Tags that every template has implicitly.
const OWN_TAGS: [&str; 2] = [DEFAULT_TAG, "latest"];

/// States of a sandbox in which a call finds it. The host's owner finds sandboxes in all states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// Running or paused.
    Alive,
    /// Running, paused, or broken if a resume repairs the sandbox.
    Resumable,
    /// Running, paused or broken.
    IncludingBroken,
}

/// Template or snapshot from which a sandbox is created.
#[derive(Debug)]
pub(crate) enum Origin {
    Template(TemplateInfo),
    Snapshot(Box<Snapshot>),
}

impl App {
    /// Finds a sandbox by id or name. The host's owner and read-only callers may also give a prefix
    /// of the id. The host's owner finds sandboxes in any state.
    pub(crate) fn sandbox(
        &self,
        caller: &Caller,
        id: &str,
        required: Liveness,
    ) -> Result<Sandbox, ApiError> {
        let unknown = || {
            if self.fleet.is_some() {
                // The same answer on all hosts, whether or not another key has the sandbox.
                let message = format!("sandbox `{}` does not exist", short(id));
                return ApiError::not_found("sandbox_not_found", message);
            }
            let hint = if !is_id(id) || self.sandboxes.snapshots().expect_store().is_err() {
                ""
            } else if self.sandboxes.shares_sandboxes() {
                "; resume it here if it is paused in the store"
            } else {
                "; resume a sandbox of another host there, or create a new sandbox here from its snapshot"
            };
            let message = format!("sandbox `{}` does not exist on this host{hint}", short(id));
            ApiError::not_found("sandbox_not_found", message)
        };
        let record = match self.sandboxes.find(id) {
            Some(record) => record,
            None => {
                if let Some(record) = self.sandbox_by_name(caller, id)? {
                    return if_visible(record, caller, required).ok_or_else(unknown)?;
                }
                self.sandboxes.get(id).map_err(|e| match e {
                    // Other callers must not learn which ids exist.
                    e @ OperationError::Ambiguous { .. } if caller.is_owner() => e.into(),
                    _ => unknown(),
                })?
            }
        };
        if caller.is_owner() {
            return Ok(record);
        }
        // Only read-only callers, who are shown no complete ids, may give a prefix.
        let is_accepted = record.id() == id || (caller.is_read_only() && id.len() >= SHORT_ID);
        if !is_accepted || !caller.sees(record.owner()) {
            return Err(unknown());
        }
        if_visible(record, caller, required).ok_or_else(unknown)?
    }

    /// Finds a sandbox by name: a sandbox of the caller, or else the only visible sandbox of other
    /// owners with this name.
    fn sandbox_by_name(&self, caller: &Caller, name: &str) -> Result<Option<Sandbox>, ApiError> {
        let mut found = self.sandboxes.index().named(name);
        found.retain(|r| caller.sees(r.owner()));
        // A sandbox of the caller takes precedence over sandboxes of others with the same name.
        let own = caller.owner_id();
        if let Some(at) = found.iter().position(|r| r.settings().owner == own) {
            return Ok(Some(found.swap_remove(at)));
        }
        if found.len() > 1 {
            let ids: Vec<&str> = found.iter().map(|r| caller.shown_id(r.id())).collect();
            return Err(ApiError::invalid(format!(
                "several keys have a sandbox named `{}`: use one of the ids {}",
                short(name),
                ids.join(", ")
            )));
        }
        Ok(found.pop())
    }

    /// Returns whether a snapshot is visible to a caller. The host's owner sees all snapshots.
    /// Other callers see snapshots that a user requested.
    pub(crate) fn shows(&self, caller: &Caller, snapshot: &Snapshot) -> bool {
        caller.is_owner() || (snapshot.is_requested() && caller.sees(snapshot.owner()))
    }

    /// Finds a snapshot by its id, or by its name if the caller owns the snapshot. The host's owner
    /// may also give a prefix of the id.
    pub(crate) fn snapshot(&self, caller: &Caller, id: &str) -> Result<Snapshot, ApiError> {
        if let Some(found) = self.snapshot_by_id(caller, id) {
            return Ok(found);
        }
        if let Some(found) = self.snapshot_by_name(caller, id)? {
            return Ok(found);
        }
        let unknown = || {
            let message = format!("snapshot `{}` does not exist", short(id));
            ApiError::not_found("snapshot_not_found", message)
        };
        let short_id = caller.is_owner().then(|| self.snapshot_by_prefix(id));
        short_id.flatten().ok_or_else(unknown)
    }

    fn snapshot_by_id(&self, caller: &Caller, id: &str) -> Option<Snapshot> {
        let is_match = |s: &Snapshot| s.id() == id && self.shows(caller, s);
        let all = self.sandboxes.snapshots().like(id);
        all.into_iter().find(is_match)
    }

    /// Finds the caller's newest snapshot with this name; other owners are ignored. The host's
    /// owner and keys with the scope `admin` or `read` share their snapshot names.
    fn snapshot_by_name(&self, caller: &Caller, name: &str) -> Result<Option<Snapshot>, ApiError> {
        let named = |s: &Snapshot| s.name() == Some(name) && self.shows(caller, s);
        // Newer snapshots precede older ones.
        let all = self.sandboxes.snapshots().like(name).into_iter().rev();
        for found in all.filter(named) {
            let own = match caller.owner_scope() {
                Some(key) => found.owner() == Some(key),
                None => self.is_host_owner(found.owner())?,
            };
            if own {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Snapshot whose id starts with a prefix, if there is exactly one.
    fn snapshot_by_prefix(&self, id: &str) -> Option<Snapshot> {
        let mut all = self.sandboxes.snapshots().like(id);
        all.retain(|s| s.id().starts_with(id));
        match (id.is_empty(), all.len()) {
            // An empty or ambiguous prefix matches no snapshot.
            (false, 1) => all.pop(),
            _ => None,
        }
    }

    /// Returns whether `owner` is the host's owner or a key with the scope `admin` or `read`.
    fn is_host_owner(&self, owner: Option<&str>) -> Result<bool, ApiError> {
        let Some(owner) = owner else {
            return Ok(true);
        };
        let scope = self.keys.scope_of(owner);
        let scope = scope.map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(scope.is_some_and(|scope| scope != Scope::Create))
    }

    /// Finds a snapshot to which a sandbox can be rolled back: a snapshot that is visible to the
    /// caller, or any ancestor of the sandbox.
    pub(crate) fn ancestor(
        &self,
        caller: &Caller,
        sandbox: &Sandbox,
        id: &str,
    ) -> Result<Snapshot, ApiError> {
        // Ancestors include internal snapshots, which `snapshot` does not find for most callers.
        let lineage = self.sandboxes.snapshots().list(Some(sandbox.id()))?;
        match find_snapshot(&lineage, id, caller.is_owner()) {
            Some(found) => Ok(found),
            None => self.snapshot(caller, id),
        }
    }

    /// Resolves `templateID` of a request. In this order, it may be an id, a template of the
    /// caller, a snapshot of the caller, or a shared template.
    pub(crate) fn origin(&self, caller: &Caller, id: &str) -> Result<Origin, ApiError> {
        let resolved = self.resolve(caller, id)?;
        let rank = resolved.as_ref().map(|resolved| resolved.resolved_by);
        let snapshot = match rank {
            Some(ResolvedBy::Id) => None,
            // The id of a snapshot precedes the name of a template. New templates cannot have a
            // name that looks like an id, but an old data directory may contain such names.
            Some(ResolvedBy::Own) => self.snapshot_by_id(caller, id),
            Some(ResolvedBy::Shared) | None => match self.snapshot_by_id(caller, id) {
                None => self.snapshot_by_name(caller, id)?,
                found => found,
            },
        };
        let short_id = || caller.is_owner().then(|| self.snapshot_by_prefix(id));
        match (snapshot, resolved) {
            (Some(snapshot), _) => Ok(Origin::Snapshot(Box::new(snapshot))),
            (None, Some(resolved)) => self.info(&resolved).map(Origin::Template),
            (None, None) => match short_id().flatten() {
                Some(snapshot) => Ok(Origin::Snapshot(Box::new(snapshot))),
                None => Err(self.no_template(caller, id)),
            },
        }
    }

    /// Like [`Self::origin`], but also fetches a snapshot that only the store has. The snapshot
    /// stays on this host as long as the guard exists.
    pub(crate) async fn origin_or_fetched(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<(Origin, Option<PinnedSnapshot>), ApiError> {
        match self.origin(caller, id) {
            Err(e) if e.status == StatusCode::NOT_FOUND => {
                let held = self.fetched(caller, id).await?.ok_or(e)?;
                let snapshot = Box::new(held.snapshot().clone());
                Ok((Origin::Snapshot(snapshot), Some(held)))
            }
            found => found.map(|origin| (origin, None)),
        }
    }

    /// Like [`Self::ancestor`], but also fetches a snapshot that only the store has. The snapshot
    /// stays on this host as long as the guard exists.
    pub(crate) async fn ancestor_or_fetched(
        &self,
        caller: &Caller,
        sandbox: &Sandbox,
        id: &str,
    ) -> Result<(Snapshot, Option<PinnedSnapshot>), ApiError> {
        match self.ancestor(caller, sandbox, id) {
            Err(e) if e.status == StatusCode::NOT_FOUND => {
                let held = self.fetched(caller, id).await?.ok_or(e)?;
                Ok((held.snapshot().clone(), Some(held)))
            }
            found => found.map(|snapshot| (snapshot, None)),
        }
    }

    /// Like [`Self::snapshot`], but also finds a snapshot that only the store has.
    pub(crate) async fn snapshot_or_stored(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<Snapshot, ApiError> {
        match self.snapshot(caller, id) {
            Err(e) if e.status == StatusCode::NOT_FOUND => {
                let (owner, scope) = (caller.owner_id(), scope(caller));
                let snapshots = self.sandboxes.snapshots();
                snapshots.expect_not_lost(owner.as_deref(), id, scope)?;
                let stored = snapshots.describe_stored(owner.as_deref(), id, scope);
                stored.await?.ok_or(e)
            }
            found => found,
        }
    }

    /// Fetches a snapshot of the caller from the store. `None` if the store has no such snapshot.
    async fn fetched(&self, caller: &Caller, id: &str) -> Result<Option<PinnedSnapshot>, ApiError> {
        let (owner, scope) = (caller.owner_id(), scope(caller));
        let snapshots = self.sandboxes.snapshots();
        snapshots.expect_not_lost(owner.as_deref(), id, scope)?;
        Ok(snapshots.fetch(owner.as_deref(), id, scope).await?)
    }

    /// Returns a template that is visible to the caller, by name or id, optionally with a tag or a
    /// build id. A name or id without a tag also finds a template that lacks the default tag: the
    /// result is then its newest tag.
    pub(crate) fn template(&self, caller: &Caller, id: &str) -> Result<TemplateInfo, ApiError> {
        if let Some(resolved) = self.resolve(caller, id)? {
            return self.info(&resolved);
        }
        // A tag that was given must match exactly.
        let newest = if id.contains(':') {
            None
        } else {
            self.newest_tag(caller, id)?
        };
        newest.ok_or_else(|| self.no_template(caller, id))
    }

    /// Returns the newest tag of the template `id` (an id or `[owner/]name`) that the caller may
    /// see.
    fn newest_tag(&self, caller: &Caller, id: &str) -> Result<Option<TemplateInfo>, ApiError> {
        let record = match &self.builder {
            Some(builder) if is_id(id) => builder.records().template(id)?,
            _ => None,
        };
        let mut names: Vec<String> = record
            .map(|r| r.reference(DEFAULT_TAG))
            .into_iter()
            .collect();
        if let Ok(named) = Reference::parse(id) {
            let own = caller.owner_scope().filter(|_| named.owner().is_none());
            // The caller's own template precedes a template of the host with the same name.
            let own = own.map(|key| format!("{key}/{}", named.name()));
            names.extend(own.into_iter().chain([named.without_tag()]));
        }
        for name in names {
            let mut newest: Option<TemplateInfo> = None;
            let walked = self.templates.walk(Some(&name), &mut |info| {
                if info.without_tag() != name {
                    return ControlFlow::Break(());
                }
                let exists =
                    is_visible(info.owner.as_deref(), info.visibility, caller.owner_scope());
                // The walk is ordered by tag, not by time.
                if exists && newest.as_ref().is_none_or(|n| n.created < info.created) {
                    newest = Some(info);
                }
                ControlFlow::Continue(())
            });
            match (walked, newest) {
                (_, Some(info)) => return Ok(Some(info)),
                // The text cannot be the name of a template.
                (Ok(()) | Err(TemplateRefusal::Unknown(_)), None) => {}
                (Err(e), None) => return Err(ApiError::internal(e.to_string())),
            }
        }
        Ok(None)
    }

    /// Resolves `id` to a template for the caller. The tags that every template has implicitly
    /// refer to the template itself.
    fn resolve(&self, caller: &Caller, id: &str) -> Result<Option<ResolvedTemplate>, ApiError> {
        let records = self.builder.as_ref().map(|builder| builder.records());
        let lookup = |reference: &Reference| match self.templates.find(&reference.to_string()) {
            Ok(info) => Ok(Some(StoredTemplate {
                visibility: info.visibility,
                version: info.version,
            })),
            Err(TemplateRefusal::Unknown(_)) => Ok(None),
            Err(e) => Err(ApiError::internal(e.to_string())),
        };
        // Look up the name with its tag first: a build may have this tag.
        let found = resolve(id, caller.owner_scope(), records, &lookup)?;
        match id.split_once(':') {
            Some((name, tag)) if found.is_none() && OWN_TAGS.contains(&tag) => {
                resolve(name, caller.owner_scope(), records, &lookup)
            }
            _ => Ok(found),
        }
    }

    fn info(&self, resolved: &ResolvedTemplate) -> Result<TemplateInfo, ApiError> {
        let found = self.templates.find(&resolved.reference.to_string());
        found.map_err(|e| match e {
            TemplateRefusal::Unknown(name) => missing(&name, LIST_HINT),
            e => ApiError::internal(e.to_string()),
        })
    }

    /// Error for an unknown template. The message differs if the template exists without this tag.
    fn no_template(&self, caller: &Caller, id: &str) -> ApiError {
        let name = id.split_once(':').map(|(name, _)| name);
        match name.map(|name| (name, self.resolve(caller, name))) {
            Some((name, Ok(Some(_)))) => {
                let why = format!(
                    ": template `{}` has neither this tag nor a tagged build with this id",
                    short(name)
                );
                missing(id, &why)
            }
            _ => missing(id, LIST_HINT),
        }
    }
}

/// Returns the sandbox if its state is visible to the caller, or an error that names the remedy if
/// the sandbox is broken. `None` if the sandbox does not exist for the caller.
fn if_visible(
    record: Sandbox,
    caller: &Caller,
    required: Liveness,
) -> Option<Result<Sandbox, ApiError>> {
    match &record.state() {
        _ if caller.is_owner() => Some(Ok(record)),
        SandboxState::Running | SandboxState::Paused => Some(Ok(record)),
        SandboxState::Broken { .. } if required == Liveness::IncludingBroken => Some(Ok(record)),
        state if required == Liveness::Resumable && state.is_broken_and_resumable() => {
            Some(Ok(record))
        }
        SandboxState::Broken { cause, .. } => {
            let id = caller.shown_id(record.id());
            let resume = if record.state().is_broken_and_resumable() {
                "resume it, "
            } else {
                ""
            };
            Some(Err(ApiError::not_found(
                "sandbox_broken",
                format!(
                    "sandbox {id} is broken ({cause}): {resume}roll it back to a snapshot, or delete it"
                ),
            )))
        }
        // Clients do not know the id of a sandbox in creation, and are not shown killed sandboxes.
        SandboxState::Creating | SandboxState::Killed => None,
    }
}

/// Hint in error messages: the commands and calls that list templates and snapshots.
const LIST_HINT: &str = "; `jiffy template ls` and `jiffy snapshots` list them, as do `GET /templates` \
    and `GET /snapshots`";

fn missing(id: &str, why: &str) -> ApiError {
    let message = format!("template or snapshot `{}` does not exist{why}", short(id));
    ApiError::not_found("template_not_found", message)
}

/// Returns the snapshot with this id, or the newest snapshot with this name. If `short_ids` is set,
/// `id` may also be an unambiguous prefix of an id.
fn find_snapshot(all: &[Snapshot], id: &str, short_ids: bool) -> Option<Snapshot> {
    let named = |s: &&Snapshot| s.name() == Some(id);
    let exact = all.iter().find(|s| s.id() == id);
    let found = exact.or_else(|| all.iter().rfind(named));
    let found = found.or_else(|| {
        // An ambiguous prefix matches nothing.
        let mut begins = all.iter().filter(|s| s.id().starts_with(id));
        let first = begins.next().filter(|_| short_ids && !id.is_empty());
        first.filter(|_| begins.next().is_none())
    });
    found.cloned()
}

/// Returns the scope of the caller's fetches. As in [`App::shows`], only the host's owner has all.
fn scope(caller: &Caller) -> FetchScope {
    if caller.is_owner() {
        FetchScope::All
    } else {
        FetchScope::Requested
    }
}

/// Returns `id` in a form that is safe for messages: shortened, without control characters.
pub(crate) fn short(id: &str) -> String {
    let clean = id.chars().take(MAX_NAME);
    clean
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}
