//! Confinement of the process, entered before it reads requests.

use super::{ServerSettings, seccomp};
use jiffy_confinement::{self as confinement, VisiblePath};
use nix::sched::CloneFlags;
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Uid;
use std::error::Error;

/// Maximum size of the address space in bytes.
const MAX_MEMORY: u64 = 8 << 30;
/// Maximum number of open descriptors: two per session, and one per request in progress.
const MAX_DESCRIPTORS: u64 = 8192;

/// Leaves the files, the network, the user and the privileges of the host. Only the directory of
/// the volume is visible.
pub(super) fn confine(settings: &ServerSettings) -> Result<(), Box<dyn Error>> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    confinement::set_limits(&[
        (Resource::RLIMIT_AS, MAX_MEMORY),
        (Resource::RLIMIT_NOFILE, MAX_DESCRIPTORS.min(hard)),
        (Resource::RLIMIT_CORE, 0),
    ])?;
    let visible = [VisiblePath {
        path: settings.directory.clone(),
        is_writable: true,
    }];
    let is_root = Uid::effective().is_root();
    let network = CloneFlags::CLONE_NEWNET;
    let own = confinement::enter_own_root(&visible, network, jiffy_rootless::is_host_root())?;
    if let Some(reason) = own.weakness {
        tracing::warn!(
            reason,
            is_root,
            "the confinement of the volume server is weaker than intended"
        );
    }
    confinement::forbid_inspection()?;
    confinement::restrict_files(&visible, &[])?;
    seccomp::enter()?;
    Ok(())
}
