//! Checks whether this host supports rootless mode. Names the remedy for each missing requirement.
//!
//! The *uplink* is a program (`pasta` or `slirp4netns`) that connects the namespaces of rootless
//! mode to the network of the host.

use crate::subordinate_ids;
use crate::uplink::Uplink;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Uid, fork};
use std::fs;
use std::sync::OnceLock;

/// Missing requirement and its remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRequirement {
    /// Description of the missing requirement.
    pub description: String,
    /// Remedy.
    pub remedy: String,
}

/// Support of rootless use on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootlessSupport {
    /// User namespaces in which an unprivileged user is root.
    pub namespaces: Result<(), MissingRequirement>,
    /// Subordinate users and groups for the processes of sandboxes.
    pub ranges: Result<(), MissingRequirement>,
    /// Name of the uplink program.
    pub uplink: Result<&'static str, MissingRequirement>,
}

impl RootlessSupport {
    /// Checks this host and user. Forks a process that creates namespaces and exits.
    pub fn find() -> Self {
        let uid = Uid::effective();
        Self {
            namespaces: namespaces(),
            ranges: subordinate_ids::for_user(uid).map(drop).map_err(|description| MissingRequirement {
                description: format!("sandboxes cannot run as separate users: {description}"),
                remedy: format!(
                    "run as root: `apt-get install uidmap`, and `usermod --add-subuids 100000-165535 \
                     --add-subgids 100000-165535` for uid {uid}"
                ),
            }),
            uplink: Uplink::find()
                .map(|uplink| uplink.name())
                .map_err(|description| MissingRequirement {
                    remedy: if description.starts_with("/dev/net/tun") {
                        "run as root: `modprobe tun`, and `chmod 666 /dev/net/tun`"
                    } else {
                        "run as root: `apt-get install passt nftables iproute2`"
                    }
                    .to_owned(),
                    description,
                }),
        }
    }
}

/// Checks that this process is in namespaces of its user or can create them. The result is computed
/// once per process.
pub fn usable() -> Result<(), MissingRequirement> {
    static USABLE: OnceLock<Result<(), MissingRequirement>> = OnceLock::new();
    match crate::current() {
        Some(_) => Ok(()),
        None => USABLE.get_or_init(namespaces).clone(),
    }
}

/// Checks that this process can create namespaces. If not, determines the reason.
fn namespaces() -> Result<(), MissingRequirement> {
    // Attempt the creation: the sysctls that restrict it differ between distributions.
    if can_create() {
        return Ok(());
    }
    let read = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
        text.trim().to_owned()
    };
    if crate::is_chroot() {
        return Err(MissingRequirement {
            description: "user namespaces are not permitted in a chroot".to_owned(),
            remedy: crate::CHROOT_REMEDY.to_owned(),
        });
    }
    let (description, remedy) = userns_obstacle(
        &read("user/max_user_namespaces"),
        &read("kernel/unprivileged_userns_clone"),
        &read("kernel/apparmor_restrict_unprivileged_userns"),
    );
    Err(MissingRequirement {
        description: description.to_owned(),
        remedy: remedy.to_owned(),
    })
}

/// Returns the reason that user namespaces are not available, derived from the sysctls, and its
/// remedy.
fn userns_obstacle(max: &str, clone: &str, apparmor: &str) -> (&'static str, &'static str) {
    if max == "0" {
        return (
            "user namespaces are disabled on this host",
            "run as root: `sysctl user.max_user_namespaces=15000`",
        );
    }
    if clone == "0" {
        return (
            "only root can create user namespaces on this host",
            "run as root: `sysctl kernel.unprivileged_userns_clone=1`",
        );
    }
    if apparmor == "1" {
        return (
            "AppArmor denies capabilities in user namespaces",
            "as root, install an AppArmor profile with `userns,` for the jiffy program (see \
             docs/rootless.md), or run `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
        );
    }
    (
        "user namespaces are denied, possibly by the container that this process runs in",
        "permit user namespaces in the container (for Docker `--security-opt seccomp=unconfined \
         --security-opt apparmor=unconfined`), or run as root",
    )
}

/// Returns whether a process of this user has capabilities in a new user namespace.
fn can_create() -> bool {
    // SAFETY: the child only makes system calls and exits.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            // SAFETY: the calls have no pointer arguments. The second call fails if the first
            // granted no capabilities.
            let is_created = unsafe {
                libc::unshare(libc::CLONE_NEWUSER) == 0
                    && libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) == 0
            };
            // SAFETY: exits the child without running destructors or exit handlers.
            unsafe { libc::_exit(i32::from(!is_created)) }
        }
        Ok(ForkResult::Parent { child }) => {
            matches!(waitpid(child, None), Ok(WaitStatus::Exited(_, 0)))
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_obstacle_to_user_namespaces_is_named_with_its_remedy() {
        for (sysctls, expected) in [
            (("0", "1", ""), "max_user_namespaces"),
            (("100", "0", ""), "unprivileged_userns_clone"),
            (("100", "", "1"), "apparmor_restrict"),
            (("100", "1", "0"), "container"),
        ] {
            let (description, remedy) = userns_obstacle(sysctls.0, sysctls.1, sysctls.2);
            assert!(
                remedy.contains(expected) && !description.is_empty(),
                "{remedy}"
            );
        }
    }
}
