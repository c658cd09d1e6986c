//! Files in the guest that contain parts of the sandbox's identity: host name, machine id and
//! labels.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.

use crate::boot::generation::HOME;
use crate::settings::SandboxLabels;
use crate::sys;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::symlink;
use std::path::Path;

/// Suffix of the line in `/etc/hosts` that the agent adds and later replaces.
const HOSTS_MARK: &str = "# jiffy: this sandbox";
/// Content of `/etc/hosts` if the image has no such file.
const HOSTS_DEFAULT: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
/// Maximum size of an `/etc/hosts` to which the name of the sandbox is added.
const MAX_HOSTS_BYTES: u64 = 4 << 20;
/// Directory in which E2B's clients and templates search for the labels of the sandbox.
const LABELS_LINK: &str = "/run/e2b";

/// Writes each label to a file named after its variable. The files are below `/run/jiffy`
/// ([`HOME`]), which is a file system of its own, so that a full `/run` does not matter.
/// [`LABELS_LINK`] is a symbolic link to their directory.
pub fn write_labels(labels: &SandboxLabels) -> io::Result<()> {
    // Only process 1 owns the file system. In tests, the agent is an ordinary process of a host.
    if std::process::id() != 1 {
        return Ok(());
    }
    let directory = Path::new(HOME).join("e2b");
    fs::create_dir_all(&directory)?;
    let given: Vec<_> = labels.variables().collect();
    for (name, value) in &given {
        // The file is replaced atomically, so that a reader never finds an incomplete value.
        let next = directory.join(".next");
        fs::write(&next, value)?;
        fs::rename(next, directory.join(format!(".{name}")))?;
    }
    // Remove labels of an earlier identity that the current one does not have.
    for entry in fs::read_dir(&directory)?.flatten() {
        let is_given = |(name, _): &(&str, &str)| entry.file_name() == *format!(".{name}");
        if !given.iter().any(is_given) {
            fs::remove_file(entry.path())?;
        }
    }
    // The target is relative to `/run`, the directory of the link. Ignore the error: the link may
    // exist already, or the sandbox may have a file of this name.
    let _ = symlink("jiffy/e2b", LABELS_LINK);
    Ok(())
}

/// Sets the host name, also in `/etc/hosts`.
pub fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: the pointer and length describe `name`.
    sys::check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })?;
    let path = Path::new("/etc/hosts");
    let before = match sys::read_regular(path, MAX_HOSTS_BYTES) {
        // A file of the maximum size is probably longer. Rewriting it would remove its end.
        Ok(before) if before.len() as u64 == MAX_HOSTS_BYTES => return Ok(()),
        Ok(before) => String::from_utf8(before),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        // The content is unknown, and must not be replaced.
        Err(_) => return Ok(()),
    };
    if let Ok(before) = before {
        let after = hosts(&before, name);
        if before != after {
            // Ignore the error: a root file system without /etc cannot resolve names anyway.
            let _ = write_over("/etc/hosts", &after);
        }
    }
    Ok(())
}

/// Returns `before` with the name of the sandbox in place of the earlier name.
fn hosts(before: &str, name: &str) -> String {
    let base = if before.is_empty() {
        HOSTS_DEFAULT
    } else {
        before
    };
    let mut text: String = base
        .lines()
        .filter(|line| !line.ends_with(HOSTS_MARK))
        .flat_map(|line| [line, "\n"])
        .collect();
    let _ = writeln!(text, "127.0.1.1 {name} {HOSTS_MARK}");
    text
}

/// Generates a new machine id. A file that is not a regular file contains no id to replace.
pub fn new_machine_id() -> io::Result<()> {
    let id = sys::random_id()? + "\n";
    match write_over("/etc/machine-id", &id) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all("/etc")?;
            write_over("/etc/machine-id", &id)
        }
        // The errors of `open_regular` for files that are not regular files.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENXIO)) => Ok(()),
        other => other,
    }
}

/// Overwrites a small file without first releasing its block, since no other block may be free on a
/// full disk.
fn write_over(path: &str, text: &str) -> io::Result<()> {
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(false);
    let mut file = sys::open_regular(Path::new(path), options)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_name_is_in_etc_hosts_once_and_other_lines_remain() {
        let first = hosts("10.0.0.1 db", "abc");
        assert_eq!(first, format!("10.0.0.1 db\n127.0.1.1 abc {HOSTS_MARK}\n"));
        let second = hosts(&first, "xyz");
        assert_eq!(second, format!("10.0.0.1 db\n127.0.1.1 xyz {HOSTS_MARK}\n"));
        assert!(hosts("", "abc").starts_with("127.0.0.1 localhost\n"));
    }
}
