//! File with the sandbox's environment. It is for programs that were started before the sandbox
//! received its identity.
//!
//! Processes that the agent starts receive the environment at their start. A server that was
//! started in the template's snapshot reads this file instead.

use super::site;
use crate::rest::error::RestError;
use crate::state::Agent;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};

const FILE: &str = "/run/jiffy/environment";
const NEXT: &str = "/run/jiffy/.environment";

/// Environment of the sandbox. A worker writes it to the file.
pub struct EnvironmentFile {
    /// All variables.
    pub variables: BTreeMap<String, String>,
    /// User and group of the only user that may read the file.
    pub owner: (u32, u32),
}

impl EnvironmentFile {
    /// Returns the current environment, for a file that only the default user can read.
    pub async fn of(agent: &Agent) -> Result<Self, RestError> {
        let user = agent.find_user::<RestError>(None).await?;
        let mut variables = agent.sandbox_variables();
        site::add_missing(&mut variables, &agent.site_variables.borrow());
        Ok(Self {
            variables,
            owner: (user.uid, user.gid),
        })
    }

    /// Writes the environment as a JSON object. The file is replaced atomically.
    ///
    /// Does nothing unless the agent is process 1, since otherwise the file system does not belong
    /// to it.
    pub fn write(&self) -> io::Result<()> {
        if std::process::id() != 1 {
            return Ok(());
        }
        let text = serde_json::to_vec(&self.variables)?;
        let (uid, gid) = self.owner;
        // The remains of a failed attempt may have another owner.
        let _ = fs::remove_file(NEXT);
        fs::write(NEXT, text)?;
        fs::set_permissions(NEXT, Permissions::from_mode(0o600))?;
        chown(NEXT, Some(uid), Some(gid))?;
        fs::rename(NEXT, FILE)
    }
}
