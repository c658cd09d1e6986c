//! Settings that the host gives the agent. Replaced as a whole when a clone gets its identity.

use std::collections::BTreeMap;

/// `PATH` of every process unless the environment says otherwise.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Environment, access and defaults of a sandbox.
#[derive(Debug, Clone, Default)]
pub struct AgentSettings {
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// Token that clients must send as `X-Access-Token`; none means open.
    pub access_token: Option<String>,
    /// User when a request names none.
    pub default_user: Option<String>,
    /// Directory when a request names none.
    pub default_workdir: Option<String>,
}

/// Compares without telling by its duration how much was right.
pub fn constant_time_eq(a: &str, b: &str) -> bool {
    a.len() == b.len()
        && a.bytes()
            .zip(b.bytes())
            .fold(0, |differs, (x, y)| differs | (x ^ y))
            == 0
}
