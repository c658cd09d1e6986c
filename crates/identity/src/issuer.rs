//! [`TokenIssuer`]: signs tokens and publishes the keys by which services verify them.

use crate::key_file::KeyFile;
use crate::signing_key::{SigningKey, StoredKey};
use crate::{IdentityError, IssuerUrl, SharedIdentityKeys};
use jiffy_engine_api::{Workload, new_id, now_ms};
use jiffy_secrets::HostKey;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
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
/// Pause between attempts to read the first keys, which another host creates at the same time.
const FIRST_KEYS_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of these attempts.
const FIRST_KEYS_ATTEMPTS: u32 = 30;
/// Owner in subjects of objects that belong to the owner of the host. It is not a valid key id.
const HOST_OWNER: &str = "host";
/// Tag of references without a tag.
const DEFAULT_TAG: &str = "default";

/// Issuer of the identity tokens of a host or of a fleet. All methods may block on the disk, or on
/// the other hosts.
pub struct TokenIssuer {
    url: IssuerUrl,
    host_key: HostKey,
    /// Keys of this host. In a fleet, keys from the time before this host became a member.
    file: KeyFile,
    /// Keys of a fleet. `None` for one host.
    shared: Option<Arc<dyn SharedIdentityKeys>>,
    keys: Mutex<Keys>,
}

