//! Confinement of the processes that read untrusted files on the host: `mkfs.erofs` and the
//! unpacker of layers.
//!
//! Started by root, each runs as a user of its own with few capabilities, in mount, network, IPC
//! and UTS namespaces that hold only its files. [`enter`](FsView::enter) and
//! [`leave`](privileges::leave) run between fork and exec: system calls only, no allocation.

mod deadline;
pub(crate) mod filter;
pub(crate) mod privileges;

pub(crate) use deadline::Deadline;

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

/// Directories of programs and libraries in common distributions.
const PROGRAMS: [&str; 9] = [
    "usr", "lib", "lib64", "lib32", "libx32", "bin", "sbin", "nix", "gnu",
];

/// Tells if processes are confined: those of the host's root are, unless `JIFFY_JAIL` is `off`.
pub(crate) fn is_on() -> bool {
    jiffy_rootless::is_host_root() && std::env::var_os("JIFFY_JAIL").is_none_or(|w| w != "off")
}

/// One operation of building the tree.
#[derive(Debug)]
enum ViewStep {
    /// A file system, or a bind mount if it has no type.
    Mount {
        from: CString,
        at: CString,
        kind: Option<&'static CStr>,
        flags: libc::c_ulong,
        options: Option<&'static CStr>,
    },
    Directory(CString),
    File(CString),
    Link {
        to: CString,
        at: CString,
    },
}

/// File tree that a process sees.
#[derive(Debug)]
pub(crate) struct FsView {
    steps: Vec<ViewStep>,
    root: PathBuf,
}

const NOSUID_NODEV: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV;

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

impl FsView {
    /// Creates an empty tree, mounted on the directory `over` for the process only.
    pub(crate) fn new(over: &Path) -> io::Result<Self> {
        let mount = ViewStep::Mount {
            from: c"tmpfs".to_owned(),
            at: path(over)?,
            kind: Some(c"tmpfs"),
            flags: NOSUID_NODEV,
            options: Some(c"mode=755,size=64k"),
        };
        Ok(Self {
            steps: vec![mount],
            root: over.to_owned(),
        })
    }

    /// Creates a tree of the directory `tree` only, writable.
    pub(crate) fn of(tree: &Path) -> io::Result<Self> {
        let bound = |flags| {
            Ok::<_, io::Error>(ViewStep::Mount {
                from: path(tree)?,
                at: path(tree)?,
                kind: None,
                flags,
                options: None,
            })
        };
        let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_NOEXEC | NOSUID_NODEV;
        Ok(Self {
            steps: vec![bound(libc::MS_BIND)?, bound(flags)?],
            root: tree.to_owned(),
        })
    }

    /// Adds the host's programs and libraries, read-only and executable.
    pub(crate) fn programs(mut self) -> io::Result<Self> {
        for name in PROGRAMS {
            let of_host = Path::new("/").join(name);
            match fs::symlink_metadata(&of_host) {
                Ok(found) if found.is_symlink() => self.steps.push(ViewStep::Link {
                    to: path(&fs::read_link(&of_host)?)?,
                    at: path(&self.root.join(name))?,
                }),
                Ok(found) if found.is_dir() => self = self.shown(&of_host, name, true, false)?,
                _ => {}
            }
        }
        Ok(self)
    }

    /// Adds the directory `tree` as `name`, read-only.
    pub(crate) fn reading(self, tree: &Path, name: &str) -> io::Result<Self> {
        self.shown(tree, name, true, true)
    }

    /// Adds the file `file` as `name`, writable.
    pub(crate) fn writing(self, file: &Path, name: &str) -> io::Result<Self> {
        self.shown(file, name, false, true)
    }

    fn shown(mut self, of: &Path, name: &str, is_directory: bool, data: bool) -> io::Result<Self> {
        let at = path(&self.root.join(name))?;
        let mut flags = libc::MS_REMOUNT | libc::MS_BIND | NOSUID_NODEV;
        if is_directory {
            flags |= libc::MS_RDONLY;
        }
        if data {
            flags |= libc::MS_NOEXEC;
        }
        let bound = |flags| {
            Ok::<_, io::Error>(ViewStep::Mount {
                from: path(of)?,
                at: at.clone(),
                kind: None,
                flags,
                options: None,
            })
        };
        self.steps.push(match is_directory {
            true => ViewStep::Directory(at.clone()),
            false => ViewStep::File(at.clone()),
        });
        self.steps.extend([bound(libc::MS_BIND)?, bound(flags)?]);
        Ok(self)
    }

    /// Makes the tree the root of the calling process, which has a private mount namespace.
    pub(crate) fn enter(&self) -> io::Result<()> {
        for step in &self.steps {
            step.take()?;
        }
        // SAFETY: strings that end in zero.
        check(unsafe { libc::chdir(self.steps.first().map_or(c"/", ViewStep::place).as_ptr()) })?;
        pivot()
    }
}

impl ViewStep {
    fn place(&self) -> &CStr {
        match self {
            Self::Mount { at, .. } | Self::Link { at, .. } => at,
            Self::Directory(at) | Self::File(at) => at,
        }
    }

    fn take(&self) -> io::Result<()> {
        // SAFETY: all pointers are null or to strings that end in zero and live through the calls.
        check(unsafe {
            match self {
                Self::Mount {
                    from,
                    at,
                    kind,
                    flags,
                    options,
                } => libc::mount(
                    from.as_ptr(),
                    at.as_ptr(),
                    kind.map_or(ptr::null(), CStr::as_ptr),
                    *flags,
                    options.map_or(ptr::null(), CStr::as_ptr).cast(),
                ),
                Self::Directory(at) => libc::mkdir(at.as_ptr(), 0o755),
                Self::File(at) => libc::mknod(at.as_ptr(), libc::S_IFREG | 0o600, 0),
                Self::Link { to, at } => libc::symlink(to.as_ptr(), at.as_ptr()),
            }
        })
    }
}

/// Moves the calling process into new mount, network, IPC and UTS namespaces.
pub(crate) fn detach() -> io::Result<()> {
    const KINDS: libc::c_int =
        libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    // SAFETY: no pointers.
    check(unsafe { libc::unshare(KINDS) })?;
    private_mounts()
}

/// Kills the calling process when the thread that started it ends.
pub(crate) fn end_with_parent() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) })
}

/// Makes the mounts of the calling process private.
pub(crate) fn private_mounts() -> io::Result<()> {
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: null, and a string that ends in zero.
    check(unsafe { libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()) })
}

/// Makes the working directory, which is a mount point, the root, and unmounts the former root.
pub(crate) fn pivot() -> io::Result<()> {
    let here = c".".as_ptr();
    // SAFETY: strings that end in zero.
    unsafe {
        check(
            libc::syscall(libc::SYS_pivot_root, here, here)
                .try_into()
                .unwrap_or(-1),
        )?;
        check(libc::umount2(here, libc::MNT_DETACH))?;
        check(libc::chdir(c"/".as_ptr()))
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests;
