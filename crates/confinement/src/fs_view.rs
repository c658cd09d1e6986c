//! File tree with programs and selected files of the host, in which a program of the host runs.
//!
//! The tree is prepared before the fork as a list of steps, because code between fork and exec must
//! not allocate memory.

use crate::root::pivot;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::{chdir, mkdir, symlinkat};
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Directories of programs and libraries in common distributions.
pub const PROGRAM_DIRECTORIES: [&str; 9] = [
    "usr", "lib", "lib64", "lib32", "libx32", "bin", "sbin", "nix", "gnu",
];

/// Operation that builds part of the tree.
#[derive(Debug)]
enum ViewStep {
    /// Mount of a file system. A bind mount if `kind` is `None`.
    Mount {
        from: CString,
        at: CString,
        kind: Option<&'static CStr>,
        flags: MsFlags,
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
pub struct FsView {
    steps: Vec<ViewStep>,
    root: PathBuf,
}

/// Set-user-id programs and devices have no effect in the tree.
const NOSUID_NODEV: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
const REMOUNT: MsFlags = MsFlags::MS_REMOUNT
    .union(MsFlags::MS_BIND)
    .union(NOSUID_NODEV);

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Returns two steps: the bind mount of `of` at `at`, and a remount with `flags`. The kernel
/// ignores all other flags of a bind mount, so they need a second call.
fn bind(of: &Path, at: &Path, flags: MsFlags) -> io::Result<[ViewStep; 2]> {
    let step = |flags| {
        Ok::<_, io::Error>(ViewStep::Mount {
            from: path(of)?,
            at: path(at)?,
            kind: None,
            flags,
            options: None,
        })
    };
    Ok([step(MsFlags::MS_BIND)?, step(flags)?])
}

impl FsView {
    /// Creates an empty tree, which is mounted over the directory `over` for this process only.
    pub fn new(over: &Path) -> io::Result<Self> {
        let mount = ViewStep::Mount {
            from: c"tmpfs".to_owned(),
            at: path(over)?,
            kind: Some(c"tmpfs"),
            flags: NOSUID_NODEV,
            // The file system contains only mount points and links.
            options: Some(c"mode=755,size=64k"),
        };
        Ok(Self {
            steps: vec![mount],
            root: over.to_owned(),
        })
    }

    /// Creates a tree that consists of the directory `tree`, which is writable.
    pub fn of(tree: &Path) -> io::Result<Self> {
        Ok(Self {
            steps: bind(tree, tree, REMOUNT | MsFlags::MS_NOEXEC)?.into(),
            root: tree.to_owned(),
        })
    }

    /// Adds the host's programs and libraries, read-only and executable.
    pub fn programs(mut self) -> io::Result<Self> {
        for name in PROGRAM_DIRECTORIES {
            let of_host = Path::new("/").join(name);
            match fs::symlink_metadata(&of_host) {
                // On most distributions, `/bin` and `/lib` are links into `/usr`.
                Ok(found) if found.is_symlink() => self.steps.push(ViewStep::Link {
                    to: path(&fs::read_link(&of_host)?)?,
                    at: path(&self.root.join(name))?,
                }),
                Ok(found) if found.is_dir() => {
                    self = self.directory(&of_host, name, MsFlags::empty())?;
                }
                // No distribution has all of these directories.
                _ => {}
            }
        }
        Ok(self)
    }

    /// Adds the directory `tree` as `name`, read-only.
    pub fn reading(self, tree: &Path, name: &str) -> io::Result<Self> {
        self.directory(tree, name, MsFlags::MS_NOEXEC)
    }

    /// Adds `file` as `name`, writable.
    pub fn writing(mut self, file: &Path, name: &str) -> io::Result<Self> {
        let at = self.root.join(name);
        self.steps.push(ViewStep::File(path(&at)?));
        let bind = bind(file, &at, REMOUNT | MsFlags::MS_NOEXEC)?;
        self.steps.extend(bind);
        Ok(self)
    }

    fn directory(mut self, of: &Path, name: &str, more: MsFlags) -> io::Result<Self> {
        let at = self.root.join(name);
        self.steps.push(ViewStep::Directory(path(&at)?));
        let bind = bind(of, &at, REMOUNT | MsFlags::MS_RDONLY | more)?;
        self.steps.extend(bind);
        Ok(self)
    }

    /// Makes the tree the root of the calling process, which must have a private mount namespace.
    /// Makes system calls only and does not allocate memory, so that it can run between fork and
    /// exec.
    pub fn enter(&self) -> io::Result<()> {
        for step in &self.steps {
            step.execute()?;
        }
        // The first step mounts the root of the tree, and `pivot` requires a mount point.
        chdir(self.steps.first().map_or(c"/", ViewStep::path))?;
        Ok(pivot()?)
    }
}

impl ViewStep {
    /// Returns the path that the step creates.
    fn path(&self) -> &CStr {
        match self {
            Self::Mount { at, .. } | Self::Link { at, .. } => at,
            Self::Directory(at) | Self::File(at) => at,
        }
    }

    /// Executes the step.
    fn execute(&self) -> nix::Result<()> {
        match self {
            Self::Mount {
                from,
                at,
                kind,
                flags,
                options,
            } => mount(Some(&**from), &**at, *kind, *flags, *options),
            Self::Directory(at) => mkdir(&**at, Mode::from_bits_truncate(0o755)),
            Self::File(at) => {
                let mode = Mode::S_IRUSR | Mode::S_IWUSR;
                mknod(&**at, SFlag::S_IFREG, mode, 0)
            }
            Self::Link { to, at } => symlinkat(&**to, nix::fcntl::AT_FDCWD, &**at),
        }
    }
}
