//! `GET /layer`: what this sandbox changed against its template, as a layer of an image.

use super::{Query, send};
use crate::body::Reply;
use crate::boot::root::{self, storage};
use crate::rest::error::RestError;
use crate::state::Agent;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use jiffy_archive::{ArchiveError, PackOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// What every sandbox has of its own: the agent writes it when a sandbox is told who it is.
const OURS: [&[u8]; 6] = [
    b"etc/hosts",
    b"etc/mtab",
    b"etc/resolv.conf",
    b"etc/machine-id",
    b"var/lib/systemd/random-seed",
    b"var/lib/urandom/random-seed",
];
/// Directories whose content lives as long as a boot.
const PASSING: [&[u8]; 4] = [b"dev/", b"proc/", b"run/", b"sys/"];

/// Sends the layer.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<Reply>, RestError> {
    // Of all users.
    let username = Query::of(request.uri()).username;
    crate::rest::only_root(agent, username.as_deref(), "layers are")?;
    // The network that a template is built in is not the one that its sandboxes are in.
    agent.withdraw_site();
    let failed = |e: io::Error| RestError::io("cannot open what this sandbox wrote", &e);
    let written = root::written().ok_or_else(|| {
        RestError::new(
            StatusCode::NOT_FOUND,
            "there is no layer: this agent did not mount its own root",
        )
    })?;
    let top = OwnedFd::from(written.try_clone().map_err(failed)?);
    let mut stored = Vec::new();
    for storage in storage::mounted() {
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
            copy_up_parents(storage.place).map_err(failed)?;
            let directory = storage.directory.try_clone().map_err(failed)?;
            stored.push((OwnedFd::from(directory), storage.place));
        }
    }
    let contents = PackOptions {
        xattrs: |name| !name.starts_with(b"trusted.overlay."),
        leave_out: is_left_out,
        layer: true,
    };
    send::stream(agent, contents, move |packer| {
        // What is read is what is on the disk.
        // SAFETY: the descriptor is open.
        if unsafe { libc::syncfs(top.as_raw_fd()) } != 0 {
            return Err(ArchiveError::File {
                action: "write down",
                entry: "/".to_owned(),
                source: io::Error::last_os_error(),
            });
        }
        packer.tree(top, b"")?;
        // What lies beneath these is on the disk, and in no overlay.
        let mut stored = stored.into_iter();
        stored.try_for_each(|(directory, place)| packer.tree(directory, place.as_bytes()))
    })
    .await
}

/// Has overlayfs make the directories above `place` in the upper file system, so that the layer
/// says who owns them.
fn copy_up_parents(place: &str) -> io::Result<()> {
    for (end, _) in place.match_indices('/') {
        let parent = format!("/{}", &place[..end]);
        let found = std::fs::metadata(&parent)?;
        // Every change of an attribute does, also one to what it is.
        std::fs::set_permissions(&parent, found.permissions())?;
    }
    Ok(())
}

/// Whether a path belongs to a boot or to the sandbox itself rather than to what was changed in it.
pub fn is_left_out(path: &[u8]) -> bool {
    OURS.contains(&path)
        || PASSING.iter().any(|above| path.starts_with(above))
        || path.starts_with(b"tmp/.jiffy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_to_a_boot_is_in_no_layer() {
        for path in ["run/x", "tmp/.jiffy-1/x", "etc/hosts", "dev/null", "sys/x"] {
            assert!(is_left_out(path.as_bytes()), "{path}");
        }
        for path in ["run", "runner", "tmp/x", "etc/hosts.allow", "home/run/x"] {
            assert!(!is_left_out(path.as_bytes()), "{path}");
        }
    }
}
