//! Sandbox keys: credentials that a deployment grants to a function, so that the function can use
//! sandboxes.

use jiffy_engine_api::{IdentityError, new_token};
use jiffy_proto::internal::{API_HOST, InternalOrigin};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Prefix of secrets. They have the form of API keys, because E2B's client libraries accept no
/// other form, and values of this form are removed from the headers of forwarded requests.
const SECRET_PREFIX: &str = "e2b_";
/// Environment variables with the sandbox key. Client libraries read the API key from them.
const KEY_VARIABLES: [&str; 2] = ["E2B_API_KEY", "JIFFY_API_KEY"];
/// Environment variables with the address of the API.
const URL_VARIABLES: [&str; 3] = ["E2B_API_URL", "E2B_SANDBOX_URL", "JIFFY_URL"];
/// Environment variable with the secret by which a sandbox invokes the function.
const CALLBACK_KEY_VARIABLE: &str = "JIFFY_CALLBACK_KEY";
/// Environment variable with the address at which a sandbox invokes the function.
const CALLBACK_URL_VARIABLE: &str = "JIFFY_CALLBACK_URL";

/// Rights of a function over the sandboxes of an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxKeyScope {
    /// Lists and inspects sandboxes, without changing them.
    Read,
    /// Creates, uses and removes sandboxes.
    Create,
}

impl SandboxKeyScope {
    /// Returns the name of the scope.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Create => "create",
        }
    }
}

/// Sandbox key of one function. It is valid only on connections of this function, and only while
/// the function's record contains it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxKey {
    /// Id of the API key that owns the sandboxes.
    pub key: String,
    /// True if that API key was created for the function and is removed with it.
    pub is_own: bool,
    /// Rights over the sandboxes.
    pub scope: SandboxKeyScope,
    /// Secret that the function presents.
    pub secret: String,
    /// Secret that a sandbox presents to invoke the function. It grants no other access.
    pub callback: String,
}

/// Omits the secrets.
impl fmt::Debug for SandboxKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxKey")
            .field("key", &self.key)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

impl SandboxKey {
    /// Creates a key with new secrets. `is_own` states whether the key was created for the
    /// function.
    pub fn new(key: String, is_own: bool, scope: SandboxKeyScope) -> Result<Self, IdentityError> {
        let secret = || Ok::<_, IdentityError>(format!("{SECRET_PREFIX}{}", new_token()?));
        Ok(Self {
            key,
            is_own,
            scope,
            secret: secret()?,
            callback: secret()?,
        })
    }

    /// Returns the environment variables for the function `name`.
    pub(crate) fn env(&self, name: &str) -> BTreeMap<String, String> {
        let url = format!("http://{API_HOST}");
        let callback = format!("{url}/functions/{name}/invoke/");
        let keys = KEY_VARIABLES.map(|variable| (variable, self.secret.clone()));
        let urls = URL_VARIABLES.map(|variable| (variable, url.clone()));
        let callbacks = [
            (CALLBACK_KEY_VARIABLE, self.callback.clone()),
            (CALLBACK_URL_VARIABLE, callback),
        ];
        let all = keys.into_iter().chain(urls).chain(callbacks);
        all.map(|(variable, value)| (variable.to_owned(), value))
            .collect()
    }

    /// Returns the origin of connections of the function `name` of `owner`.
    pub(crate) fn origin(&self, owner: Option<&str>, name: &str) -> InternalOrigin {
        InternalOrigin::Function {
            key: self.key.clone(),
            owner: owner.map(str::to_owned),
            name: name.to_owned(),
            reaches_ports: self.scope == SandboxKeyScope::Create,
        }
    }
}

/// Returns whether a sandbox key sets this environment variable.
pub(crate) fn is_set_by_key(variable: &str) -> bool {
    KEY_VARIABLES.contains(&variable)
        || URL_VARIABLES.contains(&variable)
        || [CALLBACK_KEY_VARIABLE, CALLBACK_URL_VARIABLE].contains(&variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_in_the_environment_and_not_in_debug_output() {
        let key = SandboxKey::new("k1".to_owned(), false, SandboxKeyScope::Create).unwrap();
        let env = key.env("agent");
        assert_eq!(env["E2B_API_KEY"], key.secret);
        assert_eq!(env["JIFFY_CALLBACK_KEY"], key.callback);
        assert_eq!(
            env["JIFFY_CALLBACK_URL"],
            "http://api.jiffy.internal/functions/agent/invoke/"
        );
        assert!(env.keys().all(|variable| is_set_by_key(variable)));
        let shown = format!("{key:?}");
        assert!(
            !shown.contains(&key.secret) && !shown.contains(&key.callback),
            "{shown}"
        );
        let another = SandboxKey::new("k1".to_owned(), false, SandboxKeyScope::Create).unwrap();
        assert!(key.secret != another.secret && key.secret != key.callback);
    }
}
