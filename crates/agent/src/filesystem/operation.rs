//! Creation and removal of directories on behalf of a user.

use super::remove_tree::remove_tree;
use crate::sys;
use crate::users::User;
use crate::workers::Progress;
use rustix::fs::{self, Dir, Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

/// Creates a directory and missing parents. The user owns the new directories.
///
/// The user may replace a new directory by a symbolic link at any time. Therefore each directory is
/// created in an open parent, and its owner is changed through a descriptor.
pub fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    open_or_create(path, user).map(drop)
}

/// Opens a directory. Creates it and its missing parents on behalf of `user`, to whom they then
/// belong.
fn open_or_create(path: &Path, user: &User) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match fs::open(path, flags, Mode::empty()) {
        Ok(found) => return Ok(found),
        Err(Errno::NOTDIR) => return Err(Errno::NOTDIR.into()),
        Err(_) => {}
    }
    let parent = match path.parent() {
        // A relative path, whose parent is the working directory.
        Some(parent) if parent.as_os_str().is_empty() => open_or_create(Path::new("."), user)?,
        Some(parent) => open_or_create(parent, user)?,
        None => return Err(Errno::NOENT.into()),
    };
    let name = path.components().next_back();
    let name = name.map_or(path.as_os_str(), Component::as_os_str);
    match fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
        // Another process may have created the directory meanwhile, or a link to a directory.
        Err(Errno::EXIST) => match fs::openat(&parent, name, flags, Mode::empty()) {
            Ok(found) => return Ok(found),
            Err(_) => return Err(Errno::EXIST.into()),
        },
        other => other?,
    }
    let new = fs::openat(
        &parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    give(&new, user)?;
    Ok(new)
}

/// Makes the user the owner of a new directory. Does nothing if another process has replaced the
/// directory by one with entries, which the user may be forbidden to change.
fn give(new: &OwnedFd, user: &User) -> io::Result<()> {
    for entry in Dir::read_from(new)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            return Ok(());
        }
    }
    sys::set_owner(new, user.uid, user.gid)
}

/// Removes a file, or a directory with its contents. A missing file is not an error.
pub fn remove(path: &Path, progress: &Progress) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        // A symbolic link to a directory is not a directory here: only the link is removed.
        Ok(found) if found.is_dir() => remove_tree(path, progress),
        Ok(_) => std::fs::remove_file(path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Returns a user without privileges.
    fn nobody() -> User {
        User {
            uid: 65534,
            gid: 65534,
            ..User::root()
        }
    }

    #[test]
    fn a_new_directory_that_was_replaced_by_another_keeps_its_owner() {
        let top = tempfile::tempdir().unwrap();
        let owner = |path: &Path| std::fs::metadata(path).unwrap().uid();
        let before = owner(top.path());
        std::fs::create_dir(top.path().join("entry")).unwrap();
        let open = |path: &Path| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            fs::open(path, flags, Mode::empty()).unwrap()
        };
        give(&open(top.path()), &nobody()).unwrap();
        assert_eq!(owner(top.path()), before);
        make_dirs(&top.path().join("entry/../new/./deep"), &nobody()).unwrap();
        let expected = if before == 0 { 65534 } else { before };
        assert_eq!(owner(&top.path().join("new")), expected);
        assert_eq!(owner(&top.path().join("new/deep")), expected);
        assert_eq!(owner(&top.path().join("entry")), before);
    }

    #[test]
    fn the_target_of_a_link_that_replaces_a_new_directory_keeps_its_owner() {
        // SAFETY: the call takes no arguments.
        if unsafe { libc::geteuid() } != 0 {
            return;
        }
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        std::fs::create_dir_all(at("victim/new")).unwrap();
        std::fs::write(at("victim/new/file"), "").unwrap();
        for (swapped, target) in [("parent/new", "victim/new"), ("parent", "victim")] {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                // The user replaces a new directory by a link as soon as it exists.
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        if std::fs::rename(at(swapped), at("old")).is_ok() {
                            let _ = symlink(at(target), at(swapped));
                        }
                        let _ = std::fs::remove_dir_all(at("old"));
                        let _ = std::fs::remove_file(at("old"));
                    }
                });
                for _ in 0..2000 {
                    let _ = make_dirs(&at("parent/new"), &nobody());
                    let _ = std::fs::remove_file(at(swapped));
                }
                done.store(true, Ordering::Relaxed);
            });
            let _ = std::fs::remove_dir_all(at("parent"));
            let _ = std::fs::remove_file(at("parent"));
        }
        for name in ["victim", "victim/new", "victim/new/file"] {
            assert_eq!(std::fs::metadata(at(name)).unwrap().uid(), 0, "{name}");
        }
    }
}
