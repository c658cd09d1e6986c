//! Identities of sandboxes, which their guests receive.

use super::Sandboxes;
use crate::sandbox::Sandbox;
use crate::site;
use jiffy_engine_api::SandboxIdentity;

impl Sandboxes {
    /// Returns the identity of the sandbox with this record. `rewound`
    /// ([`SandboxIdentity::rewound`]) is true if a guest may already have run from the state that
    /// the new guest continues.
    pub(super) fn identity_of(&self, record: Sandbox, rewound: bool) -> SandboxIdentity {
        // Templates of a key are stored as `KEY/NAME`, but the key's clients use only `NAME`.
        let owner = record.settings.owner.as_deref();
        let name = owner.and_then(|key| record.template.strip_prefix(key)?.strip_prefix('/'));
        let template = name.unwrap_or(&record.template).to_owned();
        let network = record.network_rules();
        SandboxIdentity {
            id: record.id,
            template: Some(template),
            env: record.env,
            access_token: record.agent_token,
            rewound,
            network,
            site: site::joined(&self.0.site, &record.settings.guest_site()),
        }
    }
}
