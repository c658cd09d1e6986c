//! Calls on snapshots, templates, builds, pools and functions of other members, and on snapshots of
//! volumes.
//!
//! A *member* is a host of the fleet. The *warm pool* of a template has guests that were started in
//! advance and wait for a create.
//!
//! No record names the members that have an object. A member that does not have it therefore sends
//! a *probe* (the question whether they have it) to all other members. It forwards the call to the
//! member with the best answer. A call fails with 404 only if all live members have answered the
//! probe.

use super::forward::{Forwarded, Purpose};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::Json;
use axum::extract::Request;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

/// Object that some members may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Object {
    /// Snapshot, by id or name.
    Snapshot(String),
    /// Template, by id or name, with or without a tag. Some calls accept a snapshot as well.
    Template(String),
    /// Build of a template.
    Build(String, String),
    /// Function of the caller, by name.
    Function(String),
    /// Warm pool of a template.
    Pool(String),
    /// Snapshot of a volume of the caller, by id.
    VolumeSnapshot(String),
}

/// Quality of the match between an object of a member and a call. A greater value is a better
/// match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Match {
    /// Precedence of the object that the text of the call denotes: objects of the caller precede
    /// shared objects with the same name.
    pub precedence: u8,
    /// The member manages the object. Other members may have copies.
    pub is_home: bool,
}

/// Precedence of a template that is shared with the caller.
const SHARED: u8 = 1;
/// Precedence of a snapshot in a call that accepts templates and snapshots.
const SNAPSHOT: u8 = 2;
/// Precedence of an object of the caller.
const OWN: u8 = 3;

/// Returns a decoded part of a path.
pub(super) fn decoded(part: &str) -> Option<String> {
    let text = percent_decode_str(part).decode_utf8().ok()?;
    Some(text.into_owned()).filter(|text| !text.is_empty())
}

impl Object {
    /// Returns the object in a path without its version. `None` if the path names no object.
    pub(super) fn in_path(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        match parts.as_slice() {
            ["snapshots", id, ..] => decoded(id).map(Self::Snapshot),
            ["templates", "tags" | "prune" | "uploads"] => None,
            ["templates", "aliases", alias] => decoded(alias).map(Self::Template),
            ["templates", id, "builds", build, ..] => {
                Some(Self::Build(decoded(id)?, decoded(build)?))
            }
            ["templates", id, ..] => decoded(id).map(Self::Template),
            ["functions", name, ..] => decoded(name).map(Self::Function),
            ["pools", id] => decoded(id).map(Self::Pool),
            ["volumesnapshots", id] => decoded(id).map(Self::VolumeSnapshot),
            _ => None,
        }
    }

    /// Returns method and URI of the probe for the object.
    pub(super) fn probe(&self) -> Result<(Method, Uri), ApiError> {
        let part = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let (method, path) = match self {
            Self::Snapshot(id) => (Method::GET, format!("/snapshots/{}", part(id))),
            Self::Template(id) => (Method::GET, format!("/templates/{}", part(id))),
            Self::Build(id, build) => {
                let path = format!("/templates/{}/builds/{}/status", part(id), part(build));
                (Method::GET, path)
            }
            Self::Function(name) => (Method::GET, format!("/functions/{}", part(name))),
            Self::Pool(id) => (Method::PUT, format!("/pools/{}", part(id))),
            Self::VolumeSnapshot(id) => (Method::DELETE, format!("/volumesnapshots/{}", part(id))),
        };
        let uri = path.parse();
        Ok((
            method,
            uri.map_err(|_| ApiError::invalid("the path is invalid"))?,
        ))
    }

    /// Returns whether no other member can have a better match.
    pub(super) fn is_decided(&self, found: Match) -> bool {
        match self {
            Self::Template(_) | Self::Pool(_) => found.is_home && found.precedence == OWN,
            _ => true,
        }
    }
}

/// Returns the match of an object that only its home has.
pub(super) fn own() -> Match {
    Match {
        precedence: OWN,
        is_home: true,
    }
}

/// Returns `None` for an object that does not exist.
fn existing<T>(found: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.status == StatusCode::NOT_FOUND => Ok(None),
        // This host has no functions or no builder.
        Err(error) if error.status == StatusCode::NOT_IMPLEMENTED => Ok(None),
        Err(error) => Err(error),
    }
}

