//! Access for sessions of the web console: exchange of a key for a session, validity of the key
//! later, and connections to the agents of guests. The rules of the API's calls apply.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream.

use crate::app::App;
use crate::caller::{Caller, check_key, is_key_length, unverifiable};
use crate::error::ApiError;
use crate::hooks::Ports;
use crate::keys::{Key, hash};
use crate::lookup::Liveness;
use crate::quota::ExchangePermit;
use std::net::IpAddr;
use std::sync::Arc;

/// Access of a caller to the agent of a sandbox.
pub struct GuestAccess {
    /// Id of the sandbox.
    pub id: String,
    /// Token that the agent requires. `None` if it requires no token.
    pub token: Option<String>,
    /// Opens connections to the guest.
    pub ports: Arc<dyn Ports>,
    /// Counts the exchange for the owner of the sandbox until it is dropped. `None` for sandboxes
    /// of the host's owner.
    pub permit: Option<ExchangePermit>,
}

impl App {
    /// Verifies a key that a user enters, and returns the key with the hash of its secret. Failures
    /// count for the address of the client as in requests with a key.
    ///
    /// # Errors
    /// 401 if the key is not in force, 403 if it may not be used from the address, 429 after too
    /// many failures. 500 if the keys cannot be read, 503 if this host has no contact to its fleet.
    pub fn sign_in(
        &self,
        secret: &str,
        from: Option<IpAddr>,
    ) -> Result<(Arc<Key>, [u8; 32]), ApiError> {
        let secret = Some(secret).filter(|secret| is_key_length(secret));
        let key = check_key(self, secret, from)?;
        // The default is never returned: `check_key` rejects a missing secret.
        Ok((key, secret.map_or([0; 32], hash)))
    }

    /// Counts a failed sign-in with a one-time code, which [`Self::sign_in`] does not see. Returns
    /// an error if the address has reached its limit.
    ///
    /// # Errors
    /// 429 after too many failures.
    pub fn count_failed_sign_in(&self, from: IpAddr) -> Result<(), ApiError> {
        if let Some(wait) = self.authentication_limit.wait(from) {
            let message = "too many failed authentications from this address: retry later";
            let error = ApiError::too_many("authentication_failures", message);
            return Err(error.after(wait.as_secs() + 1));
        }
        self.authentication_limit.count(from);
        Ok(())
    }

    /// Returns the key `id` if it is in force, its current secret has the hash `secret`, and it may
    /// be used from the address. A session therefore ends when its key is revoked, expires or is
    /// rotated.
    ///
    /// # Errors
    /// 500 if the keys cannot be read, 503 if this host has no contact to its fleet.
    pub fn key_of_session(
        &self,
        id: &str,
        secret: &[u8],
        from: Option<IpAddr>,
    ) -> Result<Option<Arc<Key>>, ApiError> {
        let key = self.keys.current(id, secret, from);
        let key = key.map_err(unverifiable)?;
        Ok(key.map(Arc::new))
    }

    /// Returns access to the agent of a sandbox that is visible to the caller.
    ///
    /// # Errors
    /// 404 if the sandbox is not visible, 403 for keys of scope `read`, 429 if the owner has too
    /// many exchanges, 501 if this daemon serves no data plane.
    pub fn guest_access(&self, caller: &Caller, id: &str) -> Result<GuestAccess, ApiError> {
        let sandbox = self.sandbox(caller, id, Liveness::Alive)?;
        if caller.is_read_only() {
            return Err(ApiError::read_only());
        }
        let ports = self
            .ports
            .clone()
            .ok_or_else(|| ApiError::unsupported("the daemon of this host serves no data plane"))?;
        let owner = sandbox.owner();
        let permit = owner.map(|owner| self.quota.exchange(owner)).transpose()?;
        Ok(GuestAccess {
            id: sandbox.id().to_owned(),
            token: sandbox.agent_token().map(str::to_owned),
            ports,
            permit,
        })
    }
}
