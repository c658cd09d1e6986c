//! Root directory that contains only selected files and directories of the host.

use crate::root::{
    PIVOT_MOUNT_POINT, RESTRICTED, make_root_read_only, mount_new_root, pivot, private_mounts,
};
use nix::mount::{MntFlags, mount, umount2};
use nix::unistd::chdir;
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

/// Mount options of the root, which contains only directories and mount points.
const ROOT_OPTIONS: &CStr = c"mode=755,size=1m,nr_inodes=1k";

/// File or directory of the host that a confined process sees, including its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisiblePath {
    /// Absolute path, which is the same for the process. Must exist.
    pub path: PathBuf,
    /// True if the process can write to the path.
    pub is_writable: bool,
}

/// Mount that is not attached to a file tree yet.
struct DetachedMount(OwnedFd);

impl DetachedMount {
    /// Clones the mounts at and below `path`.
    fn clone_of(visible: &VisiblePath) -> io::Result<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE;
        Ok(Self(open_tree(CWD, &visible.path, flags)?))
    }

    /// Sets the attributes `set` on the mount and on all mounts below it. If `users` is given, maps
    /// the ids of files to this user namespace.
    fn set_attributes(&self, set: u64, users: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut attributes = libc::mount_attr {
            attr_set: set,
            attr_clr: 0,
            propagation: 0,
            userns_fd: 0,
        };
        if let Some(users) = users {
            attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
            attributes.userns_fd = u64::try_from(users.as_raw_fd()).map_err(io::Error::other)?;
        }
        // SAFETY: the descriptor is open, the path is an empty C string, and the last argument is
        // the size of `attributes`.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
                &raw const attributes,
                size_of::<libc::mount_attr>(),
            )
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn attach(&self, to: &Path) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        Ok(move_mount(&self.0, c"", CWD, to, flags)?)
    }
}

/// Mount table of a confined process, readable although the process does not see `/proc`.
#[derive(Debug)]
pub struct MountTable(File);

impl MountTable {
    /// Returns the directory that is mounted at `path`, as its current path in its file system.
    /// Returns `None` if `path` is not a mount point. The path changes when the directory is
    /// renamed or removed on the host, which the process cannot detect otherwise.
    pub fn root_of(&self, path: &Path) -> io::Result<Option<String>> {
        let (mut text, mut at) = (Vec::new(), 0);
        let mut piece = vec![0; 16 << 10];
        loop {
            // Positional reads: the file is read from its start each time.
            let length = self.0.read_at(&mut piece, at)?;
            if length == 0 {
                break;
            }
            text.extend(piece.get(..length).unwrap_or_default());
            at += length as u64;
        }
        let text = String::from_utf8_lossy(&text);
        let root = text.lines().find_map(|line| {
            // The fourth and the fifth field: root and mount point (proc_pid_mountinfo(5)).
            let mut fields = line.split(' ').skip(3);
            let (root, mounted) = (fields.next()?, fields.next()?);
            (Path::new(mounted) == path).then(|| root.to_owned())
        });
        Ok(root)
    }
}

/// Makes `visible` the only files of this process, which must have its own mount namespace. If
/// `users` is given (a user namespace), files of a host user are owned by the user with the same id
/// inside that namespace. Returns the mount table if the kernel provides it.
///
/// # Errors
/// `EINVAL` if a file system does not support id-mapped mounts.
pub fn enter_root(
    visible: &[VisiblePath],
    users: Option<BorrowedFd<'_>>,
) -> io::Result<Option<MountTable>> {
    let mut visible: Vec<&VisiblePath> = visible.iter().collect();
    // Mount a directory before directories inside it.
    visible.sort_by_key(|visible| visible.path.components().count());
    let mut mounts = Vec::new();
    for visible in visible {
        let failed = |e: io::Error| with_path(&visible.path, &e);
        let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !visible.path.is_absolute() || !visible.path.components().all(is_plain) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let read_only = if visible.is_writable {
            0
        } else {
            libc::MOUNT_ATTR_RDONLY
        };
        let attributes =
            libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC | read_only;
        // The mount is cloned while the path still refers to the host's file tree.
        let mount = DetachedMount::clone_of(visible).map_err(failed)?;
        mount.set_attributes(attributes, users).map_err(failed)?;
        mounts.push((mount, &visible.path));
    }
    private_mounts()?;
    mount_new_root(ROOT_OPTIONS)?;
    let new_root = Path::new(OsStr::from_bytes(PIVOT_MOUNT_POINT.to_bytes()));
    for (mount, path) in mounts {
        let inside = path.strip_prefix("/").unwrap_or(path);
        let to = new_root.join(inside);
        let attach = || -> io::Result<()> {
            place(path, &to)?;
            mount.attach(&to)
        };
        attach().map_err(|e| with_path(path, &e))?;
    }
    let proc = new_root.join("proc");
    fs::create_dir_all(&proc)?;
    // Fails if the process is unprivileged in the user namespace that owns its PID namespace. The
    // mount table is then unavailable.
    let has_proc = mount(Some("proc"), &proc, Some("proc"), RESTRICTED, None::<&str>).is_ok();
    chdir(PIVOT_MOUNT_POINT)?;
    pivot()?;
    let mut mounts = None;
    if has_proc {
        mounts = File::open("/proc/self/mountinfo").ok().map(MountTable);
        // The open file remains usable. The process must not see other processes.
        umount2("/proc", MntFlags::MNT_DETACH)?;
    }
    make_root_read_only()?;
    Ok(mounts)
}

/// Creates the directory or file `to` as the mount point for `path`. Does nothing if `to` exists,
/// for example in a directory that is already mounted.
fn place(path: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        return Ok(());
    }
    if path.is_dir() {
        fs::create_dir_all(to)
    } else {
        fs::create_dir_all(to.parent().unwrap_or(to))?;
        File::create_new(to).map(drop)
    }
}

fn with_path(path: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}
