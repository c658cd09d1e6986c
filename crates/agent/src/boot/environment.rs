//! The sandbox's environment, for programs that run before the sandbox has its identity.
//!
//! Processes that the agent starts get their environment at start. A server that waits in its
//! template's snapshot reads it here.

use super::site;
use crate::rest::error::RestError;
use crate::state::Agent;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};

const FILE: &str = "/run/jiffy/environment";
const NEXT: &str = "/run/jiffy/.environment";

/// The environment of the sandbox, to be written by a worker.
pub struct EnvironmentFile {
    /// All variables.
    pub variables: BTreeMap<String, String>,
    /// User and group of the only user who may read the file.
    pub owner: (u32, u32),
}

impl EnvironmentFile {
    /// The present environment, readable by the default user.
    pub async fn of(agent: &Agent) -> Result<Self, RestError> {
        let user = agent.find_user::<RestError>(None).await?;
        let mut variables = agent.sandbox_variables();
        site::add_missing(&mut variables, &agent.site_variables.borrow());
        Ok(Self {
            variables,
            owner: (user.uid, user.gid),
        })
    }

    /// Writes the environment as a JSON object. Readers see the old one or the new one.
    ///
    /// Does nothing unless the agent is process 1: otherwise the file system is not its own.
    pub fn write(&self) -> io::Result<()> {
        if std::process::id() != 1 {
            return Ok(());
        }
        let text = serde_json::to_vec(&self.variables)?;
        let (uid, gid) = self.owner;
        // The rest of a failed attempt may have another owner.
        let _ = fs::remove_file(NEXT);
        fs::write(NEXT, text)?;
        fs::set_permissions(NEXT, Permissions::from_mode(0o600))?;
        chown(NEXT, Some(uid), Some(gid))?;
        fs::rename(NEXT, FILE)
    }
}
