//! Converts the identity of a sandbox into the message that the guest agent expects.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_engine_api::{IdentityError, SandboxIdentity, random_bytes};
use jiffy_image::Defaults;
use jiffy_proto::agent::{Identity, TEAM_ID};

/// Size of the entropy that an agent receives, in bytes.
const ENTROPY_BYTES: usize = 64;

/// Returns the identity message for the agent of a sandbox, with fresh entropy. The sender sets
/// `time_ns` immediately before sending the message.
pub fn identity(
    sandbox_identity: &SandboxIdentity,
    defaults: &Defaults,
) -> Result<Identity, IdentityError> {
    // The sandbox's environment replaces variables of the template.
    let mut env = defaults.env.clone();
    env.extend(sandbox_identity.env.clone());
    Ok(Identity {
        id: sandbox_identity.id.clone(),
        rewound: sandbox_identity.rewound,
        // The agent uses the sandbox id as the host name.
        hostname: None,
        time_ns: 0,
        entropy: entropy()?,
        env,
        access_token: sandbox_identity.access_token.clone(),
        default_user: Some(defaults.user.clone()),
        default_workdir: Some(defaults.workdir.clone()).filter(|d| !d.is_empty()),
        template_id: sandbox_identity.template.clone(),
        // Guests that are not sandboxes have neither a template id nor a team id.
        team_id: sandbox_identity
            .template
            .as_ref()
            .map(|_| TEAM_ID.to_owned()),
        site: sandbox_identity.site.clone(),
    })
}

/// Returns the identity of a running sandbox with fresh entropy, for an agent that requests its
/// identity again.
pub fn renewed(before: Identity) -> Result<Identity, IdentityError> {
    Ok(Identity {
        // The agent has already handled the rollback.
        rewound: false,
        entropy: entropy()?,
        ..before
    })
}

fn entropy() -> Result<String, IdentityError> {
    Ok(STANDARD.encode(random_bytes::<ENTROPY_BYTES>()?))
}
