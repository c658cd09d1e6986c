//! Master keys of a store, from a file or a command. They wrap (encrypt) the secrets from which the
//! keys of tenants are derived. The locator is a secret from which object names and the encryption
//! of tenant records are derived.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.
//!
//! ```toml
//! locator = "64 hexadecimal digits, permanently the same on all hosts"
//! current = "k2"
//! # Optional command that wraps and unwraps instead of the keys below. It is called with
//! # `wrap KEY` or `unwrap KEY`, reads standard input and writes standard output.
//! command = ["/usr/bin/kms"]
//! [keys]
//! k1 = "64 hexadecimal digits"
//! k2 = "64 hexadecimal digits"
//! ```

use crate::data_keys::{hex, open, seal};
use crate::{FormatError, Hash, KeyBroker, StoreError};
use chacha20poly1305::aead::Aead;
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use zeroize::Zeroizing;

/// Maximum size in bytes of a key file.
const MAX_KEY_FILE_BYTES: u64 = 1 << 20;
/// Maximum length in bytes of a wrapped secret.
pub(crate) const MAX_WRAPPED_BYTES: usize = 4096;
/// Maximum duration of the command that wraps or unwraps a secret.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// Content of a key file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    locator: Zeroizing<String>,
    /// Name of the master key that wraps new secrets.
    current: String,
    #[serde(default)]
    command: Vec<String>,
    #[serde(default)]
    keys: BTreeMap<String, Zeroizing<String>>,
}

/// Master keys.
pub struct Keyring {
    /// Key of the hash of tenants' names.
    names: Zeroizing<[u8; 32]>,
    /// Cipher of tenants' records.
    records: XChaCha20Poly1305,
    /// Name of the master key that wraps new secrets.
    current: String,
    /// Command that wraps and unwraps. Empty if the master keys do.
    command: Vec<String>,
    /// Process that runs the command. `None` if this process runs it.
    broker: Option<KeyBroker>,
    /// Ciphers of the master keys by name. Not used if there is a command.
    keys: BTreeMap<String, XChaCha20Poly1305>,
}

impl std::fmt::Debug for Keyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keyring({})", self.current)
    }
}

impl Keyring {
    /// Reads a key file. Only its owner may have read access.
    pub fn load(path: &Path) -> Result<Self, StoreError> {
        let invalid = |reason: &str| key_error("", &format!("{}: {reason}", path.display()));
        let metadata = std::fs::metadata(path).map_err(StoreError::io(path))?;
        if metadata.mode() & 0o077 != 0 {
            return Err(invalid("other users can read it; run chmod 600"));
        }
        if metadata.len() > MAX_KEY_FILE_BYTES {
            return Err(invalid("it is too long"));
        }
        let text = std::fs::read_to_string(path).map_err(StoreError::io(path))?;
        Self::parse(&Zeroizing::new(text)).map_err(|reason| invalid(&reason))
    }

    /// Parses the content of a key file. The error may contain names of keys, but no keys.
    pub fn parse(text: &str) -> Result<Self, String> {
        // Discard the parser's error, which would contain lines of the file.
        let file: KeyFile = toml::from_str(text)
            .map_err(|_| "it is not a key file with `locator`, `current` and `keys`")?;
        let secret = |name: &str, text: &str| {
            let key = hex::<32>(text).map(Zeroizing::new);
            key.ok_or_else(|| format!("{name} is not 64 hexadecimal digits"))
        };
        let locator = secret("locator", &file.locator)?;
        let derived = |subject| Zeroizing::new(blake3::derive_key(subject, &*locator));
        let mut keys = BTreeMap::new();
        for (name, text) in &file.keys {
            let key = secret(name, text)?;
            keys.insert(name.clone(), XChaCha20Poly1305::new((&*key).into()));
        }
        if file.command.is_empty() && !keys.contains_key(&file.current) {
            return Err(format!("the current key {:?} does not exist", file.current));
        }
        Ok(Self {
            names: derived("jiffy store 2026 tenant names"),
            records: XChaCha20Poly1305::new((&*derived("jiffy store 2026 tenant records")).into()),
            current: file.current,
            command: file.command,
            broker: None,
            keys,
        })
    }

    /// Returns whether a command wraps and unwraps secrets.
    pub fn has_command(&self) -> bool {
        !self.command.is_empty()
    }

    /// Uses `broker` to run the command.
    #[must_use]
    pub fn with_broker(self, broker: KeyBroker) -> Self {
        Self {
            broker: Some(broker),
            ..self
        }
    }

    /// Returns the name of the key that wraps new secrets.
    pub fn current(&self) -> &str {
        &self.current
    }

    /// Returns the keyed hash of the name of a tenant.
    pub(crate) fn locate(&self, tenant: &str) -> Hash {
        Hash(*blake3::keyed_hash(&self.names, tenant.as_bytes()).as_bytes())
    }

    /// Encrypts the record of a tenant, which contains names of keys.
    pub(crate) fn seal_record(&self, tenant: &str, record: &[u8]) -> Result<Vec<u8>, FormatError> {
        seal(&self.records, tenant.as_bytes(), record)
    }

