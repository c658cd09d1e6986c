//! [`ProxyCredentials`]: user name and password for a proxy, and their encrypted form.

use data_encoding::BASE64URL_NOPAD;
use jiffy_secrets::{HostKey, SecretError};
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

/// Maximum length of a user name and of a password in bytes (RFC 1929).
pub const MAX_CREDENTIAL: usize = 255;

/// User name and password for a proxy.
#[derive(Serialize, Deserialize)]
pub struct ProxyCredentials {
    /// User name, 1 to 255 bytes.
    pub username: String,
    /// Password, 1 to 255 bytes.
    pub password: String,
}

impl Drop for ProxyCredentials {
    fn drop(&mut self) {
        self.username.zeroize();
        self.password.zeroize();
    }
}

impl std::fmt::Debug for ProxyCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProxyCredentials")
    }
}

/// Returns the context of the encryption. Credentials of one owner cannot be used by another one.
fn context(owner: &str) -> String {
    format!("egress-proxy {owner}")
}

impl ProxyCredentials {
    /// Encrypts the credentials for the record of a sandbox of `owner`.
    ///
    /// # Errors
    /// [`SecretError`] if the host has no entropy.
    pub fn seal(&self, key: &HostKey, owner: &str) -> Result<String, SecretError> {
        let context = context(owner);
        let plain = serde_json::to_vec(self).map_err(|_| SecretError::Sealed(context.clone()))?;
        let plain = zeroize::Zeroizing::new(plain);
        Ok(BASE64URL_NOPAD.encode(&key.seal(&context, &plain)?))
    }

    /// Decrypts the output of [`Self::seal`]. `None` if it was changed, or was encrypted by another
    /// host or for another owner.
    #[must_use]
    pub fn open(key: &HostKey, owner: &str, sealed: &str) -> Option<Self> {
        let sealed = BASE64URL_NOPAD.decode(sealed.as_bytes()).ok()?;
        let plain = key.open_sealed(&context(owner), &sealed)?;
        serde_json::from_slice(&plain).ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn credentials_are_readable_by_their_host_for_their_owner_only() {
        let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (key, other) = [&home, &other]
            .map(|dir| HostKey::open(dir.path()).unwrap())
            .into();
        let credentials = ProxyCredentials {
            username: "user".to_owned(),
            password: "pass word".to_owned(),
        };
        let sealed = credentials.seal(&key, "a").unwrap();
        assert!(
            !sealed.contains("user") && !sealed.contains("pass"),
            "{sealed}"
        );
        let opened = ProxyCredentials::open(&key, "a", &sealed).unwrap();
        assert_eq!(
            (&*opened.username, &*opened.password),
            ("user", "pass word")
        );
        assert!(ProxyCredentials::open(&key, "b", &sealed).is_none());
        assert!(ProxyCredentials::open(&other, "a", &sealed).is_none());
        assert!(ProxyCredentials::open(&key, "a", "!").is_none());
        assert_eq!(format!("{credentials:?}"), "ProxyCredentials");
    }
}
