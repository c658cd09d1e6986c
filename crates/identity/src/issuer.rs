//! [`TokenIssuer`]: signs tokens and publishes the keys by which services verify them.

use crate::key_file::KeyFile;
use crate::signing_key::SigningKey;
use crate::{IdentityError, IssuerUrl};
use jiffy_engine_api::{Workload, new_id, now_ms};
use jiffy_secrets::HostKey;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use zeroize::Zeroizing;

/// Validity of a token in seconds. Each request receives a new token.
const TOKEN_LIFETIME_S: u64 = 300;
/// Age in seconds at which a key is replaced.
const ROTATION_S: u64 = 30 * 86_400;
/// Time in seconds for which a new key is published before it signs, and for which a replaced key
/// remains published. It exceeds the time for which verifiers store the keys.
const OVERLAP_S: u64 = 86_400;
/// Interval in seconds between attempts to replace a key after a failure.
const RETRY_S: u64 = 3600;
/// Owner in subjects of objects that belong to the owner of the host. It is not a valid key id.
const HOST_OWNER: &str = "host";
/// Tag of references without a tag.
const DEFAULT_TAG: &str = "default";

/// Issuer of the identity tokens of a host. All methods may block on the disk.
pub struct TokenIssuer {
    url: IssuerUrl,
    file: KeyFile,
    keys: Mutex<Keys>,
}

/// Keys in memory.
#[derive(Default)]
struct Keys {
    /// Keys, oldest first. Empty before the first use.
    list: Vec<SigningKey>,
    /// Earliest time of the next replacement, in seconds since 1970, after a failure.
    retry_s: u64,
}

impl fmt::Debug for TokenIssuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenIssuer({})", self.url)
    }
}

impl TokenIssuer {
    /// Creates the issuer `url` with the keys of the data directory `home`, which are read at the
    /// first use, and created if they do not exist.
    #[must_use]
    pub fn new(home: &Path, host_key: HostKey, url: IssuerUrl) -> Self {
        Self {
            url,
            file: KeyFile::new(home, host_key),
            keys: Mutex::default(),
        }
    }

    /// Returns a new token of a sandbox for `audience`.
    ///
    /// # Errors
    /// [`IdentityError`] if the keys cannot be used.
    pub fn token(
        &self,
        workload: &Workload,
        audience: &str,
    ) -> Result<Zeroizing<String>, IdentityError> {
        self.token_at(workload, audience, now_ms() / 1000)
    }

    /// Returns a token for a workload at the time `now_s` (seconds since 1970). The token is a JSON
    /// Web Token with the registered claims of RFC 7519, and the ids of sandbox, template and key.
    fn token_at(
        &self,
        workload: &Workload,
        audience: &str,
        now_s: u64,
    ) -> Result<Zeroizing<String>, IdentityError> {
        let mut claims = json!({
            "iss": self.url.as_str(),
            "sub": self.subject(workload)?,
            "aud": audience,
            "iat": now_s,
            "exp": now_s + TOKEN_LIFETIME_S,
            "jti": new_id()?,
            "sandbox": workload.sandbox,
            "template": workload.template,
        });
        if let Some(owner) = &workload.owner {
            claims["key"] = json!(owner);
        }
        self.with_keys(now_s, |keys| signing(keys, now_s)?.sign(&claims))?
    }

    /// Returns the subject of a sandbox's tokens: a SPIFFE ID with owner, template and sandbox.
    fn subject(&self, workload: &Workload) -> Result<String, IdentityError> {
        let template = &workload.template;
        let (template_owner, rest) = template.split_once('/').unwrap_or((HOST_OWNER, template));
        let (name, tag) = rest.split_once(':').unwrap_or((rest, DEFAULT_TAG));
        let owner = workload.owner.as_deref().unwrap_or(HOST_OWNER);
        let parts = [owner, template_owner, name, tag, workload.sandbox.as_str()];
        // The number of parts is fixed, so that patterns of verifiers cannot match other parts.
        let is_of_part = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        let is_part = |part: &&str| !part.is_empty() && part.bytes().all(is_of_part);
        if !parts.iter().all(is_part) {
            return Err(IdentityError::Subject(template.clone()));
        }
        let domain = self.url.host();
        Ok(format!(
            "spiffe://{domain}/owner/{owner}/template/{template_owner}/{name}/{tag}/sandbox/{}",
            workload.sandbox
        ))
    }

    /// Returns the description of the issuer (OpenID Connect Discovery 1.0, 3).
    #[must_use]
    pub fn discovery(&self) -> Value {
        let url = self.url.as_str();
        json!({
            "issuer": url,
            "jwks_uri": format!("{url}/.well-known/jwks.json"),
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["ES256"],
            "claims_supported": [
                "iss", "sub", "aud", "exp", "iat", "jti", "sandbox", "key", "template",
            ],
        })
    }

