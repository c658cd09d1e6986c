//! Volumes in a fleet: each has one home, the member (host) that has its files. Other members
//! forward calls on a volume to its home, and sandboxes that mount it run there.
//!
//! The *coordinator* is the member that selects the hosts of new sandboxes. The *table* of the
//! volumes is in the memory of each member, so that all members list all volumes, and know the home
//! of a volume after its loss.

use super::forward::{BufferedCall, Forwarded};
use super::lost::cause_of;
use super::route::buffer;
use super::volume_table::{HomedVolume, VolumeTable};
use super::{Fleet, host_lost};
use crate::app::App;
use crate::audit::AuditedCaller;
use crate::caller::{Caller, ClientAddress, check_key, key_of_request};
use crate::error::{ApiError, HOST_LOST};
use crate::lookup::short;
use crate::routes::VOLUME_TOKEN_PREFIX;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_api_types::{EventType, NewVolumeMount};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::MemberState;
use jiffy_proto::internal::InternalOrigin;
use jiffy_sandbox_manager::{MountedVolume, Sandbox};
use jiffy_volumes::{ID_PREFIX, Volume};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use std::collections::HashSet;
use std::sync::Arc;

/// Volumes of a fleet, as one member uses them.
#[derive(Clone)]
pub(super) struct FleetVolumes {
    pub table: Arc<dyn VolumeTable>,
    /// Ids of volumes of this member that are in the table, but whose files are not complete.
    pub creating: Arc<Mutex<HashSet<String>>>,
}

/// Volume of this member that is being created. Its row in the table is not removed as abandoned
/// before this value is dropped.
pub(crate) struct NewRow {
    id: String,
    volumes: FleetVolumes,
}

impl Drop for NewRow {
    fn drop(&mut self) {
        self.volumes.creating.lock().remove(&self.id);
    }
}

impl NewRow {
    /// Removes the row, because the volume was not created. If this fails, the row is removed later
    /// by [`super::volume_rows`].
    pub async fn discard(self) {
        if let Err(error) = self.volumes.table.remove(vec![self.id.clone()]).await {
            tracing::warn!(volume = self.id, %error, "cannot remove the row of a volume");
        }
    }
}

/// Field of a body that selects the home of a new volume.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SelectedHome {
    host: Option<String>,
}

impl Fleet {
    /// Adds the table of the volumes of all members. Without it, members have no volumes.
    pub fn set_volumes(&mut self, table: Arc<dyn VolumeTable>) {
        self.volumes = Some(FleetVolumes {
            table,
            creating: Arc::default(),
        });
    }

    /// Returns a volume of an owner on any member. `which` is an id or a name.
    pub(crate) fn volume(&self, owner: &str, which: &str) -> Option<HomedVolume> {
        let table = &self.volumes.as_ref()?.table;
        if which.starts_with(ID_PREFIX) {
            return table.by_id(which).filter(|one| one.volume.owner == owner);
        }
        let mut all = table.all().into_iter();
        all.find(|one| one.volume.owner == owner && one.volume.name == which)
    }

    /// Returns a volume of an owner whose home is this member.
    pub(crate) fn own_volume(&self, owner: &str, which: &str) -> Option<Volume> {
        let found = self.volume(owner, which)?;
        (found.home == self.node.id()).then_some(found.volume)
    }

    /// Returns the volumes of an owner on all members, in the order of their names.
    pub(crate) fn volumes_of(&self, owner: &str) -> Vec<HomedVolume> {
        let all = self.volumes.as_ref().map(|volumes| volumes.table.all());
        let mut own = all.unwrap_or_default();
        own.retain(|one| one.volume.owner == owner);
        own.sort_by(|a, b| a.volume.name.cmp(&b.volume.name));
        own
    }

    /// Executes a call on a volume on its home.
    pub(super) async fn on_volume(
        &self,
        app: &App,
        caller: &Caller,
        which: &str,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let owner = caller.owner_id().unwrap_or_default();
        match self.volume(&owner, which) {
            Some(found) if found.home != self.node.id() => {
                let path = request.uri().path().trim_matches('/');
                let is_removal =
                    request.method() == Method::DELETE && path.matches('/').count() == 1;
                if is_removal && self.has_left(found.home) {
                    return self.remove_abandoned(app, &found).await;
                }
                self.send_to_home(&found, Some(caller), request).await
            }
            // The handler of this member reports that the volume does not exist.
            _ => Ok(next.run(request).await),
        }
    }

    /// Creates a volume on the selected member, which becomes its home. By default, this is the
    /// member that receives the call, unless it is being drained.
    pub(super) async fn new_volume(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let (call, request) = buffer(caller, request).await?;
        // The handler rejects malformed bodies.
        let selected: SelectedHome = crate::body::parse_part(&call.body).unwrap_or_default();
        let Some(host) = selected.host.filter(|host| !host.is_empty()) else {
            if self.is_draining()
                && let Some(sent) = self.resume_elsewhere(&call).await
            {
                return sent;
            }
            return Ok(next.run(request).await);
        };
        self.on_host(&host, caller, request, next).await
    }

