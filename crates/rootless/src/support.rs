//! Support of rootless use on this host, with remedies.

use crate::subordinate_ids;
use crate::uplink::Uplink;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Uid, fork};
use std::fs;
use std::sync::OnceLock;

/// Missing requirement and its remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRequirement {
    /// Missing requirement.
    pub what: String,
    /// Remedy.
    pub remedy: String,
}

/// Support of rootless use on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootlessSupport {
    /// User namespaces in which an ordinary user is root.
    pub namespaces: Result<(), MissingRequirement>,
    /// Subordinate users and groups for the processes of sandboxes.
    pub ranges: Result<(), MissingRequirement>,
    /// Name of the uplink program.
    pub uplink: Result<&'static str, MissingRequirement>,
}

impl RootlessSupport {
    /// Inspects this host and user. Forks a process that makes a namespace and exits.
    pub fn find() -> Self {
        let uid = Uid::effective();
        Self {
            namespaces: namespaces(),
            ranges: subordinate_ids::for_user(uid).map(drop).map_err(|what| MissingRequirement {
                what: format!("sandboxes have no users of their own: {what}"),
                remedy: format!(
                    "as root: `apt-get install uidmap`, and `usermod --add-subuids 100000-165535 \
                     --add-subgids 100000-165535` for uid {uid}"
                ),
            }),
            uplink: Uplink::find()
                .map(|uplink| uplink.name())
                .map_err(|what| MissingRequirement {
                    remedy: match what.starts_with("/dev/net/tun") {
                        true => {
                            "as root: `modprobe tun`, and `chmod 666 /dev/net/tun`, as udev does"
                        }
                        false => "as root: `apt-get install passt nftables iproute2`",
                    }
                    .to_owned(),
                    what,
                }),
        }
    }
}

/// Checks that this process is in namespaces of its user, or could make them; tried once per
/// process.
pub fn usable() -> Result<(), MissingRequirement> {
    static USABLE: OnceLock<Result<(), MissingRequirement>> = OnceLock::new();
    match crate::current() {
        Some(_) => Ok(()),
        None => USABLE.get_or_init(namespaces).clone(),
    }
}

fn namespaces() -> Result<(), MissingRequirement> {
    if can_make() {
        return Ok(());
    }
    let read = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
        text.trim().to_owned()
    };
    if crate::is_chroot() {
        return Err(MissingRequirement {
            what: "a chroot forbids user namespaces".to_owned(),
            remedy: crate::CHROOT_REMEDY.to_owned(),
        });
    }
    let (what, remedy) = userns_obstacle(
        &read("user/max_user_namespaces"),
        &read("kernel/unprivileged_userns_clone"),
        &read("kernel/apparmor_restrict_unprivileged_userns"),
    );
    Err(MissingRequirement {
        what: what.to_owned(),
        remedy: remedy.to_owned(),
    })
}

/// Returns the obstacle to user namespaces, by the sysctls of that name, and its remedy.
fn userns_obstacle(most: &str, clone: &str, apparmor: &str) -> (&'static str, &'static str) {
    if most == "0" {
        return (
            "this host lets nobody make user namespaces",
            "as root: `sysctl user.max_user_namespaces=15000`",
        );
    }
    if clone == "0" {
        return (
            "this host lets only root make user namespaces",
            "as root: `sysctl kernel.unprivileged_userns_clone=1`",
        );
    }
    if apparmor == "1" {
        return (
            "AppArmor gives programs no rights in user namespaces of their own",
            "as root: a profile with `userns,` for the jiffy program (docs/rootless.md has it), or \
             `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
        );
    }
    (
        "user namespaces are refused here, perhaps by the container this runs in",
        "let the container make them (for Docker `--security-opt seccomp=unconfined --security-opt \
         apparmor=unconfined`), or run as root",
    )
}

/// Returns true if a process of this user has capabilities in a user namespace of its own.
fn can_make() -> bool {
    // SAFETY: the child makes system calls only and then ends.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            // SAFETY: no pointers. The second call fails if the first gave no capabilities.
            let made = unsafe {
                libc::unshare(libc::CLONE_NEWUSER) == 0
                    && libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) == 0
            };
            // SAFETY: ends this process without running anything else.
            unsafe { libc::_exit(i32::from(!made)) }
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
        for (given, remedy) in [
            (("0", "1", ""), "max_user_namespaces"),
            (("100", "0", ""), "unprivileged_userns_clone"),
            (("100", "", "1"), "apparmor_restrict"),
            (("100", "1", "0"), "container"),
        ] {
            let (what, found) = userns_obstacle(given.0, given.1, given.2);
            assert!(found.contains(remedy) && !what.is_empty(), "{found}");
        }
    }
}
