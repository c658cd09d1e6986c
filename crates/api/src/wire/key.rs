//! Conversion of API keys to and from the bodies of the API.

use super::moment;
use crate::error::ApiError;
use crate::keys::{Key, Limits, NewKey, Scope};
use jiffy_api_types::{ApiKey, KeyLimits, KeyScope, Moment, NewApiKey};

impl From<Scope> for KeyScope {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Admin => Self::Admin,
            Scope::Create => Self::Create,
            Scope::Read => Self::Read,
        }
    }
}

impl From<KeyScope> for Scope {
    fn from(scope: KeyScope) -> Self {
        match scope {
            KeyScope::Admin => Self::Admin,
            KeyScope::Create => Self::Create,
            KeyScope::Read => Self::Read,
        }
    }
}

impl From<Limits> for KeyLimits {
    fn from(limits: Limits) -> Self {
        Self {
            sandboxes: limits.max_sandboxes,
            vcpus: limits.max_vcpus,
            memory_mb: limits.max_memory_mib,
            creates_per_minute: limits.creates_per_minute,
            paused: limits.max_paused,
            snapshots: limits.max_snapshots,
            templates: limits.max_templates,
            builds: limits.max_builds,
            exchanges: limits.max_exchanges,
            disk_mb: limits.max_disk_mib,
            idle_timeout: limits.idle_timeout_s,
            snapshot_ack: limits.snapshot_ack,
        }
    }
}

impl From<KeyLimits> for Limits {
    fn from(limits: KeyLimits) -> Self {
        Self {
            max_sandboxes: limits.sandboxes,
            max_vcpus: limits.vcpus,
            max_memory_mib: limits.memory_mb,
            creates_per_minute: limits.creates_per_minute,
            max_paused: limits.paused,
            max_snapshots: limits.snapshots,
            max_templates: limits.templates,
            max_builds: limits.builds,
            max_disk_mib: limits.disk_mb,
            max_exchanges: limits.exchanges,
            idle_timeout_s: limits.idle_timeout,
            snapshot_ack: limits.snapshot_ack,
        }
    }
}

impl From<Key> for ApiKey {
    fn from(key: Key) -> Self {
        Self {
            key_id: key.id,
            name: key.name,
            scope: key.scope.into(),
            limits: key.limits.into(),
            created_at: moment(key.created_ms),
            used_at: key.used_ms.map(moment),
            revoked_at: key.revoked_ms.map(moment),
            expires_at: key.expires_ms.map(moment),
            addresses: key.addresses,
        }
    }
}

impl TryFrom<ApiKey> for Key {
    type Error = jiff::Error;

    fn try_from(key: ApiKey) -> Result<Self, jiff::Error> {
        Ok(Self {
            id: key.key_id,
            name: key.name,
            scope: key.scope.into(),
            limits: key.limits.into(),
            created_ms: milliseconds(&key.created_at)?,
            used_ms: key.used_at.as_ref().map(milliseconds).transpose()?,
            revoked_ms: key.revoked_at.as_ref().map(milliseconds).transpose()?,
            expires_ms: key.expires_at.as_ref().map(milliseconds).transpose()?,
            addresses: key.addresses,
            // The API does not report this time.
            end_ms: None,
        })
    }
}

impl From<NewKey> for NewApiKey {
    fn from(new: NewKey) -> Self {
        Self {
            key: new.key.into(),
            secret: new.secret,
        }
    }
}

impl TryFrom<NewApiKey> for NewKey {
    type Error = jiff::Error;

    fn try_from(new: NewApiKey) -> Result<Self, jiff::Error> {
        Ok(Self {
            key: new.key.try_into()?,
            secret: new.secret,
        })
    }
}

/// Returns a time in milliseconds since 1970. Earlier times become 0.
fn milliseconds(at: &Moment) -> Result<u64, jiff::Error> {
    let time: jiff::Timestamp = at.0.parse()?;
    Ok(u64::try_from(time.as_millisecond()).unwrap_or(0))
}

/// Returns an expiry time in milliseconds since 1970.
pub(crate) fn expiry(at: Option<Moment>) -> Result<Option<u64>, ApiError> {
    let Some(at) = at else { return Ok(None) };
    let time: Result<jiff::Timestamp, _> = at.0.parse();
    let ms = time
        .ok()
        .and_then(|time| u64::try_from(time.as_millisecond()).ok());
    let message = "`expiresAt` is not a time: use a form such as 2027-01-31T00:00:00Z";
    ms.map(Some).ok_or_else(|| ApiError::invalid(message))
}