    /// Sends a call on a volume, or on its content, to the home of the volume.
    async fn send_to_home(
        &self,
        found: &HomedVolume,
        caller: Option<&Caller>,
        request: Request,
    ) -> Result<Response, ApiError> {
        let row = self.node.members().row(found.home).cloned();
        let row = row.filter(|row| row.state.is_live());
        let row = row.ok_or_else(|| self.volume_lost(found))?;
        let sent = self.send_request(row.id, &row.address, caller, request);
        sent.await.map_err(|error| {
            if self.is_lost(row.id) {
                self.volume_lost(found)
            } else {
                host_lost(row.id, &error.reason)
            }
        })
    }

    /// Returns whether a member is dead or was removed from the fleet.
    fn is_lost(&self, member: MemberId) -> bool {
        let members = self.node.members();
        members.row(member).is_none_or(|row| !row.state.is_live())
    }

    /// Returns whether a member was removed from the fleet: its data directory is never used again.
    fn has_left(&self, member: MemberId) -> bool {
        let members = self.node.members();
        let row = members.row(member);
        row.is_some_and(|row| row.state == MemberState::Left)
    }

    /// Returns the error of a call on a volume whose home is lost.
    fn volume_lost(&self, found: &HomedVolume) -> ApiError {
        let (name, home) = (&found.volume.name, found.home);
        let message = if self.has_left(home) {
            format!(
                "the files of volume `{name}` were on host {home}, which was removed from the fleet: \
                 remove the volume, and restore its last snapshot if it has one"
            )
        } else {
            let since_ms = self
                .node
                .members()
                .row(home)
                .and_then(|row| row.dead_since_ms);
            format!(
                "the files of volume `{name}` are on host {home}: {}; the volume is available again \
                 when the host returns",
                cause_of(home, since_ms)
            )
        };
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_LOST, message).after(10)
    }

    /// Removes a volume whose home was removed from the fleet, with its files.
    async fn remove_abandoned(&self, app: &App, found: &HomedVolume) -> Result<Response, ApiError> {
        let volume = &found.volume;
        self.remove_volumes(vec![volume.id.clone()]).await?;
        let owner = Some(volume.owner.clone()).filter(|owner| !owner.is_empty());
        app.report_object(EventType::VolumeDeleted, owner, &volume.name);
        Ok(StatusCode::NO_CONTENT.into_response())
    }

    /// Returns the member that has all volumes of a new sandbox. `None` if the sandbox has none, or
    /// one does not exist: the handler of the create reports this.
    ///
    /// # Errors
    /// Fails if the volumes are on several members, or their home is lost.
    pub(super) fn home_of_volumes(
        &self,
        caller: &Caller,
        mounts: Option<&[NewVolumeMount]>,
    ) -> Result<Option<MemberId>, ApiError> {
        let owner = caller.owner_id().unwrap_or_default();
        let mut first: Option<HomedVolume> = None;
        for mount in mounts.unwrap_or_default() {
            let Some(found) = self.volume(&owner, &mount.name) else {
                continue;
            };
            if self.is_lost(found.home) {
                return Err(self.volume_lost(&found));
            }
            match &first {
                Some(other) if other.home != found.home => {
                    return Err(ApiError::invalid(format!(
                        "`volumeMounts`: volume `{}` is on host {}, but volume `{}` on host {}: a \
                         sandbox mounts volumes of one host only",
                        other.volume.name, other.home, found.volume.name, found.home
                    )));
                }
                Some(_) => {}
                None => first = Some(found),
            }
        }
        Ok(first.map(|found| found.home))
    }

    /// Checks whether another host has the template or snapshot that `home`, the host of the
    /// volumes of a new sandbox, lacks.
    ///
    /// # Errors
    /// Explains this if another host has it.
    pub(super) async fn explain_missing_template(
        &self,
        call: &BufferedCall,
        home: MemberId,
        (template, is_here): (&str, bool),
    ) -> Result<(), ApiError> {
        if !is_here && self.places_of_origin(call, template).await?.is_empty() {
            return Ok(());
        }
        Err(ApiError::host_busy(format!(
            "no host can run the sandbox: its volumes are on host {home} only, which has no template \
             or snapshot `{}`, and does not find it in the store",
            short(template)
        )))
    }

    /// Returns the id of a volume that a new sandbox of this member mounts. `None` if the fleet
    /// does not have it.
    ///
    /// # Errors
    /// Fails if the volume is on another member.
    pub(crate) fn volume_here(&self, owner: &str, which: &str) -> Result<Option<String>, ApiError> {
        let Some(found) = self.volume(owner, which) else {
            return Ok(None);
        };
        if found.home != self.node.id() {
            return Err(elsewhere(&found.volume.name, found.home));
        }
        Ok(Some(found.volume.id))
    }

    /// Checks that this member has the volumes of a sandbox that it is about to resume.
    ///
    /// # Errors
    /// Fails if another member has one of them.
    pub(crate) fn check_volumes(&self, record: &Sandbox) -> Result<(), ApiError> {
        for mounted in &record.settings().volumes {
            self.check_volume(record, mounted)?;
        }
        Ok(())
    }

    fn check_volume(&self, record: &Sandbox, mounted: &MountedVolume) -> Result<(), ApiError> {
        let table = self.volumes.as_ref().map(|volumes| &volumes.table);
        let found = table.and_then(|table| table.by_id(&mounted.volume));
        let Some(found) = found.filter(|found| found.home != self.node.id()) else {
            // The mount reports a volume that does not exist.
            return Ok(());
        };
        let mut error = if self.is_lost(found.home) {
            self.volume_lost(&found)
        } else {
            elsewhere(&found.volume.name, found.home)
        };
        error.message = format!("cannot resume sandbox {}: {}", record.id(), error.message);
        Err(error)
    }

    /// Adds a new volume of this member to the table, before its files are created.
    pub(crate) async fn add_volume(&self, new: &Volume) -> Result<Option<NewRow>, ApiError> {
        let Some(volumes) = self.volumes.clone() else {
            return Ok(None);
        };
        volumes.creating.lock().insert(new.id.clone());
        let row = NewRow {
            id: new.id.clone(),
            volumes: volumes.clone(),
        };
        let added = HomedVolume {
            volume: new.clone(),
            home: self.node.id(),
        };
        volumes.table.add(added).await?;
        Ok(Some(row))
    }

    /// Removes volumes of this member from the table, after their files were removed.
    pub(crate) async fn remove_volumes(&self, ids: Vec<String>) -> Result<(), ApiError> {
        match &self.volumes {
            Some(volumes) if !ids.is_empty() => Ok(volumes.table.remove(ids).await?),
            _ => Ok(()),
        }
    }

    /// Executes a call on the content of a volume on its home, which checks key or token.
    async fn on_content(
        &self,
        app: &App,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let which = request.uri().path().split('/').nth(2).unwrap_or_default();
        let which = percent_decode_str(which).decode_utf8_lossy().into_owned();
        let extensions = request.extensions();
        let audited = extensions.get::<AuditedCaller>().cloned();
        let key = key_of_request(request.headers());
        let found = if key.is_some_and(|key| key.starts_with(VOLUME_TOKEN_PREFIX)) {
            let found = self.volumes.as_ref().and_then(|v| v.table.by_id(&which));
            found.map(|found| (found, None))
        } else {
            let caller = match extensions.get::<Caller>() {
                Some(caller) => caller.clone(),
                // Sandboxes and functions have no keys for volumes: the handler rejects the call.
                None if extensions.get::<InternalOrigin>().is_some() => {
                    return Ok(next.run(request).await);
                }
                None => {
                    let address = extensions.get::<ClientAddress>().map(|a| a.0);
                    Caller::Key(check_key(app, key, address)?)
                }
            };
            let found = self.volume(&caller.owner_id().unwrap_or_default(), &which);
            found.map(|found| (found, Some(caller)))
        };
        let Some((found, caller)) = found.filter(|(found, _)| found.home != self.node.id()) else {
            return Ok(next.run(request).await);
        };
        if let (Some(audited), Some(caller)) = (&audited, &caller) {
            audited.set(caller);
        }
        let response = self.send_to_home(&found, caller.as_ref(), request).await?;
        // Only the home can verify a token.
        if let (Some(audited), None) = (&audited, &caller)
            && response.status() != StatusCode::UNAUTHORIZED
        {
            let owner = Some(found.volume.owner).filter(|owner| !owner.is_empty());
            audited.set_token(owner);
        }
        Ok(response)
    }
}

/// Returns the error of a sandbox that another member must run, because it has the volume.
fn elsewhere(name: &str, home: MemberId) -> ApiError {
    ApiError::host_busy(format!(
        "volume `{name}` is on host {home}, and sandboxes that mount it run there only"
    ))
}

/// Forwards calls on the content of volumes to the homes of the volumes.
pub(crate) async fn route_content(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let is_forwarded = request.extensions().get::<Forwarded>().is_some();
    match app.fleet.clone().filter(|_| !is_forwarded) {
        Some(fleet) => {
            let routed = fleet.on_content(&app, request, next).await;
            routed.unwrap_or_else(IntoResponse::into_response)
        }
        None => next.run(request).await,
    }
}
