//! The sandbox's environment, for programs that run already when the sandbox is told who it is.
//!
//! What is started through the agent is given its environment. A server that waits in its template's snapshot is not: it finds
//! here what has become of it.

use super::site;
use crate::state::Agent;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};

const FILE: &str = "/run/jiffy/environment";
const NEXT: &str = "/run/jiffy/.environment";

/// Writes the environment as a JSON object, for the default user alone. Readers see the old one or the new one.
///
/// Does nothing unless we are process 1: then the file system is not ours.
pub fn show(agent: &Agent) -> io::Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    let mut env = agent.settings.borrow().env.clone();
    site::add_missing(&mut env, agent.site.borrow().variables());
    let text = serde_json::to_vec(&env)?;
    let user = agent.user(None).map_err(io::Error::other)?;
    // What is left of a try that failed may have another owner.
    let _ = fs::remove_file(NEXT);
    fs::write(NEXT, text)?;
    fs::set_permissions(NEXT, Permissions::from_mode(0o600))?;
    chown(NEXT, Some(user.uid), Some(user.gid))?;
    fs::rename(NEXT, FILE)
}
