//! How programs notice that they are in a copy.
//!
//! What a program keeps in its memory (random generators, counters, caches of identities) is copied with it, and nobody but the
//! program can renew it. The file tells it when: its line is another one after every time that the guest was told who it is.

use super::identity::random_id;
use super::mount::{directory, mount};
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;

/// The agent's own directory: a file system of its own, so that a full `/run` cannot keep a clone from its identity.
pub const HOME: &str = "/run/jiffy";
const FILE: &str = "/run/jiffy/generation";
const NEXT: &str = "/run/jiffy/.generation";

/// Makes [`HOME`].
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

/// Writes a new line: the sandbox's id, a space, and 128 random bits in hexadecimal. Readers see the old line or the new one.
pub fn renew(id: &str) -> io::Result<()> {
    std::fs::write(NEXT, format!("{id} {}\n", random_id()?))?;
    std::fs::set_permissions(NEXT, Permissions::from_mode(0o644))?;
    std::fs::rename(NEXT, FILE)
}
