//! File with the sandbox's environment. It is for programs that were started before the sandbox
//! received its identity.
//!
//! Processes that the agent starts receive the environment at their start. A server that was
//! started in the template's snapshot reads this file instead.
//!
//! The *site* is the network in which the sandbox runs. Its variables make programs use its
//! certificate authorities and its proxy.

use super::site;
use crate::rest::error::RestError;
use crate::state::Agent;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::Path;

/// File with the environment of the sandbox, a JSON object.
const FILE: &str = "/run/jiffy/environment";
/// New version of [`FILE`], before it replaces the file.
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
        // A variable of the sandbox takes precedence over the site's variable of the same name.
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
        // The remains of a failed attempt may have another owner, who could read the new content.
        let _ = fs::remove_file(NEXT);
        let mut file = create_private(Path::new(NEXT))?;
        file.write_all(&text)?;
        fchown(&file, Some(uid), Some(gid))?;
        fs::rename(NEXT, FILE)
    }
}

/// Creates a file that only its owner can read from the beginning: another user could otherwise
/// open the file before its mode is changed.
fn create_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn only_the_owner_can_read_the_environment_from_its_creation() {
        let directory = tempfile::tempdir().unwrap();
        let file = create_private(&directory.path().join("file")).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        // A file of another user is not written to.
        assert!(create_private(&directory.path().join("file")).is_err());
    }
}
