//! Tokens with which hosts join a fleet.
//!
//! A token contains a random id, a code that only members can compute, and the fingerprint of the
//! fleet's authority. A member therefore rejects a guessed token without reading a record, and a
//! host recognises a member of the fleet before it sends the token. The record of the token limits
//! its uses and its time.

use crate::records::Outcome;
use crate::{RecordError, RecordKey, SealedRecords, SetupError};
use data_encoding::{BASE32_NOPAD, HEXLOWER};
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Start of each token.
const PREFIX: &str = "jft_";
/// Length in bytes of the id of a token.
const ID_BYTES: usize = 10;
/// Length in bytes of the code that only members can compute.
const CODE_BYTES: usize = 10;
/// Length in bytes of the fingerprint of the authority.
const FINGERPRINT_BYTES: usize = 16;
/// Length in bytes of the checksum at the end of a token.
const CHECKSUM_BYTES: usize = 2;
/// Length in bytes of a token before its encoding as text.
const TOKEN_BYTES: usize = ID_BYTES + CODE_BYTES + FINGERPRINT_BYTES + CHECKSUM_BYTES;
/// Default validity.
pub const DEFAULT_VALIDITY: Duration = Duration::from_secs(3600);
/// Maximum number of uses.
pub const MAX_USES: u32 = 1000;
/// Maximum number of attempts to change a token while other members change it too.
const ATTEMPTS: usize = 16;

/// Token of a join.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    id: [u8; ID_BYTES],
    code: [u8; CODE_BYTES],
    /// First bytes of the digest of the authority's certificate.
    pub authority: [u8; FINGERPRINT_BYTES],
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").finish_non_exhaustive()
    }
}

/// Record of a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct TokenRecord {
    version: u32,
    /// End of its validity, in seconds since the epoch.
    expires: u64,
    /// Maximum number of hosts.
    uses: u32,
    /// Data directories that have used it.
    used_by: Vec<String>,
}

/// Reason why a token cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token is not of this fleet, or guessed.
    #[error("the token does not belong to this fleet; run `jiffy fleet token` on a member")]
    Foreign,
    /// All uses are spent.
    #[error(
        "the token was used by {0} hosts already; run `jiffy fleet token` on a member for another"
    )]
    Used(u32),
    /// The token is expired.
    #[error("the token is expired; run `jiffy fleet token` on a member for another")]
    Expired,
    /// The records failed.
    #[error("the token cannot be checked: {0}")]
    Records(RecordError),
}

impl From<RecordError> for TokenError {
    fn from(error: RecordError) -> Self {
        Self::Records(error)
    }
}

impl Token {
    /// Returns a new token of the fleet with this secret and authority.
    fn generate(secret: &[u8; 32], authority: [u8; FINGERPRINT_BYTES]) -> Option<Self> {
        let mut id = [0; ID_BYTES];
        getrandom::fill(&mut id).ok()?;
        Some(Self {
            code: code(secret, &id),
            id,
            authority,
        })
    }

    /// Returns the key of the record.
    fn key(&self) -> Result<RecordKey, RecordError> {
        let hash = blake3::hash(&self.id);
        format!("fleet/tokens/{}", HEXLOWER.encode(&hash.as_bytes()[..16])).parse()
    }

    /// Returns whether a member of the fleet with this secret created the token.
    #[must_use]
    pub fn is_of(&self, secret: &[u8; 32]) -> bool {
        let expected = code(secret, &self.id);
        // Compares all bytes, so that the duration does not depend on the first difference.
        let difference = (expected.iter().zip(&self.code)).fold(0, |all, (a, b)| all | (a ^ b));
        difference == 0
    }
}

/// Returns the code of a token.
fn code(secret: &[u8; 32], id: &[u8; ID_BYTES]) -> [u8; CODE_BYTES] {
    let key = blake3::derive_key("jiffy fleet 2026 join tokens", secret);
    let mut code = [0; CODE_BYTES];
    code.copy_from_slice(&blake3::keyed_hash(&key, id).as_bytes()[..CODE_BYTES]);
    code
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let hash = blake3::hash(bytes);
    [hash.as_bytes()[0], hash.as_bytes()[1]]
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = [&self.id[..], &self.code, &self.authority].concat();
        let bytes = [&bytes[..], &checksum(&bytes)].concat();
        let text = BASE32_NOPAD.encode(&bytes).to_ascii_lowercase();
        write!(f, "{PREFIX}{text}")
    }
}

impl std::str::FromStr for Token {
    type Err = SetupError;