    pub(crate) fn open_record(&self, tenant: &str, record: &[u8]) -> Result<Vec<u8>, FormatError> {
        open(&self.records, tenant.as_bytes(), record)
    }

    /// Returns whether a record that fails authentication was probably encrypted with these keys.
    /// Decrypts the beginning of the record without authentication, and compares it with `plain`:
    /// the beginning of every record, with `None` for bytes of unknown value. Tolerates damage to
    /// fewer than half of the compared bytes.
    pub(crate) fn is_likely_ours(&self, record: &[u8], plain: &[Option<u8>]) -> bool {
        let Some((nonce, sealed)) = record.split_first_chunk() else {
            return false;
        };
        let Some(sealed) = sealed.get(..plain.len()) else {
            return false;
        };
        // Encryption with a stream cipher is its own inverse, so encrypting again decrypts.
        let Ok(opened) = self.records.encrypt(&XNonce::from(*nonce), sealed) else {
            return false;
        };
        let pairs = plain.iter().zip(opened);
        let pairs = pairs.filter_map(|(plain, byte)| Some((*plain)? == byte));
        let (mut equal, mut all) = (0, 0);
        for is_equal in pairs {
            equal += usize::from(is_equal);
            all += 1;
        }
        // In random data, one byte in 256 is equal.
        all > 0 && equal * 2 > all
    }

    /// Wraps a secret with the current key or the command. A secret wrapped with a key can only be
    /// unwrapped with the same `context`. A command does not receive the context.
    pub(crate) async fn wrap(
        &self,
        tenant: &str,
        context: &[u8],
        secret: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        match self.keys.get(&self.current) {
            _ if !self.command.is_empty() => self
                .run(tenant, "wrap", &self.current, secret)
                .await
                .map(|w| w.to_vec()),
            Some(key) => seal(key, context, secret).map_err(|e| key_error(tenant, &e.to_string())),
            None => Err(key_error(
                tenant,
                &format!("the key {:?} does not exist", self.current),
            )),
        }
    }

    /// Unwraps a secret that was wrapped with key `key`.
    pub(crate) async fn unwrap(
        &self,
        tenant: &str,
        key: &str,
        context: &[u8],
        wrapped: &[u8],
    ) -> Result<Zeroizing<[u8; 32]>, StoreError> {
        let secret = match self.keys.get(key) {
            Some(cipher) if self.command.is_empty() => open(cipher, context, wrapped)
                .map(Zeroizing::new)
                .map_err(|e| key_error(tenant, &e.to_string()))?,
            _ if !self.command.is_empty() => self.run(tenant, "unwrap", key, wrapped).await?,
            _ => {
                return Err(key_error(
                    tenant,
                    &format!("the key {key:?} does not exist"),
                ));
            }
        };
        let secret = secret.as_slice().try_into().map(Zeroizing::new);
        secret.map_err(|_| key_error(tenant, "the unwrapped secret does not have 32 bytes"))
    }

    /// Runs the command.
    pub(crate) async fn run(
        &self,
        tenant: &str,
        verb: &str,
        key: &str,
        input: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, StoreError> {
        let failed =
            |reason: String| key_error(tenant, &format!("the key command failed: {reason}"));
        if let Some(broker) = &self.broker {
            // The broker supports only `unwrap`.
            return match verb {
                "unwrap" => broker.unwrap(tenant, key, input).await,
                _ => Err(failed(format!("this process cannot {verb}"))),
            };
        }
        let (program, arguments) = self
            .command
            .split_first()
            .ok_or_else(|| failed("no command is configured".into()))?;
        let called = async {
            let mut child = tokio::process::Command::new(program)
                .args(arguments)
                .args([verb, key])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                // On a timeout, the future and the child are dropped.
                .kill_on_drop(true)
                .spawn()?;
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(input).await?;
            }
            // The capacity avoids reallocations, which would leave copies of the secret in memory.
            let mut output = Zeroizing::new(Vec::with_capacity(MAX_WRAPPED_BYTES + 1));
            if let Some(stdout) = child.stdout.take() {
                stdout
                    // One byte more than the maximum, to detect oversized output.
                    .take(MAX_WRAPPED_BYTES as u64 + 1)
                    .read_to_end(&mut output)
                    .await?;
            }
            Ok::<_, std::io::Error>((child.wait().await?, output))
        };
        let ended = tokio::time::timeout(COMMAND_TIMEOUT, called).await;
        let (status, output) = ended
            .map_err(|_| failed(format!("no exit within {COMMAND_TIMEOUT:?}")))?
            .map_err(|e| failed(e.to_string()))?;
        if status.success() && (1..=MAX_WRAPPED_BYTES).contains(&output.len()) {
            Ok(output)
        } else {
            let size = output.len();
            Err(failed(format!(
                "{status}, output of {size} bytes, 1 to {MAX_WRAPPED_BYTES} expected"
            )))
        }
    }
}

pub(crate) fn key_error(tenant: &str, reason: &str) -> StoreError {
    StoreError::Key {
        tenant: tenant.to_owned(),
        reason: reason.to_owned(),
    }
}