/// Keys in memory.
#[derive(Default)]
struct Keys {
    /// Keys, oldest first. Empty before the first use.
    list: Vec<SigningKey>,
    /// Version of the keys of a fleet.
    version: u64,
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
            file: KeyFile::new(home, host_key.clone()),
            host_key,
            shared: None,
            keys: Mutex::default(),
        }
    }

    /// Creates the issuer `url` with the keys of a fleet. `host_key` is a key of the fleet. If the
    /// fleet has no keys at the first use, the keys of the data directory `home` become its keys.
    #[must_use]
    pub fn of_fleet(
        home: &Path,
        host_key: HostKey,
        url: IssuerUrl,
        shared: Arc<dyn SharedIdentityKeys>,
    ) -> Self {
        Self {
            shared: Some(shared),
            ..Self::new(home, host_key, url)
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
        if let Some(shared) = &self.shared {
            shared.check_contact()?;
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

    /// Replaces the keys of a fleet that are due. The hosts of a fleet call this periodically, so
    /// that no request waits for the replacement. On one host, requests replace the keys.
    ///
    /// # Errors
    /// [`IdentityError`] if the keys cannot be changed. The present keys remain valid.
    pub fn replace_due_keys(&self) -> Result<(), IdentityError> {
        self.replace_due_keys_at(now_ms() / 1000)
    }

    fn replace_due_keys_at(&self, now_s: u64) -> Result<(), IdentityError> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let (version, stored) = shared.read()?;
        let keys = self.open_shared(stored)?;
        if keys.is_empty() {
            return Ok(());
        }
        if let Some(next) = self.successors(&keys, now_s)? {
            // If another host has replaced the keys, they are current.
            shared.replace(version + 1, next)?;
        }
        Ok(())
    }

    /// Calls `work` with the keys. Creates the first key. On one host, replaces keys that are due.
    fn with_keys<T>(
        &self,
        now_s: u64,
        work: impl FnOnce(&[SigningKey]) -> T,
    ) -> Result<T, IdentityError> {
        let mut keys = self.keys.lock();
        if let Some(shared) = &self.shared {
            self.update_shared(shared.as_ref(), &mut keys, now_s)?;
            return Ok(work(&keys.list));
        }
        if keys.list.is_empty() {
            keys.list = self.file.read()?;
        }
        if keys.list.is_empty() {
            let first = vec![SigningKey::generate(&self.host_key, now_s)?];
            self.file.write(&stored(&first))?;
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

    /// Reads the keys of a fleet if they have changed. Creates the first keys: the keys that this
    /// host had before it became a member, or a new one.
    fn update_shared(
        &self,
        shared: &dyn SharedIdentityKeys,
        keys: &mut Keys,
        now_s: u64,
    ) -> Result<(), IdentityError> {
        for _ in 0..FIRST_KEYS_ATTEMPTS {
            let (version, list) = shared.read()?;
            if version > 0 {
                if keys.version != version {
                    keys.list = self.open_shared(list)?;
                    keys.version = version;
                }
                return Ok(());
            }
            let own = self.file.read()?.into_iter();
            let own: Result<Vec<_>, _> = own.map(|key| key.seal_again(&self.host_key)).collect();
            let mut first = own?;
            if first.is_empty() {
                first.push(SigningKey::generate(&self.host_key, now_s)?);
            }
            if !shared.replace(1, stored(&first))? {
                std::thread::sleep(FIRST_KEYS_PAUSE);
            }
        }
        Err(IdentityError::Shared {
            reason: "another host creates the keys of identity tokens: retry later".to_owned(),
            is_temporary: true,
        })
    }

    fn open_shared(&self, stored: Vec<StoredKey>) -> Result<Vec<SigningKey>, IdentityError> {
        let open = |key| {
            SigningKey::open(&self.host_key, key).ok_or_else(|| IdentityError::Shared {
                reason: "the keys of identity tokens in the tables of the fleet cannot be \
                         decrypted: restore the records of the fleet from a backup"
                    .to_owned(),
                is_temporary: false,
            })
        };
        stored.into_iter().map(open).collect()
    }

    /// Replaces the keys of this host that are due. The file is written before memory changes: a
    /// key that signs or is published must survive a restart.
    fn replace_due(&self, keys: &mut Vec<SigningKey>, now_s: u64) -> Result<(), IdentityError> {
        let Some(next) = self.successors(keys, now_s)? else {
            return Ok(());
        };
        let open = |key: &StoredKey| SigningKey::open(&self.host_key, key.clone());
        let opened: Option<Vec<_>> = next.iter().map(open).collect();
        let opened = opened.ok_or(IdentityError::Key)?;
        self.file.write(&next)?;
        *keys = opened;
        Ok(())
    }

    /// Returns the keys that follow `keys`: with a new one if the newest is too old, and without
    /// keys that have been replaced for the time of the overlap. `None` if nothing is due.
    fn successors(
        &self,
        keys: &[SigningKey],
        now_s: u64,
    ) -> Result<Option<Vec<StoredKey>>, IdentityError> {
        let mut next = stored(keys);
        let newest = next.last().map_or(0, |key| age(key, now_s));
        if newest >= ROTATION_S {
            next.push(SigningKey::generate(&self.host_key, now_s)?.stored);
        }
        // A key signs from the age of one overlap on. After a second overlap, no verifier needs its
        // predecessors.
        let replaces_older = |key: &StoredKey| age(key, now_s) >= 2 * OVERLAP_S;
        if let Some(last) = next.iter().rposition(replaces_older) {
            next.drain(..last);
        }
        Ok((next != stored(keys)).then_some(next))
    }
}

/// Returns the keys as they are stored.
fn stored(keys: &[SigningKey]) -> Vec<StoredKey> {
    keys.iter().map(|key| key.stored.clone()).collect()
}

/// Returns the age of a key in seconds. It is 0 if the clock was set back.
fn age(key: &StoredKey, now_s: u64) -> u64 {
    now_s.saturating_sub(key.created_s)
}

/// Returns the key that signs: the newest key that verifiers have had time to fetch, or the first
/// key of the host.
fn signing(keys: &[SigningKey], now_s: u64) -> Result<&SigningKey, IdentityError> {
    let is_known = |key: &&SigningKey| age(&key.stored, now_s) >= OVERLAP_S;
    let newest_known = keys.iter().rev().find(is_known);
    newest_known.or(keys.first()).ok_or(IdentityError::Key)
}

#[cfg(test)]
mod tests;
