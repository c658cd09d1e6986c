//! The sandbox's environment, for programs that run before the sandbox has its identity.
//!
//! Processes that the agent starts get their environment at start. A server that waits in its
//! template's snapshot reads it here.

use super::site;
use crate::state::Agent;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};

const FILE: &str = "/run/jiffy/environment";
const NEXT: &str = "/run/jiffy/.environment";

/// Writes the environment as a JSON object, readable by the default user alone. Readers see the old
/// one or the new one.
///
/// Does nothing unless the agent is process 1: otherwise the file system is not its own.
pub fn write_file(agent: &Agent) -> io::Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    let mut env = agent.settings.borrow().env.clone();
    site::add_missing(&mut env, agent.site.borrow().variables());
    let text = serde_json::to_vec(&env)?;
    let user = agent.user(None).map_err(io::Error::other)?;
    // The rest of a failed attempt may have another owner.
    let _ = fs::remove_file(NEXT);
    fs::write(NEXT, text)?;
    fs::set_permissions(NEXT, Permissions::from_mode(0o600))?;
    chown(NEXT, Some(user.uid), Some(user.gid))?;
    fs::rename(NEXT, FILE)
}
