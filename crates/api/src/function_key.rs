//! Sandbox keys: authentication of functions, and of sandboxes that call back.
//!
//! A function can be deployed with a sandbox key, which has two secrets. With the first secret, the
//! function acts as the API key that deployed it, but only on that key's sandboxes. With the second
//! secret, the callback secret, a sandbox of that key may invoke the function and make no other
//! call. Both secrets are valid only on connections from inside the host. On these connections, no
//! other key is valid.

use crate::app::App;
use crate::caller::{Caller, key_of_request, unauthenticated};
use crate::error::ApiError;
use crate::keys::{Key, Scope, hash};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use jiffy_engine_api::IdentityError;
use jiffy_function_manager::{FunctionRecord, SandboxKey, SandboxKeyScope};
use jiffy_proto::internal::InternalOrigin;
use std::sync::Arc;

/// Paths that a function may call, including the paths below them.
const SANDBOX_PATHS: [&str; 3] = ["/sandboxes", "/v2/sandboxes", "/snapshots"];
/// Returns whether `path` is a path that a function may read: the list of templates, a template,
/// its tags, or an alias. The files and builds below a template are excluded, because a request for
/// files creates a permission to upload them.
fn reads_templates(path: &str) -> bool {
    // The path begins with a slash, so that its first part is empty.
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match parts.as_slice() {
        ["templates"] | ["templates", "aliases", _] => true,
        // `uploads` is not an id but the start of the path of uploads.
        ["templates", id] => *id != "uploads",
        ["templates", id, "tags"] => *id != "uploads",
        _ => false,
    }
}

/// Caller that authenticates with a sandbox key: a function, or a sandbox that calls back.
#[derive(Debug)]
pub struct FunctionCaller {
    /// API key on whose behalf the caller acts, restricted to the scope of the sandbox key.
    pub(crate) key: Arc<Key>,
    /// API key that owns the function. `None` if the host's owner owns it.
    pub(crate) owner: Option<String>,
    /// Name of the function.
    pub(crate) name: String,
    /// True if the caller is a sandbox, which may only invoke the function.
    pub(crate) is_callback: bool,
}

