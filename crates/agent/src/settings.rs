//! [`AgentSettings`]: environment, token and defaults of the sandbox, which the host sends. An
//! identity replaces all of them, and `POST /init` changes single settings.
//!
//! The *identity* of a sandbox is its id, host name, entropy, clock and these settings. The host
//! sends it to a guest before the sandbox can be used.

use std::collections::BTreeMap;

/// Default `PATH` of processes.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Environment, access and defaults of a sandbox.
#[derive(Debug, Clone, Default)]
pub struct AgentSettings {
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// Token that clients must send as `X-Access-Token`. If `None`, no token is required.
    pub access_token: Option<String>,
    /// User of requests that specify no user.
    pub default_user: Option<String>,
    /// Directory of requests that specify no directory.
    pub default_workdir: Option<String>,
    /// Ids of the sandbox. `None` if the agent has no identity.
    pub labels: Option<SandboxLabels>,
}

/// Ids of a sandbox, of its template and of its owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxLabels {
    /// Id of the sandbox.
    pub sandbox: String,
    /// Id of its template, if known.
    pub template: Option<String>,
    /// Id of the team that owns it, if known.
    pub team: Option<String>,
}

impl SandboxLabels {
    /// Returns the labels as environment variables with E2B's names.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("E2B_SANDBOX", Some("true")),
            ("E2B_SANDBOX_ID", Some(self.sandbox.as_str())),
            ("E2B_TEMPLATE_ID", self.template.as_deref()),
            ("E2B_TEAM_ID", self.team.as_deref()),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }
}

/// Compares two texts. The duration does not depend on the number of equal characters.
pub fn constant_time_eq(a: &str, b: &str) -> bool {
    a.len() == b.len()
        && a.bytes()
            .zip(b.bytes())
            .fold(0, |differs, (x, y)| differs | (x ^ y))
            == 0
}
