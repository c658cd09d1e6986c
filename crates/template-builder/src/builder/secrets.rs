//! Secrets of a build, which exist only in memory.

use jiffy_api_types::MAX_BUILD_SECRETS;
use std::collections::BTreeMap;
use std::fmt;

/// Maximum size of all secrets of one build in bytes.
pub const MAX_SECRETS_BYTES: usize = 512 << 10;
/// Minimum length of a line of a secret that logs hide. Shorter lines occur in ordinary text.
const MIN_HIDDEN_BYTES: usize = 6;

/// Secrets of a build by id. They are neither stored nor logged.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BuildSecrets(BTreeMap<String, Vec<u8>>);

impl fmt::Debug for BuildSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl BuildSecrets {
    /// Creates the secrets of a build. The error is a message for the client.
    pub fn new(secrets: impl IntoIterator<Item = (String, Vec<u8>)>) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        let mut bytes = 0;
        for (id, value) in secrets {
            bytes += value.len();
            if id.is_empty() || id.len() > 256 || id.contains(char::is_control) {
                return Err("the id of a build secret must have 1 to 256 characters".to_owned());
            }
            if all.insert(id.clone(), value).is_some() {
                return Err(format!("the build secret `{id}` is given twice"));
            }
            if all.len() > MAX_BUILD_SECRETS || bytes > MAX_SECRETS_BYTES {
                return Err(format!(
                    "too many build secrets: at most {MAX_BUILD_SECRETS} with {MAX_SECRETS_BYTES} bytes"
                ));
            }
        }
        Ok(Self(all))
    }

    /// Returns the value of a secret.
    pub(super) fn get(&self, id: &str) -> Option<&[u8]> {
        self.0.get(id).map(Vec::as_slice)
    }

    /// Replaces the lines of secrets in a line of output.
    pub(super) fn hide(&self, line: String) -> String {
        let mut line = line;
        for value in self.0.values() {
            let text = String::from_utf8_lossy(value);
            for secret in text.lines().map(str::trim) {
                if secret.len() >= MIN_HIDDEN_BYTES && line.contains(secret) {
                    line = line.replace(secret, "***");
                }
            }
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(pairs: &[(&str, &str)]) -> Result<BuildSecrets, String> {
        BuildSecrets::new(
            pairs
                .iter()
                .map(|(id, v)| ((*id).to_owned(), v.as_bytes().to_vec())),
        )
    }

    #[test]
    fn secrets_are_hidden_in_output_and_in_debug_output() {
        let given = secrets(&[("a", "token-1\nsecond line\n"), ("short", "x")]).unwrap();
        assert_eq!(given.hide("x token-1!".to_owned()), "x ***!");
        assert_eq!(given.hide("the second line".to_owned()), "the ***");
        assert!(!format!("{given:?}").contains("token"));
    }

    #[test]
    fn secrets_are_bounded() {
        assert!(secrets(&[("", "x")]).is_err());
        assert!(secrets(&[("a", "x"), ("a", "y")]).is_err());
        assert!(secrets(&[("a", &"x".repeat(MAX_SECRETS_BYTES + 1))]).is_err());
    }
}
