//! Requirements of a create on its host: labels (`hostLabels`), and the members that may run the
//! sandbox (`distributionScope`).
//!
//! A *member* is a host of the fleet.

use super::{Fleet, unavailable};
use crate::error::ApiError;
use jiffy_api_types::{MAX_SCOPE, MAX_SCOPE_ENTRY, NewSandbox};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::{HostLabel, MAX_LABELS, MemberRow};

/// Checks the form of the requirements.
pub(crate) fn check(body: &NewSandbox) -> Result<(), ApiError> {
    let labels = body.host_labels.iter().flatten();
    if labels.clone().count() > MAX_LABELS {
        let message = format!("`hostLabels` has more than {MAX_LABELS} labels");
        return Err(ApiError::invalid(message));
    }
    let mut checked = labels.map(|(name, value)| HostLabel::new(name, value));
    let checked = checked.try_for_each(|label| label.map(drop));
    checked.map_err(|e| ApiError::invalid(format!("`hostLabels`: {e}")))?;
    let scope = body.distribution_scope.as_deref().unwrap_or_default();
    let is_valid = |entry: &String| (1..=MAX_SCOPE_ENTRY).contains(&entry.len());
    if scope.len() > MAX_SCOPE || !scope.iter().all(is_valid) {
        return Err(ApiError::invalid(format!(
            "`distributionScope` must have at most {MAX_SCOPE} hosts of 1 to {MAX_SCOPE_ENTRY} bytes"
        )));
    }
    Ok(())
}

/// Members that may run a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Scope {
    All,
    /// At least one member.
    Only(Vec<MemberId>),
}

impl Scope {
    /// Returns whether a member may run the sandbox.
    pub fn contains(&self, member: MemberId) -> bool {
        match self {
            Self::All => true,
            Self::Only(members) => members.contains(&member),
        }
    }

    /// Checks that the member with the volumes of the sandbox may run it.
    ///
    /// # Errors
    /// Fails if the volumes are on another member.
    pub fn expect_volumes(&self, volume_host: Option<MemberId>) -> Result<(), ApiError> {
        match volume_host.filter(|host| !self.contains(*host)) {
            Some(host) => Err(ApiError::host_busy(format!(
                "no host of `distributionScope` can run the sandbox: its volumes are on {host} only"
            ))),
            None => Ok(()),
        }
    }

    /// Restricts `allowed`, the members to which a create is restricted for other reasons. An empty
    /// list allows all members.
    ///
    /// # Errors
    /// Fails if no member remains.
    pub fn restrict(&self, allowed: &mut Vec<MemberId>) -> Result<(), ApiError> {
        let Self::Only(members) = self else {
            return Ok(());
        };
        if allowed.is_empty() {
            allowed.clone_from(members);
            return Ok(());
        }
        let before: Vec<_> = allowed.iter().map(ToString::to_string).collect();
        allowed.retain(|member| members.contains(member));
        if allowed.is_empty() {
            return Err(ApiError::host_busy(format!(
                "no host of `distributionScope` can run the sandbox: its template, snapshot or \
                 private network is on {} only",
                before.join(", ")
            )));
        }
        Ok(())
    }
}

impl Fleet {
    /// Returns the members that `names` denotes by id (such as `h2`) or by the host of their
    /// address. All members if `names` is empty.
    ///
    /// # Errors
    /// Fails if no member has one of the names: the sandbox must not run elsewhere.
    pub(super) fn scope(&self, names: Option<&[String]>) -> Result<Scope, ApiError> {
        let names = names.unwrap_or_default();
        if names.is_empty() {
            return Ok(Scope::All);
        }
        let members = self.node.members();
        let is_named = |row: &&MemberRow| {
            let id = row.id.to_string();
            let host = row.address.rsplit_once(':').map(|(host, _)| host);
            names
                .iter()
                .any(|name| *name == id || *name == row.address || Some(&**name) == host)
        };
        let named: Vec<_> = members
            .rows
            .iter()
            .filter(is_named)
            .map(|row| row.id)
            .collect();
        if named.is_empty() {
            return Err(ApiError::invalid(format!(
                "`distributionScope` names no host of the fleet: use ids or addresses that \
                 `jiffy fleet nodes` prints, not {}",
                names.join(", ")
            )));
        }
        Ok(Scope::Only(named))
    }

    /// Checks that this host meets the requirements of a create, if no coordinator is available.
    /// `volume_host` is the host of its volumes.
    pub(super) fn check_own(
        &self,
        labels: &[HostLabel],
        scope: &Scope,
        volume_host: Option<MemberId>,
    ) -> Result<(), ApiError> {
        if let Some(host) = volume_host.filter(|host| *host != self.node.id()) {
            return Err(unavailable(format!(
                "no coordinator is available, and the volumes of the sandbox are on host {host}: retry"
            )));
        }
        let members = self.node.members();
        let own = members.row(self.node.id());
        let has = |label: &&HostLabel| own.is_some_and(|row| row.capacity.labels.contains(label));
        if let Some(HostLabel { name, value }) = labels.iter().find(|label| !has(label)) {
            return Err(unavailable(format!(
                "no coordinator is available, and this host does not have the label {name}={value}: \
                 retry"
            )));
        }
        if !scope.contains(self.node.id()) {
            return Err(unavailable(
                "no coordinator is available, and this host is not in `distributionScope`: retry",
            ));
        }
        Ok(())
    }
}
