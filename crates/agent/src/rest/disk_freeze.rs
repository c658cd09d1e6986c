//! `POST /disk/freeze` and `POST /disk/thaw`: the disk contains a consistent file system while it
//! is frozen, for a snapshot without memory.

use super::error::RestError;
use super::file_query::parameter;
use crate::body::ReplyBody;
use crate::boot::root::upper_directory;
use crate::state::Agent;
use crate::sys;
use crate::workers::CallClass;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Requests of ioctl(2) on a file system (linux/fs.h). A freeze writes all changes to the disk, and
/// blocks further changes until the thaw.
const FIFREEZE: u32 = 0xC004_5877;
const FITHAW: u32 = 0xC004_5878;

/// Time after which a frozen file system is thawed if the host does not request it. A host that
/// takes a snapshot needs some milliseconds.
const MAX_FROZEN: Duration = Duration::from_secs(20);

/// Number of freezes so far. A timer thaws only the freeze for which it was started.
static FREEZES: AtomicU64 = AtomicU64::new(0);

/// Freezes the file system of the writable disk. Responds when all changes are on the disk.
pub async fn freeze(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    change(agent, request, FIFREEZE, "cannot freeze the disk").await?;
    let freeze = FREEZES.fetch_add(1, Ordering::Relaxed) + 1;
    tokio::task::spawn_local(async move {
        tokio::time::sleep(MAX_FROZEN).await;
        if FREEZES.load(Ordering::Relaxed) == freeze
            && let Some(disk) = upper_directory()
            && request_of(disk, FITHAW).is_ok()
        {
            eprintln!("jiffy-agent: the host did not thaw the disk in time");
        }
    });
    Ok(super::no_content())
}

/// Thaws the file system.
pub async fn thaw(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    change(agent, request, FITHAW, "cannot thaw the disk").await?;
    FREEZES.fetch_add(1, Ordering::Relaxed);
    Ok(super::no_content())
}

/// Freezes or thaws the writable file system by an ioctl.
async fn change(
    agent: &Agent,
    request: &Request<&mut Incoming>,
    ioctl: u32,
    what: &'static str,
) -> Result<(), RestError> {
    let username = parameter(request.uri(), "username");
    super::only_root(agent, username.as_deref(), "freezes of the disk are").await?;
    let Some(disk) = upper_directory() else {
        return Err(RestError::new(
            StatusCode::NOT_FOUND,
            format!("{what}: this agent is not process 1"),
        ));
    };
    // Use a worker thread: the call blocks until all changed pages are written.
    let work = move |_: &_| request_of(disk, ioctl);
    let done = agent.workers.run(CallClass::Archive, what, work).await?;
    done.map_err(|e| RestError::io(what, &e))
}

/// Makes the request `ioctl` to the file system of `disk`.
fn request_of(disk: &File, ioctl: u32) -> io::Result<()> {
    // SAFETY: both requests ignore their argument. The cast adapts the number to the C library.
    sys::check(unsafe { libc::ioctl(disk.as_raw_fd(), ioctl as _, 0) }).map(drop)
}
