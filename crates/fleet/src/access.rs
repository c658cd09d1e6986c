//! [`FleetAccess`]: the control records of a fleet and its decrypted secrets. The commands of
//! `jiffy fleet` and the daemon of each member open it first.
//!
//! The control records are small objects in the store or in etcd by which the hosts agree. Examples
//! are the root record (one per fleet, with its secrets), the tokens of hosts that join, and the
//! record of the members. All are encrypted with the keys of one tenant of the store, which each
//! member has in a file.

use crate::certificates::{Authority, MEMBER_LIFETIME};
use crate::channel::{Identity, authority_fingerprint};
use crate::files::write_private;
use crate::records::Outcome;
use crate::settings::{MemberFiles, Settings};
use crate::tokens::{self, Token};
use crate::{RecordKey, Records, SealedRecords, SetupError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_fleet_core::record::{MAX_ROOT_BYTES, Root};
use jiffy_fleet_core::{FleetId, MemberId};
use jiffy_store::Tenant;
use jiffy_store::host::RemoteStore;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use zeroize::Zeroizing;

/// Tenant of the store whose keys encrypt the control records of a fleet.
pub const CONTROL_TENANT: &str = "fleet";
/// Contexts of the two encrypted values in the root record. A context is authenticated together
/// with a value, so that one value cannot be replaced by the other.
const SECRET: &str = "fleet/root/secret";
const AUTHORITY_KEY: &str = "fleet/root/authority-key";
/// Maximum number of attempts to change the root record while other members change it too.
const ATTEMPTS: usize = 16;

/// Key of the root record.
pub(crate) fn root_key() -> Result<RecordKey, SetupError> {
    Ok("fleet/root".parse()?)
}

/// Control records of a fleet, and its secrets.
#[derive(Clone)]
pub struct FleetAccess {
    /// Control records.
    pub records: Arc<SealedRecords>,
    /// Root record, as it was read.
    pub root: Root,
    /// Secret of the fleet. Join tokens, the key that signs preview links, and the hashes in the
    /// directory are derived from it. A preview link is a signed address of one port of a sandbox.
    /// The directory is the coordinator's table of sandboxes and their hosts.
    pub secret: Zeroizing<[u8; 32]>,
    /// Authority of the certificates.
    pub authority: Arc<Authority>,
}

impl std::fmt::Debug for FleetAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetAccess")
            .field("fleet", &self.root.fleet)
            .finish_non_exhaustive()
    }
}

impl FleetAccess {
    /// Opens the records of the fleet of a member.
    ///
    /// # Errors
    /// [`SetupError`], also if the records belong to another fleet.
    pub async fn open(
        settings: &Settings,
        home: &Path,
        remote: &RemoteStore,
    ) -> Result<Self, SetupError> {
        let records = settings.records(home, remote)?;
        let tenant = remote.shared.tenant(CONTROL_TENANT).await?;
        Self::of(records, tenant, &settings.fleet).await
    }

    /// Opens the records of fleet `fleet` with the keys of `tenant`.
    ///
    /// # Errors
    /// [`SetupError`].
    pub async fn of(
        records: Arc<dyn Records>,
        tenant: Arc<Tenant>,
        fleet: &FleetId,
    ) -> Result<Self, SetupError> {
        let sealed = Arc::new(SealedRecords::new(records, tenant.clone()));
        let record = sealed.get(&root_key()?).await?;
        let record = record.ok_or_else(|| SetupError::NoRecord("fleet/root".to_owned()))?;
        Self::with_root(sealed, &tenant, Root::decode(&record.content, Some(fleet))?)
    }

