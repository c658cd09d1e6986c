//! Applies the changes that a guest made in its copy of a tree to the tree of this host.
//!
//! Directories of this host are only accessed through descriptors, and never by a path whose
//! components may be replaced with symbolic links. Symbolic links are never followed.

use super::survey::{MAX_DEPTH, TreeEntries};
use anyhow::{Context, bail, ensure};
use jiffy_archive::set_mode;
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, chownat, fchmod,
    fchown, fstat, futimens, mkdirat, openat, readlinkat, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Permissions that are accepted from a guest: no setuid, setgid or sticky bits.
const PERMISSIONS: u32 = 0o777;

/// Applies the changes of a guest.
pub struct Apply<'a> {
    /// Entries that were copied to the guest. If such an entry is missing in the guest's copy, the
    /// guest removed it.
    sent: &'a TreeEntries,
}

/// Directory of the guest's copy and the corresponding directory of this host.
struct Pair<'a> {
    staged: &'a File,
    target: &'a File,
    /// Path relative to the volume.
    path: &'a Path,
    depth: usize,
}

/// Returns the kind of an entry.
fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Returns the permissions that are accepted from a guest.
fn mode(stat: &Stat) -> Mode {
    Mode::from_raw_mode(stat.st_mode & PERMISSIONS)
}

/// Returns the metadata of an entry without following symbolic links. `None` if the entry does not
/// exist.
fn lookup(directory: &File, name: &OsStr) -> io::Result<Option<Stat>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns the names of the entries of a directory.
fn names(directory: &File) -> io::Result<Vec<OsString>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            all.push(name.to_owned());
        }
    }
    Ok(all)
}

/// Opens a directory. Fails if the entry is a symbolic link.
fn open_directory(directory: &File, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(directory, name, flags, Mode::empty())?.into())
}

/// Returns an unused file name.
fn temporary_name() -> anyhow::Result<OsString> {
    let id = jiffy_engine_api::new_id().context("cannot generate a random file name")?;
    Ok(format!(".jiffy-copy-{id}").into())
}

impl<'a> Apply<'a> {
    /// Creates an instance for a tree whose entries `sent` were copied to the guest.
    pub fn new(sent: &'a TreeEntries) -> Self {
        Self { sent }
    }

    /// Makes the contents of `target` equal to `staged`, except for entries that were not copied to
    /// the guest.
    pub fn directory(&self, staged: &File, target: &File) -> anyhow::Result<()> {
        self.apply_directory(&Pair {
            staged,
            target,
            path: Path::new(""),
            depth: 0,
        })
    }

    /// Makes file `name` of `target` equal to file `from` of `staged`.
    pub fn file(
        &self,
        staged: &File,
        from: &OsStr,
        target: &File,
        name: &OsStr,
    ) -> anyhow::Result<()> {
        let stat = lookup(staged, from)?.context("the guest removed the file")?;
        ensure!(
            kind(&stat) == FileType::RegularFile,
            "the guest replaced the file with another kind of entry"
        );
        self.replace_file(staged, from, &stat, target, name)
    }