impl FunctionCaller {
    /// Rejects calls that a function's key does not permit.
    pub(crate) fn check_call(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        // A path that merely starts with the same letters is not below the root.
        let is_below = |root: &str| {
            let rest = path.strip_prefix(root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let is_allowed = if self.is_callback {
            invoked(path) == Some(&self.name)
        } else {
            SANDBOX_PATHS.into_iter().any(is_below)
                || (reads_templates(path) && *method == Method::GET)
        };
        if is_allowed {
            Ok(())
        } else {
            Err(ApiError::forbidden(if self.is_callback {
                "this key may only invoke its function"
            } else {
                "the key of a function may only manage sandboxes and snapshots, and read templates"
            }))
        }
    }
}

/// Returns the name of the function that a path invokes. The name is not decoded, so an encoded
/// name matches no function.
fn invoked(path: &str) -> Option<&str> {
    let (name, rest) = path.strip_prefix("/functions/")?.split_once('/')?;
    (rest == "invoke" || rest.starts_with("invoke/")).then_some(name)
}

impl App {
    /// Authenticates a request from inside the host.
    pub(crate) fn internal_caller(
        &self,
        origin: &InternalOrigin,
        request: &Request,
    ) -> Result<Caller, ApiError> {
        let shown = key_of_request(request.headers()).ok_or_else(unauthenticated)?;
        let functions = self.functions()?;
        let is_of = |record: &Arc<FunctionRecord>, key: &str| {
            let granted = record.sandbox_key.as_ref();
            granted.is_some_and(|granted| granted.key == key)
        };
        let (record, key, is_callback) = match origin {
            // A function presents the first secret of its own sandbox key.
            InternalOrigin::Function {
                key, owner, name, ..
            } => {
                let found = functions.find(owner.as_deref(), name).ok();
                (found.filter(|record| is_of(record, key)), key, false)
            }
            InternalOrigin::Sandbox { key } => {
                // The function belongs to the key, or to the host's owner and acts for the key.
                let name = invoked(request.uri().path()).unwrap_or_default();
                // A function of the key takes precedence over a function of the host's owner.
                let owners = [Some(key.as_str()), None].into_iter();
                let mut found = owners.filter_map(|owner| functions.find(owner, name).ok());
                (found.find(|record| is_of(record, key)), key, true)
            }
        };
        let unknown = || {
            let message = "this key does not belong to the function, or was replaced or revoked";
            ApiError::new(StatusCode::UNAUTHORIZED, "unauthenticated", message)
        };
        let record = record.ok_or_else(unknown)?;
        let granted = record.sandbox_key.as_ref().ok_or_else(unknown)?;
        let secret = if is_callback {
            &granted.callback
        } else {
            &granted.secret
        };
        // Compare hashes: the duration of the comparison reveals nothing about the secret itself.
        if hash(shown) != hash(secret) {
            return Err(unknown());
        }
        // The secrets of a sandbox key are valid only as long as the API key.
        let found = self.keys.in_force(key);
        let found = found.map_err(|e| ApiError::internal(e.to_string()))?;
        let found = found.filter(|key| !key.is_expired()).ok_or_else(unknown)?;
        let scope = match (is_callback, granted.scope) {
            // A callback needs the scope to invoke; `check_call` restricts it to the function.
            (true, _) | (false, SandboxKeyScope::Create) => Scope::Create,
            (false, SandboxKeyScope::Read) => Scope::Read,
        };
        Ok(Caller::Function(Arc::new(FunctionCaller {
            // The scope of the sandbox key replaces the scope of the API key, which may be wider.
            key: Arc::new(Key { scope, ..found }),
            owner: record.owner.clone(),
            name: record.name.clone(),
            is_callback,
        })))
    }

    /// Returns the sandbox key of a function that `caller` deploys. Reuses the previous key if its
    /// settings are the same, unless `renew` is set. If the host's owner deploys, this also creates
    /// the API key that owns the function's sandboxes, unless the previous API key is in force.
    pub(crate) fn sandbox_key(
        &self,
        caller: &Caller,
        name: &str,
        scope: SandboxKeyScope,
        renew: bool,
    ) -> Result<SandboxKey, ApiError> {
        let former = self.functions()?.find(caller.owner_scope(), name).ok();
        let former = former.and_then(|record| record.sandbox_key.clone());
        let failed = |e: IdentityError| ApiError::internal(e.to_string());
        let key_failed = |e: crate::keys::KeyError| ApiError::internal(e.to_string());
        let (key, is_own) = match caller.key() {
            Some(key) => (key.id.clone(), false),
            // The host's owner has no key: the function's sandboxes belong to a key created for
            // them.
            None => {
                let own = former.as_ref().filter(|former| former.is_own);
                let known = own.map(|own| self.keys.in_force(&own.key));
                match known.transpose().map_err(key_failed)?.flatten() {
                    Some(key) => (key.id, true),
                    None => {
                        let label = format!("function {name}");
                        let limits = crate::keys::Limits::default();
                        // The secret of this key is discarded: the key only owns the function's
                        // sandboxes.
                        let created = self.keys.create(&label, Scope::Create, limits);
                        (created.map_err(key_failed)?.key.id, true)
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

    /// Revokes the API key that was created for a function's sandbox key `ended`, unless `used`
    /// still refers to it.
    pub(crate) fn revoke_unused_sandbox_key(
        &self,
        ended: Option<&SandboxKey>,
        used: Option<&SandboxKey>,
    ) {
        let ended = ended.filter(|ended| ended.is_own);
        let is_used = |ended: &&SandboxKey| used.is_some_and(|used| used.key == ended.key);
        if let Some(ended) = ended.filter(|ended| !is_used(ended))
            && let Err(e) = self.keys.revoke(&ended.key)
        {
            // Only log the error: the function's record has no sandbox key or another one, so the
            // secrets of `ended` are already rejected.
            tracing::warn!(key = ended.key, error = %e, "cannot revoke an unused key of a function");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Limits;

    /// Returns a function that calls with its key, or with its callback secret.
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
        // Not permitted. The link that a request for `files` returns permits replacing the files of
        // a build.
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