    /// Returns the public keys of the issuer (RFC 7517, 5).
    ///
    /// # Errors
    /// [`IdentityError`] if the keys cannot be used.
    pub fn public_keys(&self) -> Result<Value, IdentityError> {
        self.public_keys_at(now_ms() / 1000)
    }

    fn public_keys_at(&self, now_s: u64) -> Result<Value, IdentityError> {
        self.with_keys(now_s, |keys| {
            let keys: Vec<&Value> = keys.iter().map(|key| &key.public).collect();
            json!({ "keys": keys })
        })
    }

    /// Calls `work` with the keys, after keys that are due were replaced.
    fn with_keys<T>(
        &self,
        now_s: u64,
        work: impl FnOnce(&[SigningKey]) -> T,
    ) -> Result<T, IdentityError> {
        let mut keys = self.keys.lock();
        if keys.list.is_empty() {
            keys.list = self.file.read()?;
        }
        if keys.list.is_empty() {
            let first = vec![SigningKey::generate(self.file.host_key(), now_s)?];
            self.file.write(&first)?;
            keys.list = first;
        } else if now_s >= keys.retry_s
            && let Err(error) = self.replace_due(&mut keys.list, now_s)
        {
            // The present keys remain valid.
            tracing::warn!(%error, "cannot replace the key of identity tokens");
            keys.retry_s = now_s + RETRY_S;
        }
        Ok(work(&keys.list))
    }

    /// Adds a key if the newest is too old, and removes keys that have been replaced for the time
    /// of the overlap. The file is written before memory changes: a key that signs or is published
    /// must survive a restart.
    fn replace_due(&self, keys: &mut Vec<SigningKey>, now_s: u64) -> Result<(), IdentityError> {
        let newest = keys.last().map_or(0, |key| age(key, now_s));
        if newest >= ROTATION_S {
            keys.push(SigningKey::generate(self.file.host_key(), now_s)?);
            if let Err(e) = self.file.write(keys) {
                keys.pop();
                return Err(e);
            }
        }
        // A key signs from the age of one overlap on. After a second overlap, no verifier needs its
        // predecessors.
        let replaces_older = |key: &SigningKey| age(key, now_s) >= 2 * OVERLAP_S;
        if let Some(last) = keys.iter().rposition(replaces_older).filter(|at| *at > 0) {
            let removed: Vec<SigningKey> = keys.drain(..last).collect();
            if let Err(e) = self.file.write(keys) {
                keys.splice(..0, removed);
                return Err(e);
            }
        }
        Ok(())
    }
}

/// Returns the age of a key in seconds. It is 0 if the clock was set back.
fn age(key: &SigningKey, now_s: u64) -> u64 {
    now_s.saturating_sub(key.stored.created_s)
}

