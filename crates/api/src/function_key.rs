//! Keys of functions for sandboxes: callers that come from inside the host.
//!
//! A function that was deployed with such a key calls as the API key that it was deployed with, for
//! that key's sandboxes only. A sandbox of that key calls the function, and nothing else. Neither
//! secret is good for any other connection, nor is any other key for one from inside.

use crate::app::App;
use crate::caller::{Caller, shown_key, unauthenticated};
use crate::error::ApiError;
use crate::keys::{Key, Scope, hash};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use jiffy_engine_api::IdentityError;
use jiffy_function_manager::{FunctionRecord, SandboxKey, SandboxKeyScope};
use jiffy_proto::internal::InternalOrigin;
use std::sync::Arc;

/// Paths of calls that a function may make, each with what is below it.
const SANDBOX_PATHS: [&str; 3] = ["/sandboxes", "/v2/sandboxes", "/snapshots"];
/// Paths that it may read: the list of templates, one of them, its tags, and names. Not the files
/// and the builds below a template: a request for files creates a permission to upload them.
fn reads_templates(path: &str) -> bool {
    // The path begins with a slash, so that its first part is empty.
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match parts.as_slice() {
        ["templates"] | ["templates", "aliases", _] => true,
        ["templates", id] => *id != "uploads",
        ["templates", id, "tags"] => *id != "uploads",
        _ => false,
    }
}

/// Holder of a function's key.
#[derive(Debug)]
pub struct FunctionCaller {
    /// Key as which it calls, with the scope that the function was given.
    pub(crate) key: Arc<Key>,
    /// API key that the function belongs to; none: the host's owner.
    pub(crate) owner: Option<String>,
    /// Name of the function.
    pub(crate) name: String,
    /// True for a sandbox, which may invoke the function and do nothing else.
    pub(crate) is_callback: bool,
}

