//! Differences between a tree of a guest and the one of this host that it was given, carried over.
//!
//! The tree of this host is only entered by descriptors of directories, never by a path through a
//! name that is a symbolic link by now: links are entries like others.

use super::survey::{MAX_DEPTH, Survey};
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

/// Permissions that come out of a guest: neither setuid nor sticky.
const PERMISSIONS: u32 = 0o777;

/// Carries over what differs.
pub struct Apply<'a> {
    /// Entries that the guest was given: what of them is missing was removed there.
    sent: &'a Survey,
}

/// A directory of the guest's tree, and the one of this host that it belongs to.
struct Pair<'a> {
    staged: &'a File,
    target: &'a File,
    /// Below the volume.
    path: &'a Path,
    depth: usize,
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn mode(stat: &Stat) -> Mode {
    Mode::from_raw_mode(stat.st_mode & PERMISSIONS)
}

/// An entry as it is, not what a link leads to; none: there is no such entry.
fn look(directory: &File, name: &OsStr) -> io::Result<Option<Stat>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

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

fn enter(directory: &File, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(directory, name, flags, Mode::empty())?.into())
}

/// A name that nothing has.
fn temporary() -> anyhow::Result<OsString> {
    let word = jiffy_engine_api::new_id().context("the host gives no random bytes")?;
    Ok(format!(".jiffy-copy-{word}").into())
}

impl<'a> Apply<'a> {
    /// For a tree of which the guest was given `sent`.
    pub fn new(sent: &'a Survey) -> Self {
        Self { sent }
    }

    /// Makes `target` what `staged` is, except for entries that the guest never saw.
    pub fn directory(&self, staged: &File, target: &File) -> anyhow::Result<()> {
        self.pair(&Pair {
            staged,
            target,
            path: Path::new(""),
            depth: 0,
        })
    }

    /// Makes file `name` of `target` what file `from` of `staged` is.
    pub fn file(
        &self,
        staged: &File,
        from: &OsStr,
        target: &File,
        name: &OsStr,
    ) -> anyhow::Result<()> {
        let stat = look(staged, from)?.context("it is gone in the guest")?;
        ensure!(
            kind(&stat) == FileType::RegularFile,
            "it is no file in the guest any more"
        );
        self.replace_file(staged, from, &stat, target, name)
    }

