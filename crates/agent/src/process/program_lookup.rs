//! Look-up of a program for the user that runs it. Directories are searched with the privileges of
//! the agent. Only the mode of the file is checked for the user.

use crate::rpc::{RpcCode, RpcError};
use crate::users::User;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns the error for a program that does not exist. The exit status of a shell would be 127.
pub fn not_found(cmd: &str) -> RpcError {
    RpcError::new(RpcCode::NotFound, format!("{cmd}: command not found"))
        .reason("command_not_found")
}

/// Returns the error for a program that cannot be executed. The exit status of a shell would be
/// 126.
pub fn not_executable(cmd: &str, why: &str) -> RpcError {
    RpcError::new(RpcCode::PermissionDenied, format!("{cmd}: {why}"))
        .reason("command_not_executable")
}

/// Returns the absolute path of a command.
pub fn find(cmd: &str, path: &str, cwd: &Path, user: &User) -> Result<PathBuf, RpcError> {
    if cmd.is_empty() {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            "the command is empty",
        ));
    }
    if cmd.contains('/') {
        return match executable(&cwd.join(cmd), user) {
            Ok(found) => Ok(found),
            Err(NotExecutable::Missing) if cmd == "/bin/bash" => replace_bash(path, cwd, user),
            Err(NotExecutable::Missing) => Err(not_found(cmd)),
            Err(NotExecutable::Directory) => Err(not_executable(cmd, "is a directory")),
            Err(NotExecutable::Forbidden) => Err(not_executable(cmd, "not executable")),
        };
    }
    // As in a shell, a later directory may contain an executable file of the same name.
    let mut forbidden = false;
    for directory in path.split(':') {
        match executable(&cwd.join(directory).join(cmd), user) {
            Ok(found) => return Ok(found),
            Err(NotExecutable::Forbidden) => forbidden = true,
            Err(NotExecutable::Missing | NotExecutable::Directory) => {}
        }
    }
    Err(if forbidden {
        not_executable(cmd, "not executable")
    } else {
        not_found(cmd)
    })
}

/// Replaces `/bin/bash` in an image that does not contain it. Clients run every command line with
/// `/bin/bash`, and another shell suffices for most commands.
fn replace_bash(path: &str, cwd: &Path, user: &User) -> Result<PathBuf, RpcError> {
    find("bash", path, cwd, user)
        .or_else(|_| find("/bin/sh", path, cwd, user))
        .map_err(|_| not_found("/bin/bash"))
}

/// Reason why a path cannot be executed.
enum NotExecutable {
    /// The path does not exist.
    Missing,
    /// The path is a directory.
    Directory,
    /// The user may not execute the file.
    Forbidden,
}

/// Checks that the user can execute the file at a path, as `execve` would.
fn executable(path: &Path, user: &User) -> Result<PathBuf, NotExecutable> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(NotExecutable::Directory),
        Ok(found) if may_execute(&found, user) => Ok(path.to_path_buf()),
        Ok(_) => Err(NotExecutable::Forbidden),
        // The agent itself cannot search a directory of the path.
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => Err(NotExecutable::Forbidden),
        Err(_) => Err(NotExecutable::Missing),
    }
}

/// True if the permission bits of the file allow the user to execute it. As in the kernel, only the
/// first class that applies counts.
fn may_execute(file: &Metadata, user: &User) -> bool {
    let mode = file.mode();
    // Root may execute a file if anyone may execute it.
    if user.uid == 0 {
        mode & 0o111 != 0
    } else if file.uid() == user.uid {
        mode & 0o100 != 0
    } else if user.groups.contains(&file.gid()) {
        mode & 0o010 != 0
    } else {
        mode & 0o001 != 0
    }
}
