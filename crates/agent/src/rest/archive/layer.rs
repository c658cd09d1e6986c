//! `GET /layer`: this sandbox's changes to its template, as a layer of an image.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.

use super::{ArchiveQuery, send};
use crate::body::ReplyBody;
use crate::boot::root::{self, container_storage};
use crate::rest::error::RestError;
use crate::state::Agent;
use crate::workers::CallClass;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use jiffy_archive::{ArchiveError, PackOptions};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Files of the sandbox's identity, which the agent writes.
const IDENTITY_PATHS: [&[u8]; 6] = [
    b"etc/hosts",
    b"etc/mtab",
    b"etc/resolv.conf",
    b"etc/machine-id",
    b"var/lib/systemd/random-seed",
    b"var/lib/urandom/random-seed",
];
/// Directories whose contents do not survive a boot.
const VOLATILE_DIRECTORIES: [&[u8]; 4] = [b"dev/", b"proc/", b"run/", b"sys/"];

/// Sends the layer.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    // Only root may read a layer, which contains the files of all users.
    let username = ArchiveQuery::of(request.uri()).username;
    crate::rest::only_root(agent, username.as_deref(), "layers are").await?;
    // Removes the certificate authorities and the proxy of this network, since sandboxes of the new
    // template may run in another network.
    agent.withdraw_site().await?;
    let failed = |e: io::Error| RestError::io("cannot open the changes of this sandbox", &e);
    let written = root::upper_directory().ok_or_else(|| {
        RestError::new(
            StatusCode::NOT_FOUND,
            "no layer: this agent did not mount its root",
        )
    })?;
    let top = OwnedFd::from(written.try_clone().map_err(failed)?);
    let what = "cannot read the storage of containers";
    let work = |_: &_| stored_directories();
    let stored = agent.workers.attempt(CallClass::Files, what, work).await?;
    let contents = PackOptions {
        xattrs: |name| !name.starts_with(b"trusted.overlay."),
        leave_out: is_excluded,
        layer: true,
    };
    send::stream(agent, contents, move |packer| {
        // Flushes the file system, since the upper directory is read directly and not through the
        // overlay.
        // SAFETY: the descriptor is open.
        if unsafe { libc::syncfs(top.as_raw_fd()) } != 0 {
            return Err(ArchiveError::File {
                action: "flush",
                entry: "/".to_owned(),
                source: io::Error::last_os_error(),
            });
        }
        let root = File::open("/").map_err(|source| ArchiveError::File {
            action: "open",
            entry: "/".to_owned(),
            source,
        })?;
        // The upper directory alone does not show the content of a directory that was renamed. The
        // packer reads such a directory from the root of the overlay.
        packer.set_overlay(root.into());
        packer.tree(top, b"")?;
        // The files of container storage are outside of the overlay.
        let mut stored = stored.into_iter();
        stored.try_for_each(|(directory, place)| packer.tree(directory, place.as_bytes()))
    })
}

/// Returns the non-empty directories for container storage, and their mount points relative to the
/// root. Fails if a directory contains container images.
fn stored_directories() -> Result<Vec<(OwnedFd, &'static str)>, RestError> {
    let failed = |e: io::Error| RestError::io("cannot open the storage of containers", &e);
    let mut stored = Vec::new();
    for storage in container_storage::mounted() {
        if let Some(at) = storage.container_layers() {
            return Err(RestError::new(
                StatusCode::CONFLICT,
                format!(
                    "there are container images in /{at}, which cannot become part of a template: \
                     let a start command pull them, or remove them in the step that made them"
                ),
            ));
        }
        if storage.is_used() {
            // The parents are copied before the upper directory is read, so that it contains them.
            copy_up_parents(storage.place).map_err(failed)?;
            let directory = storage.directory.try_clone().map_err(failed)?;
            stored.push((OwnedFd::from(directory), storage.place));
        }
    }
    Ok(stored)
}

/// Makes overlayfs create the directories above `place` in the upper file system, so that the layer
/// contains their owners.
fn copy_up_parents(place: &str) -> io::Result<()> {
    for (end, _) in place.match_indices('/') {
        let parent = format!("/{}", &place[..end]);
        let found = std::fs::metadata(&parent)?;
        // Any change of an attribute copies the directory up, even to the same value.
        std::fs::set_permissions(&parent, found.permissions())?;
    }
    Ok(())
}

/// Returns whether a path, relative to the root, belongs to a boot or to the sandbox's identity
/// instead of its changes.
pub fn is_excluded(path: &[u8]) -> bool {
    IDENTITY_PATHS.contains(&path)
        || VOLATILE_DIRECTORIES
            .iter()
            .any(|above| path.starts_with(above))
        // For example `/tmp/.jiffy-build`, in which the template builder prepares copied files.
        || path.starts_with(b"tmp/.jiffy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_boot_are_in_no_layer() {
        for path in ["run/x", "tmp/.jiffy-1/x", "etc/hosts", "dev/null", "sys/x"] {
            assert!(is_excluded(path.as_bytes()), "{path}");
        }
        for path in ["run", "runner", "tmp/x", "etc/hosts.allow", "home/run/x"] {
            assert!(!is_excluded(path.as_bytes()), "{path}");
        }
    }
}