/// Returns the key that signs: the newest key that verifiers have had time to fetch, or the first
/// key of the host.
fn signing(keys: &[SigningKey], now_s: u64) -> Result<&SigningKey, IdentityError> {
    let is_known = |key: &&SigningKey| age(key, now_s) >= OVERLAP_S;
    let newest_known = keys.iter().rev().find(is_known);
    newest_known.or(keys.first()).ok_or(IdentityError::Key)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use jsonwebtoken::jwk::JwkSet;
    use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
    use std::os::unix::fs::PermissionsExt;

    const URL: &str = "https://Jiffy.example:8443/eu";
    const AUDIENCE: &str = "sts.example";
    const DAY: u64 = 86_400;

    fn issuer(home: &Path) -> TokenIssuer {
        let host_key = HostKey::open(home).unwrap();
        TokenIssuer::new(home, host_key, URL.parse().unwrap())
    }

    /// Returns a sandbox of `owner` and `template`.
    fn workload(owner: Option<&str>, template: &str) -> Workload {
        Workload {
            sandbox: "sandbox1".to_owned(),
            owner: owner.map(str::to_owned),
            template: template.to_owned(),
            tokens: Default::default(),
        }
    }

    /// Verifies a token as a service does, with the published keys only.
    fn verified(token: &str, keys: &Value) -> Result<Value, jsonwebtoken::errors::Error> {
        let keys: JwkSet = serde_json::from_value(keys.clone()).unwrap();
        let id = decode_header(token)?.kid.unwrap();
        let key = keys
            .find(&id)
            .ok_or(jsonwebtoken::errors::ErrorKind::InvalidToken)?;
        let mut rules = Validation::new(Algorithm::ES256);
        rules.set_audience(&[AUDIENCE]);
        rules.set_issuer(&[URL]);
        rules.validate_exp = false;
        decode::<Value>(token, &DecodingKey::from_jwk(key)?, &rules).map(|token| token.claims)
    }

    #[test]
    fn tokens_are_verified_with_the_published_keys() {
        let home = tempfile::tempdir().unwrap();
        let issuer = issuer(home.path());
        let of_key = workload(Some("key1"), "key1/tool:v2");
        let token = issuer.token_at(&of_key, AUDIENCE, 1000).unwrap();
        let keys = issuer.public_keys_at(1000).unwrap();
        let claims = verified(&token, &keys).unwrap();
        let expected = json!({
            "iss": URL, "aud": AUDIENCE, "iat": 1000, "exp": 1300, "jti": claims["jti"],
            "sub": "spiffe://jiffy.example/owner/key1/template/key1/tool/v2/sandbox/sandbox1",
            "sandbox": "sandbox1", "key": "key1", "template": "key1/tool:v2",
        });
        assert_eq!(claims, expected);
        let again = issuer.token_at(&of_key, AUDIENCE, 1000).unwrap();
        assert_ne!(verified(&again, &keys).unwrap()["jti"], claims["jti"]);
        let of_host = issuer
            .token_at(&workload(None, "base"), AUDIENCE, 1000)
            .unwrap();
        let claims = verified(&of_host, &keys).unwrap();
        let subject =
            "spiffe://jiffy.example/owner/host/template/host/base/default/sandbox/sandbox1";
        assert_eq!(claims["sub"], subject);
        assert_eq!(claims.get("key"), None);
        // Another audience, changed claims and other keys are rejected.
        let other = issuer.token_at(&of_key, "other.example", 1000).unwrap();
        verified(&other, &keys).unwrap_err();
        let mut parts: Vec<&str> = token.split('.').collect();
        parts[1] = of_host.split('.').nth(1).unwrap();
        verified(&parts.join("."), &keys).unwrap_err();
        let elsewhere = tempfile::tempdir().unwrap();
        let foreign = super::tests::issuer(elsewhere.path());
        verified(&token, &foreign.public_keys_at(1000).unwrap()).unwrap_err();
        // A reference that could change the form of a subject is an error.
        issuer
            .token_at(&workload(None, "a/b/c"), AUDIENCE, 1000)
            .unwrap_err();
    }

    #[test]
    fn keys_are_encrypted_private_and_outlive_the_daemon() {
        let home = tempfile::tempdir().unwrap();
        let first = issuer(home.path());
        assert!(!home.path().join("identity-keys").exists());
        let keys = first.public_keys_at(1000).unwrap();
        let file = home.path().join("identity-keys");
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let published = keys.to_string();
        assert!(!published.contains("\"d\""), "{published}");
        assert_eq!(issuer(home.path()).public_keys_at(1000).unwrap(), keys);
        // Keys of another host are an error: new keys would invalidate the trust of verifiers.
        std::fs::remove_file(home.path().join("secrets-key")).unwrap();
        let error = issuer(home.path()).public_keys_at(1000).unwrap_err();
        assert!(matches!(error, IdentityError::Damaged { .. }), "{error}");
    }

    #[test]
    fn a_new_key_is_published_before_it_signs_and_the_old_one_afterwards() {
        let home = tempfile::tempdir().unwrap();
        let issuer = issuer(home.path());
        let key_at = |day: u64| {
            let token = issuer
                .token_at(&workload(None, "base"), AUDIENCE, day * DAY)
                .unwrap();
            let keys = issuer.public_keys_at(day * DAY).unwrap();
            verified(&token, &keys).unwrap();
            let published = keys["keys"].as_array().unwrap().len();
            (decode_header(&token).unwrap().kid.unwrap(), published)
        };
        let (first, _) = key_at(0);
        assert_eq!(key_at(29), (first.clone(), 1));
        assert_eq!(key_at(30), (first.clone(), 2));
        let (second, published) = key_at(31);
        assert_ne!(second, first);
        assert_eq!(published, 2);
        assert_eq!(key_at(32), (second.clone(), 1));
        // A clock that was set back changes nothing.
        assert_eq!(key_at(1), (second.clone(), 1));
        // After a long time without use, the old key signs until verifiers can know the new one.
        assert_eq!(key_at(400), (second, 2));
        let restarted = super::tests::issuer(home.path());
        let keys = restarted.public_keys_at(400 * DAY).unwrap();
        assert_eq!(keys["keys"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_key_that_cannot_be_stored_does_not_sign() {
        let home = tempfile::tempdir().unwrap();
        let issuer = issuer(home.path());
        let keys = issuer.public_keys_at(0).unwrap();
        // A directory at the path of the new file makes every write fail, also for root.
        let blocker = home.path().join("identity-keys.new");
        std::fs::create_dir(&blocker).unwrap();
        assert_eq!(issuer.public_keys_at(30 * DAY).unwrap(), keys);
        std::fs::remove_dir(&blocker).unwrap();
        assert_eq!(issuer.public_keys_at(30 * DAY).unwrap(), keys);
        let later = issuer.public_keys_at(30 * DAY + RETRY_S).unwrap();
        assert_eq!(later["keys"].as_array().unwrap().len(), 2);
    }
}
