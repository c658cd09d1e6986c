//! Landlock rules: additional protection if the kernel supports them.

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

const LANDLOCK: ABI = ABI::V6;

/// Denies all paths and ports, and sockets and signals to other processes.
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

/// Denies all files except `visible` and `libraries`, of which some may not exist. Also denies
/// execution, listening, abstract sockets, and signals to other processes.
pub fn restrict_files(visible: &[VisiblePath], libraries: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?
        .create()?;
    for visible in visible {
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
            if !Path::new(library).is_dir() {
                access &= AccessFs::from_file(LANDLOCK);
            }
            rules = rules.add_rule(PathBeneath::new(path, access))?;
        }
    }
    rules.restrict_self()?;
    Ok(())
}

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
