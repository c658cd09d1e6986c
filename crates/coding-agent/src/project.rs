//! [`Project`]: the directory of the host whose files a session synchronises with its sandbox.

use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};

/// Directories of the system. In a sandbox, they have files of the template.
const SYSTEM_DIRECTORIES: [&str; 13] = [
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var/lib/jiffy-shell",
];
/// Directories that must not be a project themselves, unlike directories in them.
const SHARED_DIRECTORIES: [&str; 8] = [
    "/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp",
];
/// Maximum number of characters of a directory in the name of a project.
const MAX_NAME_CHARS: usize = 20;
/// Number of hexadecimal digits of the hash in the name of a project.
const HASH_DIGITS: usize = 10;

/// Directory that a session synchronises. It has the same path on the host and in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    directory: PathBuf,
    state: PathBuf,
}

impl Project {
    /// Returns the project of a directory: an ancestor that has a session, otherwise the innermost
    /// ancestor with a Git repository, otherwise the directory itself.
    pub fn find(start: &Path) -> anyhow::Result<Self> {
        let start = resolved(start)?;
        let sessions = state_directory()?;
        let has_session = |directory: &&Path| has_session(&sessions, directory);
        let directory = start
            .ancestors()
            .find(has_session)
            .or_else(|| start.ancestors().find(|a| a.join(".git").exists()))
            .unwrap_or(&start);
        Self::of(directory.to_owned(), &sessions)
    }

    /// Returns the project with this directory.
    pub fn at(directory: &Path) -> anyhow::Result<Self> {
        Self::of(resolved(directory)?, &state_directory()?)
    }

    /// Returns the project in a directory. Rejects directories in which an agent could change more
    /// than a project.
    fn of(directory: PathBuf, sessions: &Path) -> anyhow::Result<Self> {
        let shown = directory.display();
        let is_system = |system: &&str| directory.starts_with(system);
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let home = home.and_then(|home| home.canonicalize().ok());
        ensure!(
            !SYSTEM_DIRECTORIES.iter().any(is_system)
                && !SHARED_DIRECTORIES.iter().any(|d| directory == Path::new(d))
                && home.is_none_or(|home| !home.starts_with(&directory)),
            "{shown} cannot be a project: it is a home directory or a directory of the system; \
             select a directory in it with --project"
        );
        ensure!(
            directory
                .to_str()
                .is_some_and(|text| !text.chars().any(char::is_control)),
            "{shown} cannot be a project: its path is not UTF-8 or has control characters"
        );
        ensure!(
            !sessions.starts_with(&directory),
            "{shown} cannot be a project: it contains the state of sessions"
        );
        let state = sessions.join(key(&directory));
        Ok(Self { directory, state })
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of the directory as the agent of the sandbox receives it.
    pub fn path_bytes(&self) -> &[u8] {
        self.directory.as_os_str().as_encoded_bytes()
    }

    /// Returns the directory with the state of the session.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Returns whether the project has a session.
    pub fn has_session(&self) -> bool {
        self.state.join("session.json").exists()
    }

    /// Returns the name of the sandbox.
    pub fn sandbox_name(&self) -> String {
        format!("agent-{}", key(&self.directory))
    }
}

fn resolved(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize()
        .with_context(|| format!("cannot find the directory {}", path.display()))
}

/// Returns the directory with the states of all sessions of this user.
fn state_directory() -> anyhow::Result<PathBuf> {
    let state = match std::env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => {
            let home = std::env::var_os("HOME").context("HOME is not set")?;
            PathBuf::from(home).join(".local/state")
        }
    };
    Ok(state.join("jiffy/agent-shell"))
}

fn has_session(sessions: &Path, directory: &Path) -> bool {
    sessions.join(key(directory)).join("session.json").exists()
}

/// Returns the unique name of a project: its last component for people, and a hash.
fn key(directory: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let is_plain = |c: &char| c.is_ascii_alphanumeric();
    let name: String = name.chars().filter(is_plain).take(MAX_NAME_CHARS).collect();
    let hash = blake3::hash(directory.as_os_str().as_bytes()).to_hex();
    format!("{}-{}", name.to_ascii_lowercase(), &hash[..HASH_DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_and_system_directories_are_rejected() {
        let sessions = Path::new("/var/state");
        let of = |path: &str| Project::of(path.into(), sessions);
        for path in [
            "/",
            "/etc",
            "/usr/src",
            "/tmp",
            "/home",
            "/var",
            "/var/state",
        ] {
            assert!(of(path).is_err(), "{path}");
        }
        let project = of("/srv/My Project").unwrap();
        assert!(project.sandbox_name().starts_with("agent-myproject-"));
        assert_ne!(project.state(), of("/srv/myproject").unwrap().state());
    }
}
