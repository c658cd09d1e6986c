//! The kernel's side of a mount: `/dev/fuse`.

use crate::boot::mount;
use crate::sys;
use jiffy_proto::agent::VolumeAttachment;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;

/// Maximum length of a READ. The server of the volume has the same limit.
pub(super) const MAX_READ: usize = 256 << 10;

/// Mounts a volume. Returns the device on which the kernel sends requests.
pub(super) fn mount(request: &VolumeAttachment) -> io::Result<File> {
    let mut directory = std::fs::DirBuilder::new();
    directory
        .recursive(true)
        .mode(0o755)
        .create(&request.path)?;
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let mut flags = libc::MS_NOSUID | libc::MS_NODEV;
    if request.read_only {
        flags |= libc::MS_RDONLY;
    }
    // The kernel checks permissions by owner and mode, and all users have access.
    let options = format!(
        "fd={},rootmode=40777,user_id=0,group_id=0,default_permissions,allow_other,max_read={MAX_READ}",
        device.as_raw_fd()
    );
    mount::raw(
        &sys::cstring(request.volume.as_bytes())?,
        &sys::cstring(request.path.as_bytes())?,
        c"fuse.jiffy",
        flags,
        &sys::cstring(options.as_bytes())?,
    )?;
    Ok(device)
}

/// Removes a mount, which processes may still use.
pub(super) fn unmount(path: &str) -> io::Result<()> {
    let path = sys::cstring(path.as_bytes())?;
    // SAFETY: the path is a valid C string.
    sys::check(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }).map(drop)
}
