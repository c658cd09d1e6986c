//! Kinds of calls: which part of a fleet a call is about.
//!
//! A *member* is a host of the fleet.

use super::lists::Listed;
use super::objects::{Object, decoded};
use crate::query::Query;
use axum::extract::Request;
use axum::http::Method;
use percent_encoding::percent_decode_str;

/// Kind of a call.
pub(super) enum Call {
    /// On the sandbox with this id, name or prefix.
    Sandbox(String),
    /// List of sandboxes.
    List,
    /// Usage of several sandboxes.
    Metrics,
    /// Creation of a sandbox.
    Create,
    /// On an object of some members.
    Object(Object),
    /// On the template that the body names.
    NamedTemplate,
    /// List of objects.
    Objects(Listed),
    /// Comparison of several sandboxes or snapshots.
    Compared(Vec<String>),
    /// Lineage of a sandbox or snapshot.
    Lineage,
    /// Creation of a volume.
    NewVolume,
    /// On the volume with this id or name.
    Volume(String),
    /// Limits and usage of a key.
    Limits,
    /// Events, entries of the audit log, or usage. The handlers of these calls request the data of
    /// all members and merge them.
    Events,
    /// All other calls, which this host answers itself.
    Local,
}

impl Call {
    /// Classifies a request.
    pub fn of_request(request: &Request) -> Self {
        match request.uri().path() {
            // These calls name their object in the query.
            "/lineage" => Self::Lineage,
            "/compare" => Self::of_comparison(request.uri().query().unwrap_or_default()),
            path => Self::of(request.method(), path),
        }
    }

    /// Returns the objects of a call of `/compare`.
    fn of_comparison(query: &str) -> Self {
        let Ok(query) = Query::parse(query) else {
            return Self::Local;
        };
        let ids = ["a", "b"].into_iter().filter_map(|name| query.get(name));
        Self::Compared(ids.map(str::to_owned).collect())
    }

    /// Classifies a call by its method and path.
    fn of(method: &Method, path: &str) -> Self {
        let version = ["/v2/", "/v3/"].into_iter().find(|v| path.starts_with(v));
        let path = path
            .get(version.map_or(0, |v| v.len() - 1)..)
            .unwrap_or(path);
        match (method.as_str(), path) {
            ("POST", "/templates") | ("POST" | "DELETE", "/templates/tags") => {
                return Self::NamedTemplate;
            }
            ("POST", "/volumes") => return Self::NewVolume,
            ("GET", path) if let Some(listed) = Listed::at(path) => return Self::Objects(listed),
            _ => {}
        }
        if let Some(object) = Object::in_path(path) {
            return Self::Object(object);
        }
        let mut parts = path.trim_start_matches('/').split('/');
        match (method.as_str(), parts.next()) {
            (_, Some("sandboxes")) => {}
            (_, Some("volumes")) => {
                let which = parts.next().and_then(decoded);
                return which.map_or(Self::Local, Self::Volume);
            }
            ("GET", Some("limits")) => return Self::Limits,
            ("GET", Some("events" | "audit" | "usage")) => return Self::Events,
            _ => return Self::Local,
        }
        match (method.as_str(), parts.next()) {
            ("GET", None) => Self::List,
            ("POST", None) => Self::Create,
            ("GET", Some("metrics")) => Self::Metrics,
            (_, Some(id)) if !id.is_empty() => {
                let decoded = percent_decode_str(id).decode_utf8();
                decoded.map_or(Self::Local, |id| Self::Sandbox(id.into_owned()))
            }
            _ => Self::Local,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_on_sandboxes_and_objects_are_recognised_in_all_versions() {
        let kind = |call: Call| match call {
            Call::Sandbox(id) => id,
            Call::List => "list".to_owned(),
            Call::Metrics => "metrics".to_owned(),
            Call::Create => "create".to_owned(),
            Call::Lineage => "lineage".to_owned(),
            Call::Limits => "limits".to_owned(),
            Call::Events => "events".to_owned(),
            Call::Local => "local".to_owned(),
            Call::Object(object) => format!("{object:?}"),
            Call::NamedTemplate => "template".to_owned(),
            Call::Objects(listed) => format!("{listed:?}"),
            Call::Compared(ids) => ids.join(" "),
            Call::NewVolume => "new volume".to_owned(),
            Call::Volume(which) => format!("volume {which}"),
        };
        for (method, path, expected) in [
            (Method::GET, "/sandboxes", "list"),
            (Method::GET, "/v2/sandboxes", "list"),
            (Method::POST, "/v2/sandboxes", "create"),
            (Method::GET, "/sandboxes/metrics", "metrics"),
            (Method::GET, "/sandboxes/abc", "abc"),
            (Method::GET, "/v2/sandboxes/abc/logs", "abc"),
            (Method::DELETE, "/sandboxes/a%2Db", "a-b"),
            (Method::GET, "/templates", "Templates"),
            (Method::POST, "/v3/templates", "template"),
            (Method::DELETE, "/templates/tags", "template"),
            (Method::POST, "/templates/prune", "local"),
            (Method::GET, "/pools", "Pools"),
            (Method::PATCH, "/v2/templates/web", "Template(\"web\")"),
            (Method::PUT, "/templates/web/alias", "Template(\"web\")"),
            (Method::GET, "/v2", "local"),
            (Method::GET, "/sandboxes/", "local"),
            (Method::POST, "/volumes", "new volume"),
            // All members know all volumes.
            (Method::GET, "/volumes", "local"),
            (Method::DELETE, "/volumes/data", "volume data"),
            (Method::POST, "/volumes/vol%2Da/snapshots", "volume vol-a"),
            (Method::GET, "/volumesnapshots", "VolumeSnapshots"),
            (
                Method::DELETE,
                "/volumesnapshots/s",
                "VolumeSnapshot(\"s\")",
            ),
            (Method::GET, "/limits", "limits"),
            (Method::GET, "/events", "events"),
            (Method::GET, "/events/sandboxes/abc", "events"),
            (Method::GET, "/fleet", "local"),
            (Method::GET, "/sandboxes/%ff", "local"),
        ] {
            assert_eq!(kind(Call::of(&method, path)), expected, "{path}");
        }
        assert_eq!(kind(Call::of_comparison("a=x&b=y&path=/a")), "x y");
    }
}
