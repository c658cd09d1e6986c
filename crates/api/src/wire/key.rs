//! Conversion of API keys.

use super::moment;
use crate::error::ApiError;
use crate::keys::{Key, Limits, NewKey, Scope};
use jiffy_api_types::{ApiKey, KeyLimits, KeyScope, Moment, NewApiKey};

pub(crate) fn api_key(key: Key) -> ApiKey {
    let limits = key.limits;
    ApiKey {
        key_id: key.id,
        name: key.name,
        scope: match key.scope {
            Scope::Admin => KeyScope::Admin,
            Scope::Create => KeyScope::Create,
            Scope::Read => KeyScope::Read,
        },
        limits: KeyLimits {
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
        },
        created_at: moment(key.created_ms),
        used_at: key.used_ms.map(moment),
        revoked_at: key.revoked_ms.map(moment),
        expires_at: key.expires_ms.map(moment),
        addresses: key.addresses,
    }
}

pub(crate) fn new_api_key(new: NewKey) -> NewApiKey {
    NewApiKey {
        key: api_key(new.key),
        secret: new.secret,
    }
}

pub(crate) fn key_scope(scope: KeyScope) -> Scope {
    match scope {
        KeyScope::Admin => Scope::Admin,
        KeyScope::Create => Scope::Create,
        KeyScope::Read => Scope::Read,
    }
}

pub(crate) fn key_limits(limits: &KeyLimits) -> Limits {
    Limits {
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
    }
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
