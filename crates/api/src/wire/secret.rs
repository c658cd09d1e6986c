//! Conversion of secrets, without their values, to the bodies of the API.

use super::moment;
use jiffy_api_types::Secret;

/// Returns a secret as clients see it.
pub(crate) fn shown(secret: jiffy_secrets::Secret) -> Secret {
    Secret {
        secret_id: secret.id,
        name: secret.name,
        current_version: secret.version,
        metadata: secret.metadata,
        created_at: moment(secret.created_ms),
        updated_at: moment(secret.updated_ms),
    }
}
