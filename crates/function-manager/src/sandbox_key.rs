//! Access of a function to sandboxes, handed in with its deployment.

use jiffy_engine_api::{IdentityError, new_token};
use jiffy_proto::internal::{API_HOST, InternalOrigin};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Secrets have the shape of API keys: clients of other makes insist on it, and values of this
/// shape are taken out of what is passed on.
const SECRET_PREFIX: &str = "e2b_";
/// Environment variables of a function with a key, by which clients find key and control plane.
const KEY_VARIABLES: [&str; 2] = ["E2B_API_KEY", "JIFFY_API_KEY"];
const URL_VARIABLES: [&str; 3] = ["E2B_API_URL", "E2B_SANDBOX_URL", "JIFFY_URL"];
/// Secret and address by which a sandbox calls the function.
const CALLBACK_KEY_VARIABLE: &str = "JIFFY_CALLBACK_KEY";
const CALLBACK_URL_VARIABLE: &str = "JIFFY_CALLBACK_URL";

/// Rights of a function over the sandboxes of an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxKeyScope {
    /// Looks at them, and changes nothing.
    Read,
    /// Makes them, uses them and ends them.
    Create,
}

impl SandboxKeyScope {
    /// One word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Create => "create",
        }
    }
}

/// Key of one function for sandboxes. It is good for connections of this function only, and for as
/// long as the record that holds it says so.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxKey {
    /// Id of the API key whose sandboxes they are.
    pub key: String,
    /// True if that key was made for the function, and ends with it.
    pub is_own: bool,
    /// Rights over them.
    pub scope: SandboxKeyScope,
    /// Secret that the function shows.
    pub secret: String,
    /// Secret that a sandbox shows: it invokes the function, and is good for nothing else.
    pub callback: String,
}

/// Secrets are left out.
impl fmt::Debug for SandboxKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxKey")
            .field("key", &self.key)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

impl SandboxKey {
    /// Makes a key with new secrets.
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

    /// Environment variables of the function `name`.
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

    /// Connections of the function `name` of `owner`.
    pub(crate) fn origin(&self, owner: Option<&str>, name: &str) -> InternalOrigin {
        InternalOrigin::Function {
            key: self.key.clone(),
            owner: owner.map(str::to_owned),
            name: name.to_owned(),
            reaches_ports: self.scope == SandboxKeyScope::Create,
        }
    }
}

/// Returns true for an environment variable that a function with a key is given.
pub(crate) fn is_given(variable: &str) -> bool {
    KEY_VARIABLES.contains(&variable)
        || URL_VARIABLES.contains(&variable)
        || [CALLBACK_KEY_VARIABLE, CALLBACK_URL_VARIABLE].contains(&variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_the_functions_environment_and_in_no_output() {
        let key = SandboxKey::new("k1".to_owned(), false, SandboxKeyScope::Create).unwrap();
        let env = key.env("agent");
        assert_eq!(env["E2B_API_KEY"], key.secret);
        assert_eq!(env["JIFFY_CALLBACK_KEY"], key.callback);
        assert_eq!(
            env["JIFFY_CALLBACK_URL"],
            "http://api.jiffy.internal/functions/agent/invoke/"
        );
        assert!(env.keys().all(|variable| is_given(variable)));
        let shown = format!("{key:?}");
        assert!(
            !shown.contains(&key.secret) && !shown.contains(&key.callback),
            "{shown}"
        );
        let another = SandboxKey::new("k1".to_owned(), false, SandboxKeyScope::Create).unwrap();
        assert!(key.secret != another.secret && key.secret != key.callback);
    }
}