    /// Applies the changes of a directory: writes the entries of the guest's copy, then removes the
    /// entries that the guest removed.
    fn apply_directory(&self, pair: &Pair<'_>) -> anyhow::Result<()> {
        ensure!(
            pair.depth <= MAX_DEPTH,
            "the directory has more than {MAX_DEPTH} levels"
        );
        let mut staged_names = HashSet::new();
        for name in names(pair.staged)? {
            let path = pair.path.join(&name);
            self.apply_entry(pair, &name, &path)
                .with_context(|| format!("cannot write {}", path.display()))?;
            staged_names.insert(name);
        }
        for name in names(pair.target)? {
            // Entries that this host created meanwhile were not sent, and are retained.
            let path = pair.path.join(&name);
            if !staged_names.contains(&name) && self.sent.has(&path) {
                self.remove(pair.target, &name, &path)
                    .with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Makes an entry of this host equal to the entry of the guest's copy.
    fn apply_entry(&self, pair: &Pair<'_>, name: &OsStr, path: &Path) -> anyhow::Result<()> {
        let Pair { staged, target, .. } = *pair;
        let Some(stat) = lookup(staged, name)? else {
            return Ok(());
        };
        let before = lookup(target, name)?;
        let same_kind = before.is_some_and(|before| kind(&before) == kind(&stat));
        match kind(&stat) {
            FileType::Directory => {
                if !same_kind {
                    self.clear(target, name, path, before.as_ref())?;
                    // The guest's mode is set after the contents, because it may deny writing to
                    // this process.
                    mkdirat(target, name, Mode::RWXU)?;
                    copy_owner(target, name, &fstat(target)?);
                }
                let inner = open_directory(target, name)?;
                self.apply_directory(&Pair {
                    staged: &open_directory(staged, name)?,
                    target: &inner,
                    path,
                    depth: pair.depth + 1,
                })?;
                if !same_kind || before.is_some_and(|before| mode(&before) != mode(&stat)) {
                    fchmod(&inner, mode(&stat))?;
                }
                Ok(())
            }
            FileType::RegularFile => {
                if !same_kind {
                    self.clear(target, name, path, before.as_ref())?;
                }
                self.replace_file(staged, name, &stat, target, name)
            }
            FileType::Symlink => {
                let to = readlinkat(staged, name, Vec::new())?;
                if same_kind && readlinkat(target, name, Vec::new())? == to {
                    return Ok(());
                }
                if !same_kind {
                    self.clear(target, name, path, before.as_ref())?;
                }
                // A link cannot be changed: a new link replaces it atomically.
                let new = temporary_name()?;
                symlinkat(&to, target, &new)?;
                copy_owner(
                    target,
                    &new,
                    &before
                        .filter(|_| same_kind)
                        .map_or_else(|| fstat(target), Ok)?,
                );
                // The previous entry is unchanged if this fails.
                renameat(target, &new, target, name).map_err(|e| {
                    let _ = unlinkat(target, &new, AtFlags::empty());
                    e.into()
                })
            }
            // The unpacker of untrusted archives creates no other kinds of entries.
            _ => Ok(()),
        }
    }

    /// Replaces a file atomically if it differs.
    fn replace_file(
        &self,
        staged: &File,
        from: &OsStr,
        stat: &Stat,
        target: &File,
        name: &OsStr,
    ) -> anyhow::Result<()> {
        let before = lookup(target, name)?;
        let before = before.filter(|before| kind(before) == FileType::RegularFile);
        // The same size and time count as unchanged, as in rsync.
        let time = |s: &Stat| (s.st_mtime, s.st_mtime_nsec);
        if let Some(before) = before
            && before.st_size == stat.st_size
            && time(&before) == time(stat)
        {
            if mode(&before) != mode(stat) {
                set_mode(target, name, mode(stat))?;
            }
            return Ok(());
        }
        // `NONBLOCK`: opening a named pipe must not wait.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut source = File::from(openat(staged, from, flags, Mode::empty())?);
        // Write the file under another name first: this host never has an incomplete file.
        let new = temporary_name()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let private = Mode::RUSR | Mode::WUSR;
        let mut copy = File::from(openat(target, &new, flags, private)?);
        let owner = before.map_or_else(|| fstat(target), Ok)?;
        let result = io::copy(&mut source, &mut copy).and_then(|_| {
            // Only root may change the owner. Otherwise the files belong to the user of this
            // process.
            let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
            let _ = fchown(&copy, Some(uid), Some(gid));
            fchmod(&copy, mode(stat))?;
            // The type of the nanoseconds depends on the backend of rustix.
            #[allow(clippy::useless_conversion)]
            let time = Timespec {
                tv_sec: stat.st_mtime,
                tv_nsec: stat.st_mtime_nsec.try_into().unwrap_or_default(),
            };
            let times = Timestamps {
                last_access: time,
                last_modification: time,
            };
            futimens(&copy, &times)?;
            Ok(renameat(target, &new, target, name)?)
        });
        result.inspect_err(|_| {
            // The caller receives the error of the copy, not an error of this removal.
            let _ = unlinkat(target, &new, AtFlags::empty());
        })?;
        Ok(())
    }

    /// Removes the entry `before` of this host, so that an entry of another kind can replace it.
    /// Fails if a directory remains because it contains entries that were not copied to the guest.
    fn clear(
        &self,
        target: &File,
        name: &OsStr,
        path: &Path,
        before: Option<&Stat>,
    ) -> anyhow::Result<()> {
        if before.is_none() {
            return Ok(());
        }
        self.remove(target, name, path)?;
        if lookup(target, name)?.is_some() {
            bail!("the guest replaced a directory that contains new files of this host");
        }
        Ok(())
    }

    /// Removes an entry. In a directory, removes only entries that were copied to the guest.
    fn remove(&self, directory: &File, name: &OsStr, path: &Path) -> anyhow::Result<()> {
        let Some(stat) = lookup(directory, name)? else {
            return Ok(());
        };
        if kind(&stat) != FileType::Directory {
            return Ok(unlinkat(directory, name, AtFlags::empty())?);
        }
        // Entries that this host created stay, and so does their directory.
        let inner = open_directory(directory, name)?;
        for child in names(&inner)? {
            let path: PathBuf = path.join(&child);
            if self.sent.has(&path) {
                self.remove(&inner, &child, &path)?;
            }
        }
        match unlinkat(directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOTEMPTY) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// Copies the owner of another entry to an entry, if this process has the privilege.
fn copy_owner(directory: impl AsFd, name: &OsStr, owner: &Stat) {
    let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
    let _ = chownat(
        directory,
        name,
        Some(uid),
        Some(gid),
        AtFlags::SYMLINK_NOFOLLOW,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    /// Directories of a test.
    struct Trees {
        dir: tempfile::TempDir,
    }

    impl Trees {
        /// Creates a tree and a copy of it.
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let host = dir.path().join("host");
            fs::create_dir_all(host.join("sub/deep")).unwrap();
            fs::write(host.join("same"), "same").unwrap();
            fs::write(host.join("changed"), "before").unwrap();
            fs::write(host.join("removed"), "gone").unwrap();
            fs::write(host.join("sub/deep/removed"), "gone").unwrap();
            symlink("same", host.join("link")).unwrap();
            let status = std::process::Command::new("cp")
                .args(["-a"])
                .args([&host, &dir.path().join("guest")])
                .status();
            assert!(status.unwrap().success());
            Self { dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn sent(&self) -> TreeEntries {
            TreeEntries::of(&self.path("host"), 1 << 20, 100).unwrap()
        }

        fn apply(&self, sent: &TreeEntries) -> anyhow::Result<()> {
            let open = |name| File::open(self.path(name)).unwrap();
            Apply::new(sent).directory(&open("guest"), &open("host"))
        }

        fn text(&self, name: &str) -> String {
            fs::read_to_string(self.path("host").join(name)).unwrap()
        }
    }

    #[test]
    fn only_changes_additions_and_removals_of_the_guest_are_applied() {
        let trees = Trees::new();
        let sent = trees.sent();
        let guest = trees.path("guest");
        fs::write(guest.join("changed"), "after!").unwrap();
        fs::create_dir(guest.join("new")).unwrap();
        fs::write(guest.join("new/file"), "new").unwrap();
        fs::set_permissions(guest.join("new/file"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::remove_file(guest.join("removed")).unwrap();
        fs::remove_dir_all(guest.join("sub")).unwrap();
        fs::remove_file(guest.join("link")).unwrap();
        symlink("changed", guest.join("link")).unwrap();
        // Files that this host created while the command ran. They were not sent to the guest.
        fs::write(trees.path("host/later"), "later").unwrap();
        fs::write(trees.path("host/sub/later"), "later").unwrap();
        let inode = |name: &str| fs::metadata(trees.path(name)).unwrap().ino();
        let same = inode("host/same");
        trees.apply(&sent).unwrap();
        assert_eq!(trees.text("changed"), "after!");
        assert_eq!(trees.text("new/file"), "new");
        let mode = fs::metadata(trees.path("host/new/file")).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o755);
        assert!(!trees.path("host/removed").exists() && !trees.path("host/sub/deep").exists());
        assert_eq!(trees.text("later") + &trees.text("sub/later"), "laterlater");
        assert_eq!(
            fs::read_link(trees.path("host/link")).unwrap(),
            Path::new("changed")
        );
        assert_eq!(inode("host/same"), same, "unchanged files are not replaced");
        let remaining = fs::read_dir(trees.path("host")).unwrap().flatten();
        let temporary_files =
            remaining.filter(|e| e.file_name().to_string_lossy().starts_with(".jiffy"));
        assert_eq!(temporary_files.count(), 0);
    }

    #[test]
    fn nothing_is_written_or_removed_through_a_symbolic_link() {
        let trees = Trees::new();
        let sent = trees.sent();
        let outside = trees.path("outside");
        fs::create_dir_all(outside.join("deep")).unwrap();
        fs::write(outside.join("deep/removed"), "mine").unwrap();
        fs::write(outside.join("changed"), "mine").unwrap();
        // An earlier command of an untrusted guest replaced entries with symbolic links.
        fs::remove_dir_all(trees.path("host/sub")).unwrap();
        symlink(&outside, trees.path("host/sub")).unwrap();
        fs::remove_file(trees.path("host/changed")).unwrap();
        symlink(outside.join("changed"), trees.path("host/changed")).unwrap();
        fs::write(trees.path("guest/changed"), "theirs").unwrap();
        fs::write(trees.path("guest/sub/new"), "theirs").unwrap();
        fs::remove_file(trees.path("guest/sub/deep/removed")).unwrap();
        trees.apply(&sent).unwrap();
        assert_eq!(fs::read_to_string(outside.join("changed")).unwrap(), "mine");
        assert_eq!(
            fs::read_to_string(outside.join("deep/removed")).unwrap(),
            "mine"
        );
        assert!(!outside.join("new").exists());
        assert_eq!(trees.text("changed"), "theirs");
        assert_eq!(trees.text("sub/new"), "theirs");
    }

    #[test]
    fn a_tree_that_exceeds_the_limits_is_rejected() {
        let trees = Trees::new();
        let host = trees.path("host");
        File::create(host.join("sparse"))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert!(TreeEntries::of(&host, 1 << 30, 100).is_err());
        assert!(TreeEntries::of(&host, u64::MAX, 3).is_err());
        assert!(
            TreeEntries::of(&host, u64::MAX, 100)
                .unwrap()
                .has(Path::new("sub/deep/removed"))
        );
    }
}
