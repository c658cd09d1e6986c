//! Landlock rules: additional protection against access to files, ports and other processes, if the
//! kernel supports Landlock.

use crate::VisiblePath;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};
use nix::fcntl::OFlag;
use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Newest known version of Landlock. Older kernels enforce the part that they support.
const LANDLOCK: ABI = ABI::V6;

/// Denies all paths and TCP ports, connections to abstract Unix sockets of other processes, and
/// signals to other processes.
pub fn restrict_everything() -> Result<(), RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .restrict_self()?;
    Ok(())
}

/// Denies all files except the paths in `visible` and `libraries`. Paths in `visible` cannot be
/// executed. Paths in `libraries` can be read and executed, and may be missing on a host. Also
/// denies listening on TCP ports, connections to abstract Unix sockets of other processes, and
/// signals to other processes.
pub fn restrict_files(visible: &[VisiblePath], libraries: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?
        .create()?;
    for visible in visible {
        // O_PATH needs no permission to read the file.
        let file = File::options()
            .read(true)
            .custom_flags(OFlag::O_PATH.bits())
            .open(&visible.path)?;
        let access = access(&visible.path, visible.is_writable);
        rules = rules.add_rule(PathBeneath::new(file.as_fd(), access))?;
    }
    for library in libraries {
        if let Ok(path) = PathFd::new(library) {
            let mut access = AccessFs::from_read(LANDLOCK);
            // The kernel rejects rights of directories for a file.
            if !Path::new(library).is_dir() {
                access &= AccessFs::from_file(LANDLOCK);
            }
            rules = rules.add_rule(PathBeneath::new(path, access))?;
        }
    }
    rules.restrict_self()?;
    Ok(())
}

/// Returns the rights for a visible path: with `is_writable` all rights except execution, otherwise
/// only reading.
fn access(path: &Path, is_writable: bool) -> landlock::BitFlags<AccessFs> {
    let access = if is_writable {
        AccessFs::from_all(LANDLOCK)
    } else {
        AccessFs::from_read(LANDLOCK)
    };
    let access = access & !AccessFs::Execute;
    if path.is_dir() {
        access
    } else {
        access & AccessFs::from_file(LANDLOCK)
    }
}