    fn pair(&self, pair: &Pair<'_>) -> anyhow::Result<()> {
        ensure!(
            pair.depth <= MAX_DEPTH,
            "it has more than {MAX_DEPTH} levels"
        );
        let mut there = HashSet::new();
        for name in names(pair.staged)? {
            let path = pair.path.join(&name);
            self.entry(pair, &name, &path)
                .with_context(|| format!("cannot write {}", path.display()))?;
            there.insert(name);
        }
        for name in names(pair.target)? {
            let path = pair.path.join(&name);
            if !there.contains(&name) && self.sent.has(&path) {
                self.remove(pair.target, &name, &path)
                    .with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    fn entry(&self, pair: &Pair<'_>, name: &OsStr, path: &Path) -> anyhow::Result<()> {
        let Pair { staged, target, .. } = *pair;
        let Some(stat) = look(staged, name)? else {
            return Ok(());
        };
        let before = look(target, name)?;
        let same_kind = before.is_some_and(|before| kind(&before) == kind(&stat));
        match kind(&stat) {
            FileType::Directory => {
                if !same_kind {
                    self.clear(target, name, path, before.as_ref())?;
                    mkdirat(target, name, Mode::RWXU)?;
                    copy_owner(target, name, &fstat(target)?);
                }
                let inner = enter(target, name)?;
                self.pair(&Pair {
                    staged: &enter(staged, name)?,
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
                let new = temporary()?;
                symlinkat(&to, target, &new)?;
                copy_owner(
                    target,
                    &new,
                    &before
                        .filter(|_| same_kind)
                        .map_or_else(|| fstat(target), Ok)?,
                );
                renameat(target, &new, target, name).map_err(|e| {
                    let _ = unlinkat(target, &new, AtFlags::empty());
                    e.into()
                })
            }
            // An archive of a stranger has no others.
            _ => Ok(()),
        }
    }

    /// Replaces a file at once, if it differs.
    fn replace_file(
        &self,
        staged: &File,
        from: &OsStr,
        stat: &Stat,
        target: &File,
        name: &OsStr,
    ) -> anyhow::Result<()> {
        let before = look(target, name)?;
        let before = before.filter(|before| kind(before) == FileType::RegularFile);
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
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut source = File::from(openat(staged, from, flags, Mode::empty())?);
        let new = temporary()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let private = Mode::RUSR | Mode::WUSR;
        let mut copy = File::from(openat(target, &new, flags, private)?);
        let owner = before.map_or_else(|| fstat(target), Ok)?;
        let written = io::copy(&mut source, &mut copy).and_then(|_| {
            // Only root may give files away; others keep what they write.
            let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
            let _ = fchown(&copy, Some(uid), Some(gid));
            fchmod(&copy, mode(stat))?;
            // The type of nanoseconds is that of the backend that rustix is built with.
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
        written.inspect_err(|_| {
            let _ = unlinkat(target, &new, AtFlags::empty());
        })?;
        Ok(())
    }

    /// Makes room for an entry of another kind.
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
        if look(target, name)?.is_some() {
            bail!("the guest made something else of a directory that has files of this host");
        }
        Ok(())
    }

    /// Removes an entry; of a directory, what the guest was given of it.
    fn remove(&self, directory: &File, name: &OsStr, path: &Path) -> anyhow::Result<()> {
        let Some(stat) = look(directory, name)? else {
            return Ok(());
        };
        if kind(&stat) != FileType::Directory {
            return Ok(unlinkat(directory, name, AtFlags::empty())?);
        }
        let inner = enter(directory, name)?;
        for below in names(&inner)? {
            let path: PathBuf = path.join(&below);
            if self.sent.has(&path) {
                self.remove(&inner, &below, &path)?;
            }
        }
        match unlinkat(directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOTEMPTY) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// Gives an entry the owner of another, as far as this process may.
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

    struct Trees {
        dir: tempfile::TempDir,
    }

    impl Trees {
        /// Two trees, the second a copy of the first.
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let here = dir.path().join("here");
            fs::create_dir_all(here.join("sub/deep")).unwrap();
            fs::write(here.join("same"), "same").unwrap();
            fs::write(here.join("changed"), "before").unwrap();
            fs::write(here.join("gone"), "gone").unwrap();
            fs::write(here.join("sub/deep/gone"), "gone").unwrap();
            symlink("same", here.join("link")).unwrap();
            let copied = std::process::Command::new("cp")
                .args(["-a"])
                .args([&here, &dir.path().join("there")])
                .status();
            assert!(copied.unwrap().success());
            Self { dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn sent(&self) -> Survey {
            Survey::of(&self.path("here"), 1 << 20, 100).unwrap()
        }

        fn apply(&self, sent: &Survey) -> anyhow::Result<()> {
            let open = |name| File::open(self.path(name)).unwrap();
            Apply::new(sent).directory(&open("there"), &open("here"))
        }

        fn text(&self, name: &str) -> String {
            fs::read_to_string(self.path("here").join(name)).unwrap()
        }
    }

    #[test]
    fn changes_additions_and_removals_are_carried_over_and_nothing_else_is_touched() {
        let trees = Trees::new();
        let sent = trees.sent();
        let there = trees.path("there");
        fs::write(there.join("changed"), "after!").unwrap();
        fs::create_dir(there.join("new")).unwrap();
        fs::write(there.join("new/file"), "new").unwrap();
        fs::set_permissions(there.join("new/file"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::remove_file(there.join("gone")).unwrap();
        fs::remove_dir_all(there.join("sub")).unwrap();
        fs::remove_file(there.join("link")).unwrap();
        symlink("changed", there.join("link")).unwrap();
        // Made here while the command ran.
        fs::write(trees.path("here/later"), "later").unwrap();
        fs::write(trees.path("here/sub/later"), "later").unwrap();
        let inode = |name: &str| fs::metadata(trees.path(name)).unwrap().ino();
        let same = inode("here/same");
        trees.apply(&sent).unwrap();
        assert_eq!(trees.text("changed"), "after!");
        assert_eq!(trees.text("new/file"), "new");
        let mode = fs::metadata(trees.path("here/new/file")).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o755);
        assert!(!trees.path("here/gone").exists() && !trees.path("here/sub/deep").exists());
        assert_eq!(trees.text("later") + &trees.text("sub/later"), "laterlater");
        assert_eq!(
            fs::read_link(trees.path("here/link")).unwrap(),
            Path::new("changed")
        );
        assert_eq!(inode("here/same"), same, "what is the same is left alone");
        let left = fs::read_dir(trees.path("here")).unwrap().flatten();
        let left = left.filter(|e| e.file_name().to_string_lossy().starts_with(".jiffy"));
        assert_eq!(left.count(), 0);
    }

    #[test]
    fn nothing_is_written_or_removed_through_a_symbolic_link() {
        let trees = Trees::new();
        let sent = trees.sent();
        let outside = trees.path("outside");
        fs::create_dir_all(outside.join("deep")).unwrap();
        fs::write(outside.join("deep/gone"), "mine").unwrap();
        fs::write(outside.join("changed"), "mine").unwrap();
        // An earlier run of a hostile guest left links in the place of what was sent.
        fs::remove_dir_all(trees.path("here/sub")).unwrap();
        symlink(&outside, trees.path("here/sub")).unwrap();
        fs::remove_file(trees.path("here/changed")).unwrap();
        symlink(outside.join("changed"), trees.path("here/changed")).unwrap();
        fs::write(trees.path("there/changed"), "theirs").unwrap();
        fs::write(trees.path("there/sub/new"), "theirs").unwrap();
        fs::remove_file(trees.path("there/sub/deep/gone")).unwrap();
        trees.apply(&sent).unwrap();
        assert_eq!(fs::read_to_string(outside.join("changed")).unwrap(), "mine");
        assert_eq!(
            fs::read_to_string(outside.join("deep/gone")).unwrap(),
            "mine"
        );
        assert!(!outside.join("new").exists());
        assert_eq!(trees.text("changed"), "theirs");
        assert_eq!(trees.text("sub/new"), "theirs");
    }

    #[test]
    fn a_tree_beyond_its_bounds_is_refused_as_a_whole() {
        let trees = Trees::new();
        let here = trees.path("here");
        File::create(here.join("sparse"))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert!(Survey::of(&here, 1 << 30, 100).is_err());
        assert!(Survey::of(&here, u64::MAX, 3).is_err());
        assert!(
            Survey::of(&here, u64::MAX, 100)
                .unwrap()
                .has(Path::new("sub/deep/gone"))
        );
    }
}