impl FunctionCaller {
    /// Refuses calls that a function's key is not for.
    pub(crate) fn check_call(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        let is_below = |root: &str| {
            let rest = path.strip_prefix(root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let is_allowed = match self.is_callback {
            true => invoked(path) == Some(&self.name),
            false => {
                SANDBOX_PATHS.into_iter().any(is_below)
                    || (reads_templates(path) && *method == Method::GET)
            }
        };
        match is_allowed {
            true => Ok(()),
            false => Err(ApiError::forbidden(match self.is_callback {
                true => "this key invokes its function, and nothing else",
                false => {
                    "a function's key is for sandboxes and their snapshots, and reads templates"
                }
            })),
        }
    }
}

/// Function that a path invokes, as it is written.
fn invoked(path: &str) -> Option<&str> {
    let (name, rest) = path.strip_prefix("/functions/")?.split_once('/')?;
    (rest == "invoke" || rest.starts_with("invoke/")).then_some(name)
}

impl App {
    /// Holder of the key that a request from inside shows.
    pub(crate) fn internal_caller(
        &self,
        origin: &InternalOrigin,
        request: &Request,
    ) -> Result<Caller, ApiError> {
        let shown = shown_key(request.headers()).ok_or_else(unauthenticated)?;
        let functions = self.functions()?;
        let is_of = |record: &Arc<FunctionRecord>, key: &str| {
            let found = record.sandbox_key.as_ref();
            found.is_some_and(|found| found.key == key)
        };
        let (record, key, is_callback) = match origin {
            InternalOrigin::Function {
                key, owner, name, ..
            } => {
                let found = functions.find(owner.as_deref(), name).ok();
                (found.filter(|record| is_of(record, key)), key, false)
            }
            InternalOrigin::Sandbox { key } => {
                // The key's own function of that name, or one of the host's that acts for it.
                let name = invoked(request.uri().path()).unwrap_or_default();
                let owners = [Some(key.as_str()), None].into_iter();
                let mut found = owners.filter_map(|owner| functions.find(owner, name).ok());
                (found.find(|record| is_of(record, key)), key, true)
            }
        };
        let unknown = || {
            let message = "this key is not one of this function, or it was replaced or revoked";
            ApiError::new(StatusCode::UNAUTHORIZED, "unauthenticated", message)
        };
        let record = record.ok_or_else(unknown)?;
        let granted = record.sandbox_key.as_ref().ok_or_else(unknown)?;
        let secret = match is_callback {
            true => &granted.callback,
            false => &granted.secret,
        };
        // By hashes, so that how long it takes tells nothing about the secret.
        if hash(shown) != hash(secret) {
            return Err(unknown());
        }
        let found = self.keys.in_force(key);
        let found = found.map_err(|e| ApiError::internal(e.to_string()))?;
        let found = found.filter(|key| !key.is_expired()).ok_or_else(unknown)?;
        let scope = match (is_callback, granted.scope) {
            (true, _) | (false, SandboxKeyScope::Create) => Scope::Create,
            (false, SandboxKeyScope::Read) => Scope::Read,
        };
        Ok(Caller::Function(Arc::new(FunctionCaller {
            key: Arc::new(Key { scope, ..found }),
            owner: record.owner.clone(),
            name: record.name.clone(),
            is_callback,
        })))
    }

    /// Key for sandboxes of a function that `caller` deploys: the former one, if it says the same
    /// and is not to be renewed.
    pub(crate) fn sandbox_key(
        &self,
        caller: &Caller,
        name: &str,
        scope: SandboxKeyScope,
        renew: bool,
    ) -> Result<SandboxKey, ApiError> {
        let former = self.functions()?.find(caller.bounds(), name).ok();
        let former = former.and_then(|record| record.sandbox_key.clone());
        let failed = |e: IdentityError| ApiError::internal(e.to_string());
        let key_failed = |e: crate::keys::KeyError| ApiError::internal(e.to_string());
        let (key, is_own) = match caller.key() {
            Some(key) => (key.id.clone(), false),
            // The host's owner has no key: the function's sandboxes belong to one of their own.
            None => {
                let own = former.as_ref().filter(|former| former.is_own);
                let known = own.map(|own| self.keys.in_force(&own.key));
                match known.transpose().map_err(key_failed)?.flatten() {
                    Some(key) => (key.id, true),
                    None => {
                        let label = format!("function {name}");
                        let limits = crate::keys::Limits::default();
                        // Its secret is known to none.
                        let made = self.keys.create(&label, Scope::Create, limits);
                        (made.map_err(key_failed)?.key.id, true)
                    }
                }
            }
        };
        let is_same = |former: &SandboxKey| former.key == key && former.scope == scope && !renew;
        match former.filter(is_same) {
            Some(former) => Ok(former),
            None => SandboxKey::new(key, is_own, scope).map_err(failed),
        }
    }

    /// Revokes the key that was made for a function, unless it is still in use.
    pub(crate) fn end_sandbox_key(&self, ended: Option<&SandboxKey>, used: Option<&SandboxKey>) {
        let ended = ended.filter(|ended| ended.is_own);
        let is_used = |ended: &&SandboxKey| used.is_some_and(|used| used.key == ended.key);
        if let Some(ended) = ended.filter(|ended| !is_used(ended))
            && let Err(e) = self.keys.revoke(&ended.key)
        {
            // Its secrets are gone with the function's record.
            tracing::warn!("the key of a function is not revoked: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Limits;

    fn caller(is_callback: bool) -> FunctionCaller {
        FunctionCaller {
            key: Arc::new(Key {
                id: "k".to_owned(),
                name: "k".to_owned(),
                scope: Scope::Create,
                limits: Limits::default(),
                created_ms: 0,
                used_ms: None,
                revoked_ms: None,
                expires_ms: None,
                addresses: Vec::new(),
                end_ms: None,
            }),
            owner: Some("k".to_owned()),
            name: "agent".to_owned(),
            is_callback,
        }
    }

    #[test]
    fn a_functions_key_is_for_sandboxes_only() {
        let may = |method, path| caller(false).check_call(&method, path).is_ok();
        for path in [
            "/sandboxes",
            "/v2/sandboxes",
            "/sandboxes/i1/pause",
            "/snapshots",
        ] {
            assert!(may(Method::POST, path), "{path}");
        }
        for path in [
            "/templates",
            "/templates/base",
            "/templates/base/tags",
            "/templates/aliases/base",
        ] {
            assert!(may(Method::GET, path), "{path}");
        }
        // A link to upload files is a permission to replace those of a build.
        for path in [
            "/templates/t/files/ab",
            "/templates/t/builds/b/status",
            "/templates/t/builds/b/logs",
            "/templates//files/ab",
            "/templates/aliases/a/files",
            "/templates/uploads",
            "//templates",
            "/metrics",
            "/host",
        ] {
            assert!(!may(Method::GET, path), "{path}");
        }
        for path in [
            "/templates",
            "/sandboxesx",
            "/v3/templates",
            "/functions",
            "/functions/agent",
            "/functions/agent/invoke/",
            "/keys/k/revoke",
            "/host/stop",
            "/prune",
            "/pools/base",
            "//sandboxes",
            "/",
        ] {
            assert!(!may(Method::POST, path), "{path}");
        }
    }

    #[test]
    fn a_callback_invokes_its_function_only() {
        let may = |path| caller(true).check_call(&Method::POST, path).is_ok();
        assert!(may("/functions/agent/invoke") && may("/functions/agent/invoke/a/b"));
        for path in [
            "/functions/agent",
            "/functions/agent/logs",
            "/functions/agent/invokex",
            "/functions/other/invoke/",
            "/functions/%61gent/invoke/",
            "/functions//agent/invoke/",
            "/functions/agent/../other/invoke/",
            "/sandboxes",
        ] {
            assert!(!may(path), "{path}");
        }
    }
}
