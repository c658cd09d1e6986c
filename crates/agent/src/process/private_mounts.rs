//! Mounts that only one process and its children see. A worker thread of the agent prepares the
//! system calls. The child that will execute the program makes them in its own mount namespace,
//! which ends with its last process.
//!
//! Mounted files are created in a tmpfs on the directory `scratch` of the request, and bound to
//! their targets. The tmpfs is then detached from `scratch`.

use crate::rpc::{RpcCode, RpcError};
use crate::sys;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_proto::process_mounts::{MAX_PROCESS_MOUNTS, ProcessMount, ProcessMounts};
use std::ffi::{CStr, CString, c_int};

/// A system call of the child before it changes its user.
#[derive(Debug)]
pub enum MountStep {
    /// `mount`.
    Mount {
        source: CString,
        target: CString,
        kind: &'static CStr,
        flags: libc::c_ulong,
        options: CString,
    },
    /// Creates a file with this content, owner and permissions.
    File {
        path: CString,
        content: Vec<u8>,
        uid: u32,
        gid: u32,
        mode: u32,
    },
    /// Detaches the file system at this path.
    Detach(CString),
}

/// Returns the steps for the mounts of a process.
pub fn steps(mounts: &ProcessMounts) -> Result<Vec<MountStep>, RpcError> {
    let invalid = |problem: &str| RpcError::new(RpcCode::InvalidArgument, problem);
    if mounts.mounts.len() > MAX_PROCESS_MOUNTS {
        return Err(invalid("too many mounts"));
    }
    let text =
        |text: &str| sys::cstring(text.as_bytes()).map_err(|_| invalid("a NUL byte in a mount"));
    let mount = |source: &str, target: &str, kind, flags, options: &str| {
        Ok::<_, RpcError>(MountStep::Mount {
            source: text(source)?,
            target: text(target)?,
            kind,
            flags,
            options: text(options)?,
        })
    };
    // No later mount of the process is visible to other processes.
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let mut steps = vec![mount("none", "/", c"", private, "")?];
    let has_files = (mounts.mounts.iter()).any(|m| matches!(m, ProcessMount::File { .. }));
    if has_files {
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        steps.push(mount(
            "tmpfs",
            &mounts.scratch,
            c"tmpfs",
            flags,
            "mode=700",
        )?);
    }
    for (number, one) in mounts.mounts.iter().enumerate() {
        match one {
            ProcessMount::Bind {
                source,
                target,
                read_only,
            } => {
                steps.push(mount(source, target, c"", libc::MS_BIND, "")?);
                if *read_only {
                    // The flag of a bind mount is only set by a second call.
                    let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
                    steps.push(mount("none", target, c"", flags, "")?);
                }
            }
            ProcessMount::Tmpfs { target, size_bytes } => {
                let size = size_bytes.map_or_else(String::new, |size| format!("size={size}"));
                let flags = libc::MS_NOSUID | libc::MS_NODEV;
                steps.push(mount("tmpfs", target, c"tmpfs", flags, &size)?);
            }
            ProcessMount::File {
                target,
                content,
                uid,
                gid,
                mode,
            } => {
                let content = STANDARD.decode(&content.0);
                let content = content.map_err(|_| invalid("a file is not base64"))?;
                let path = format!("{}/{number}", mounts.scratch);
                steps.push(MountStep::File {
                    path: text(&path)?,
                    content,
                    uid: *uid,
                    gid: *gid,
                    mode: *mode & 0o7777,
                });
                steps.push(mount(&path, target, c"", libc::MS_BIND, "")?);
                let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
                steps.push(mount("none", target, c"", flags, "")?);
            }
        }
    }
    if has_files {
        steps.push(MountStep::Detach(text(&mounts.scratch)?));
    }
    Ok(steps)
}

/// Enters a new mount namespace and makes the system calls of `steps`. Returns the error number of
/// the first failure.
///
/// # Safety
/// For the child of [`super::child`], which must make only raw system calls: this function neither
/// allocates nor touches thread state.
pub unsafe fn enter(steps: &[MountStep]) -> Result<(), c_int> {
    let checked = |result: libc::c_long| match result {
        // SAFETY: reads errno of the calling thread, which is suspended while the child runs.
        ..0 => Err(unsafe { *libc::__errno_location() }),
        result => Ok(result),
    };
    // SAFETY: the call takes no pointers.
    checked(unsafe { libc::syscall(libc::SYS_unshare, libc::CLONE_NEWNS) })?;
    for step in steps {
        match step {
            MountStep::Mount {
                source,
                target,
                kind,
                flags,
                options,
            } => {
                // SAFETY: all pointers are C strings of `steps`.
                checked(unsafe {
                    libc::syscall(
                        libc::SYS_mount,
                        source.as_ptr(),
                        target.as_ptr(),
                        kind.as_ptr(),
                        *flags,
                        options.as_ptr(),
                    )
                })?;
            }
            MountStep::File {
                path,
                content,
                uid,
                gid,
                mode,
            } => {
                let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
                // SAFETY: the path is a C string of `steps`.
                let file = checked(unsafe {
                    libc::syscall(
                        libc::SYS_openat,
                        libc::AT_FDCWD,
                        path.as_ptr(),
                        flags,
                        0o600,
                    )
                })?;
                let mut rest = &content[..];
                while !rest.is_empty() {
                    // SAFETY: the buffer is the rest of the content.
                    let written = checked(unsafe {
                        libc::syscall(libc::SYS_write, file, rest.as_ptr(), rest.len())
                    })?;
                    // The kernel writes at most the length of the buffer.
                    rest = rest
                        .get(written.unsigned_abs() as usize..)
                        .unwrap_or_default();
                }
                // A change of the owner clears permissions, so that they are set last.
                // SAFETY: the call takes no pointers.
                checked(unsafe { libc::syscall(libc::SYS_fchown, file, *uid, *gid) })?;
                // SAFETY: the call takes no pointers.
                checked(unsafe { libc::syscall(libc::SYS_fchmod, file, *mode) })?;
                // SAFETY: the call takes no pointers, and nothing else owns the descriptor.
                checked(unsafe { libc::syscall(libc::SYS_close, file) })?;
            }
            MountStep::Detach(path) => {
                // SAFETY: the path is a C string of `steps`.
                checked(unsafe {
                    libc::syscall(libc::SYS_umount2, path.as_ptr(), libc::MNT_DETACH)
                })?;
            }
        }
    }
    Ok(())
}