impl App {
    /// Returns the match of an object of this host. `None` if this host does not have it, or the
    /// caller may not see it.
    pub(super) fn object_match(
        &self,
        caller: &Caller,
        object: &Object,
    ) -> Result<Option<Match>, ApiError> {
        match object {
            Object::Snapshot(id) => Ok(existing(self.snapshot(caller, id))?.map(|_| own())),
            Object::Template(id) => self.template_match(caller, id),
            Object::Build(id, build) => {
                let Some(builder) = &self.builder else {
                    return Ok(None);
                };
                let build = builder.owned_build(id, build, caller.owner_scope());
                match existing(build.map_err(ApiError::from))? {
                    Some(_) => Ok(Some(own())),
                    // The builder of this host has no record of the template. Such a template has
                    // one build, which is ready.
                    None => Ok(existing(self.template(caller, id))?.map(|_| Match {
                        precedence: SHARED,
                        is_home: false,
                    })),
                }
            }
            Object::Function(name) => Ok(existing(self.function(caller, name))?.map(|_| own())),
            Object::VolumeSnapshot(id) => {
                Ok(existing(self.volume_snapshot(caller, id))?.map(|_| own()))
            }
            Object::Pool(id) => {
                let Some(info) = existing(self.template(caller, id))? else {
                    return Ok(None);
                };
                let name = info.reference();
                let sizes = self.sandboxes.pool().sizes();
                let is_home = sizes
                    .iter()
                    .any(|pool| pool.template == name && pool.wanted > 0);
                Ok(Some(Match {
                    precedence: OWN,
                    is_home,
                }))
            }
        }
    }

    /// Returns how well a template on this host matches an id or name. An own template precedes a
    /// snapshot, and a snapshot precedes a shared template. `None` if this host has none.
    fn template_match(&self, caller: &Caller, id: &str) -> Result<Option<Match>, ApiError> {
        if let Some(builder) = &self.builder
            && let Ok(_) = builder.owned_template(id, caller.owner_scope())
        {
            return Ok(Some(own()));
        }
        let template = existing(self.template(caller, id))?;
        if let Some(info) = &template
            && caller.owns_template(info)
        {
            return Ok(Some(Match {
                precedence: OWN,
                is_home: false,
            }));
        }
        if existing(self.snapshot(caller, id))?.is_some() {
            return Ok(Some(Match {
                precedence: SNAPSHOT,
                is_home: true,
            }));
        }
        let Some(info) = template else {
            return Ok(None);
        };
        let record = match &self.builder {
            Some(builder) => builder.template_named(info.owner.as_deref(), &info.name)?,
            None => None,
        };
        Ok(Some(Match {
            precedence: SHARED,
            is_home: record.is_some(),
        }))
    }

    /// Answers a probe of another member.
    pub(super) fn answer_probe(
        &self,
        caller: &Caller,
        object: &Object,
    ) -> Result<Response, ApiError> {
        Ok(Json(self.object_match(caller, object)?).into_response())
    }
}

/// Returns whether another member has sent a call as a probe.
pub(super) fn is_probe(request: &Request) -> bool {
    let forwarded = request.extensions().get::<Forwarded>();
    forwarded.is_some_and(|Forwarded(purpose)| *purpose == Purpose::Probe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_recognised_in_paths_and_in_their_probes() {
        let text = |text: &str| text.to_owned();
        for (path, expected) in [
            ("/snapshots/s1", Some(Object::Snapshot(text("s1")))),
            (
                "/snapshots/a%2Fb/verify",
                Some(Object::Snapshot(text("a/b"))),
            ),
            (
                "/templates/aliases/web",
                Some(Object::Template(text("web"))),
            ),
            (
                "/templates/k%2Fweb%3Av1/tags",
                Some(Object::Template(text("k/web:v1"))),
            ),
            (
                "/templates/t/builds/b/logs",
                Some(Object::Build(text("t"), text("b"))),
            ),
            ("/functions/f/invoke/a/b", Some(Object::Function(text("f")))),
            ("/pools/base", Some(Object::Pool(text("base")))),
            (
                "/volumesnapshots/v",
                Some(Object::VolumeSnapshot(text("v"))),
            ),
            ("/volumesnapshots", None),
            ("/templates/tags", None),
            ("/templates/prune", None),
            ("/templates", None),
            ("/snapshots/", None),
            ("/functions/%ff", None),
            ("/keys/k", None),
        ] {
            let found = Object::in_path(path);
            assert_eq!(found, expected, "{path}");
            if let Some(object) = found {
                let (_, uri) = object.probe().unwrap();
                assert_eq!(Object::in_path(uri.path()), Some(object), "{uri}");
            }
        }
    }
}
