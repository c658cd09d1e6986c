//! Generation file, whose content changes with every identity. Programs compare it to detect that
//! they run in a clone: a guest that was restored from a snapshot of another sandbox.
//!
//! The *identity* of a sandbox is its id, host name, entropy, clock and settings. A guest receives
//! an identity before its sandbox can be used.
//!
//! State in a program's memory (random generators, counters, caches of identities) is copied with
//! the program, and only the program can renew it.

use super::mount::{directory, mount};
use crate::sys;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;

/// Directory of the agent. It is a separate file system, so that a full `/run` cannot prevent that
/// a clone receives its identity.
pub const HOME: &str = "/run/jiffy";
/// Path of the generation file.
const FILE: &str = "/run/jiffy/generation";
/// New version of [`FILE`], before it replaces the file.
const NEXT: &str = "/run/jiffy/.generation";

/// Creates [`HOME`].
pub fn make_home() -> Result<(), String> {
    directory(HOME, 0o755);
    mount(
        c"tmpfs",
        c"/run/jiffy",
        c"tmpfs",
        libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
        c"mode=755,size=2m",
    )
}

/// Writes a new line: the sandbox's id, a space, and 128 random bits in hexadecimal. The file is
/// replaced atomically.
pub fn renew(id: &str) -> io::Result<()> {
    std::fs::write(NEXT, format!("{id} {}\n", sys::random_id()?))?;
    std::fs::set_permissions(NEXT, Permissions::from_mode(0o644))?;
    std::fs::rename(NEXT, FILE)
}
