//! Secrets that are used once: codes for signing in, and *tickets*, each of which permits one
//! download. They are in memory only, so a restart of the daemon invalidates them.

use crate::refusal::Refusal;
use data_encoding::HEXLOWER;
use jiffy_engine_api::{IdentityError, random_bytes};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Validity of codes and tickets.
const VALIDITY: Duration = Duration::from_secs(60);
/// Maximum number of valid codes, and of valid tickets.
const MAX_SECRETS: usize = 1000;

/// A file that a ticket permits to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Download {
    /// Id of the session that requested the ticket. No other session may use it.
    pub session: String,
    /// Id of the sandbox.
    pub sandbox: String,
    /// Path of the file in the sandbox.
    pub path: String,
}

/// Valid codes and tickets, by the hash of their secrets.
#[derive(Debug, Default)]
pub(crate) struct Codes {
    codes: OneTime<()>,
    tickets: OneTime<Download>,
}

impl Codes {
    /// Creates a code of 128 bits with which the owner of the host signs in.
    pub fn create(&self) -> Result<String, Refusal> {
        self.codes.create(())
    }

    /// Invalidates the code. Returns whether it was valid.
    pub fn take(&self, code: &str) -> bool {
        self.codes.take(code).is_some()
    }

    /// Creates a ticket for a download.
    pub fn create_ticket(&self, download: Download) -> Result<String, Refusal> {
        self.tickets.create(download)
    }

    /// Invalidates the ticket and returns its download. `None` if it is not valid.
    pub fn take_ticket(&self, ticket: &str) -> Option<Download> {
        self.tickets.take(ticket)
    }
}

/// Returns `N` random bytes as hexadecimal digits.
pub(crate) fn random_hex<const N: usize>() -> Result<String, IdentityError> {
    Ok(HEXLOWER.encode(&random_bytes::<N>()?))
}

/// Secrets that are removed at their first use.
#[derive(Debug)]
struct OneTime<T>(Mutex<HashMap<[u8; 32], (Instant, T)>>);

impl<T> Default for OneTime<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> OneTime<T> {
    /// Creates a secret for a value. The secret can be used once, within its validity.
    fn create(&self, value: T) -> Result<String, Refusal> {
        let secret = random_hex::<16>()?;
        let mut secrets = self.0.lock();
        secrets.retain(|_, (created, _)| created.elapsed() < VALIDITY);
        // Remove the oldest secret, so that the new one does not exceed the limit.
        if secrets.len() >= MAX_SECRETS {
            let oldest = secrets.iter().min_by_key(|(_, (created, _))| *created);
            if let Some(oldest) = oldest.map(|(hash, _)| *hash) {
                secrets.remove(&oldest);
            }
        }
        secrets.insert(Sha256::digest(&secret).into(), (Instant::now(), value));
        Ok(secret)
    }

    /// Removes a secret and returns its value. `None` if it is not valid. Looks up the hash, so
    /// that the duration reveals nothing about a secret.
    fn take(&self, secret: &str) -> Option<T> {
        let hash: [u8; 32] = Sha256::digest(secret).into();
        let (created, value) = self.0.lock().remove(&hash)?;
        (created.elapsed() < VALIDITY).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_works_once() {
        let codes = Codes::default();
        let code = codes.create().unwrap();
        assert_eq!(code.len(), 32);
        assert!(!codes.take("") && !codes.take(&code.to_uppercase()));
        assert!(codes.take(&code));
        assert!(!codes.take(&code));
    }

    #[test]
    fn a_code_expires_and_their_number_is_bounded() {
        let codes = OneTime::default();
        let code = codes.create(1).unwrap();
        for entry in codes.0.lock().values_mut() {
            entry.0 -= VALIDITY;
        }
        assert_eq!(codes.take(&code), None);
        let first = codes.create(2).unwrap();
        for _ in 0..MAX_SECRETS {
            codes.create(3).unwrap();
        }
        assert_eq!(codes.take(&first), None);
        assert!(codes.0.lock().len() <= MAX_SECRETS);
    }
}