    fn from_str(text: &str) -> Result<Self, SetupError> {
        let error = |reason: &str| SetupError::Token(reason.to_owned());
        let text = text.trim();
        let digits = text.strip_prefix(PREFIX).ok_or_else(|| {
            error("it does not start with jft_; copy it from the output of `jiffy fleet token`")
        })?;
        let truncated = || error("it is truncated or has a wrong character; copy all of it");
        if digits.len() > 2 * TOKEN_BYTES {
            return Err(truncated());
        }
        let bytes = BASE32_NOPAD
            .decode(digits.to_ascii_uppercase().as_bytes())
            .map_err(|_| truncated())?;
        let bytes: [u8; TOKEN_BYTES] = bytes.try_into().map_err(|_| truncated())?;
        let (content, sum) = bytes.split_at(TOKEN_BYTES - CHECKSUM_BYTES);
        if checksum(content) != sum {
            return Err(truncated());
        }
        let (id, rest) = content.split_at(ID_BYTES);
        let (code, authority) = rest.split_at(CODE_BYTES);
        let mut token = Self {
            id: [0; ID_BYTES],
            code: [0; CODE_BYTES],
            authority: [0; FINGERPRINT_BYTES],
        };
        token.id.copy_from_slice(id);
        token.code.copy_from_slice(code);
        token.authority.copy_from_slice(authority);
        Ok(token)
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Creates a token for `uses` hosts.
///
/// # Errors
/// [`SetupError`].
pub async fn create(
    records: &SealedRecords,
    secret: &[u8; 32],
    authority: [u8; 16],
    uses: u32,
    validity: Duration,
) -> Result<Token, SetupError> {
    if !(1..=MAX_USES).contains(&uses) {
        let reason = format!("the number of uses must be between 1 and {MAX_USES}");
        return Err(SetupError::Token(reason));
    }
    let token = Token::generate(secret, authority)
        .ok_or_else(|| SetupError::Token("no random bytes are available".to_owned()))?;
    let key = token.key()?;
    let record = TokenRecord {
        version: 1,
        expires: seconds(SystemTime::now() + validity),
        uses,
        used_by: Vec::new(),
    };
    let content = serde_json::to_vec(&record).unwrap_or_default();
    match records.send(&records.create(&key, content)?).await? {
        Outcome::Done(_) => Ok(token),
        Outcome::Lost(_) => Err(SetupError::Token("its id exists already".to_owned())),
    }
}

/// Checks a token without using it.
///
/// # Errors
/// [`TokenError`].
pub async fn check(
    records: &SealedRecords,
    secret: &[u8; 32],
    token: &Token,
    installation: &str,
) -> Result<(), TokenError> {
    if !token.is_of(secret) {
        return Err(TokenError::Foreign);
    }
    let key = token.key()?;
    let record = records.get(&key).await?.ok_or(TokenError::Foreign)?;
    decode(&key, &record.content)?.check(installation).map(drop)
}

/// Uses a token for a data directory. A data directory that has used it already, and lost the
/// response, can use it again.
///
/// # Errors
/// [`TokenError`].
pub async fn spend(
    records: &SealedRecords,
    secret: &[u8; 32],
    token: &Token,
    installation: &str,
) -> Result<(), TokenError> {
    if !token.is_of(secret) {
        return Err(TokenError::Foreign);
    }
    let key = token.key()?;
    let mut current = records.get(&key).await?.ok_or(TokenError::Foreign)?;
    for _ in 0..ATTEMPTS {
        let mut record = decode(&key, &current.content)?;
        if record.check(installation)? {
            return Ok(());
        }
        record.used_by.push(installation.to_owned());
        let content = serde_json::to_vec(&record).unwrap_or_default();
        let write = records.replace(&key, content, &current)?;
        match records.send(&write).await? {
            Outcome::Done(_) => return Ok(()),
            Outcome::Lost(Some(other)) => current = other,
            Outcome::Lost(None) => return Err(TokenError::Foreign),
        }
    }
    let reason = "other hosts change it at the same time".to_owned();
    Err(TokenError::Records(RecordError::Unavailable {
        record: key,
        reason,
    }))
}

fn decode(key: &RecordKey, content: &[u8]) -> Result<TokenRecord, RecordError> {
    serde_json::from_slice(content).map_err(|error| RecordError::Damaged {
        record: key.clone(),
        reason: error.to_string(),
    })
}

impl TokenRecord {
    /// Returns whether the data directory has used the token already.
    fn check(&self, installation: &str) -> Result<bool, TokenError> {
        if seconds(SystemTime::now()) >= self.expires {
            return Err(TokenError::Expired);
        }
        if self.used_by.iter().any(|other| other == installation) {
            return Ok(true);
        }
        if self.used_by.len() >= self.uses as usize {
            return Err(TokenError::Used(self.uses));
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_and_mistyped_tokens_are_recognised() {
        let secret = [3; 32];
        let token = Token::generate(&secret, [9; 16]).unwrap();
        let text = token.to_string();
        let read: Token = format!(" {text}\n").parse().unwrap();
        assert_eq!(read, token);
        assert!(read.is_of(&secret));
        assert!(!read.is_of(&[4; 32]));
        for end in 0..text.len() {
            assert!(text[..end].parse::<Token>().is_err(), "{}", &text[..end]);
        }
        // The last character is omitted, because one of its bits is not a part of the token.
        for at in PREFIX.len()..text.len() - 1 {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'a' { b'b' } else { b'a' };
            let changed = String::from_utf8(bytes).unwrap();
            // The checksum accepts 1 of 65,536 changes. The secret code then reveals a change of
            // the id or of the code.
            let is_used = changed
                .parse::<Token>()
                .is_ok_and(|token| token.is_of(&secret));
            assert!(!is_used || changed == text);
        }
    }
}