    /// Decrypts the secrets of the root record.
    pub(crate) fn with_root(
        records: Arc<SealedRecords>,
        tenant: &Tenant,
        root: Root,
    ) -> Result<Self, SetupError> {
        let secret = unwrap(tenant, SECRET, &root.wrapped_secret)?;
        let secret: [u8; 32] = secret[..]
            .try_into()
            .map_err(|_| damaged("the secret of the fleet has a wrong length"))?;
        let key = unwrap(tenant, AUTHORITY_KEY, &root.wrapped_authority_key)?;
        let key = std::str::from_utf8(&key)
            .map_err(|_| damaged("the key of the authority is not text"))?;
        Ok(Self {
            authority: Arc::new(Authority::from_pem(&root.ca_certificate, key)?),
            secret: Zeroizing::new(secret),
            records,
            root,
        })
    }

    /// Adds the encrypted secret and key of the authority to a root record.
    pub(crate) fn wrap(
        root: &mut Root,
        tenant: &Tenant,
        secret: &[u8; 32],
        authority: &Authority,
    ) -> Result<(), SetupError> {
        let seal = |context: &str, content: &[u8]| -> Result<String, SetupError> {
            Ok(STANDARD.encode(tenant.seal_record(context, content)?))
        };
        root.wrapped_secret = seal(SECRET, secret)?;
        root.wrapped_authority_key = seal(AUTHORITY_KEY, authority.key().as_bytes())?;
        Ok(())
    }

    /// Creates a token for `uses` hosts.
    ///
    /// # Errors
    /// [`SetupError`].
    pub async fn create_token(&self, uses: u32, validity: Duration) -> Result<Token, SetupError> {
        let authority = authority_fingerprint(self.authority.certificate())?;
        tokens::create(&self.records, &self.secret, authority, uses, validity).await
    }

    /// Reserves the number of a new member. Numbers are never reused, also if the member never
    /// starts.
    ///
    /// # Errors
    /// [`SetupError`].
    pub(crate) async fn reserve_member(&self) -> Result<(MemberId, Root), SetupError> {
        let key = root_key()?;
        let no_root = || SetupError::NoRecord("fleet/root".to_owned());
        let mut current = self.records.get(&key).await?.ok_or_else(no_root)?;
        for _ in 0..ATTEMPTS {
            let mut root = Root::decode(&current.content, Some(&self.root.fleet))?;
            let member = root.next_member;
            root.next_member = MemberId(member.0.saturating_add(1));
            let write = self.records.replace(&key, root.encode()?, &current)?;
            match self.records.send(&write).await? {
                Outcome::Done(_) => return Ok((member, root)),
                Outcome::Lost(other) => current = other.ok_or_else(no_root)?,
            }
        }
        let reason = "other hosts join at the same time: try again".to_owned();
        Err(SetupError::Rejected(reason))
    }

    /// Renews the certificate of this member if necessary. Returns whether it was renewed.
    ///
    /// # Errors
    /// [`SetupError`]. The former certificate remains in use.
    pub fn renew(&self, home: &Path, identity: &Identity) -> Result<bool, SetupError> {
        let now = SystemTime::now();
        if now + crate::certificates::RENEWAL_MARGIN < identity.expires() {
            return Ok(false);
        }
        let request = identity.renewal_request()?;
        let (fleet, member) = (identity.fleet(), identity.member());
        let certificate = self
            .authority
            .issue(fleet, member, &request, now, MEMBER_LIFETIME)?;
        identity.renew(&certificate)?;
        write_private(&MemberFiles::of(home).certificate, certificate.as_bytes())?;
        Ok(true)
    }
}

fn damaged(reason: &str) -> SetupError {
    SetupError::Format(jiffy_fleet_core::record::RecordError::Damaged {
        record: "root record",
        reason: reason.to_owned(),
    })
}

/// Decrypts a secret of the root record with the tenant's key.
fn unwrap(tenant: &Tenant, context: &str, text: &str) -> Result<Zeroizing<Vec<u8>>, SetupError> {
    if text.len() > MAX_ROOT_BYTES {
        return Err(damaged("a secret is too long"));
    }
    let sealed = STANDARD
        .decode(text)
        .map_err(|_| damaged("a secret is not base64"))?;
    Ok(Zeroizing::new(tenant.open_record(context, &sealed)?))
}
