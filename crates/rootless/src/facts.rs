//! What this host lets an ordinary user do, and what would let him do more.

use crate::ranges;
use crate::uplink::Uplink;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Uid, fork};
use std::fs;
use std::sync::OnceLock;

/// Something that is not there, and what mends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// What is missing.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

/// What this host lets its ordinary users do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// User namespaces in which one is root.
    pub namespaces: Result<(), Missing>,
    /// Users and groups for the processes of sandboxes.
    pub ranges: Result<(), Missing>,
    /// Name of the program that leads out.
    pub uplink: Result<&'static str, Missing>,
}

impl Facts {
    /// Of this host and user, by looks; a process is started that makes a namespace and ends.
    pub fn find() -> Self {
        let uid = Uid::effective();
        Self {
            namespaces: namespaces(),
            ranges: ranges::of(uid).map(drop).map_err(|what| Missing {
                what: format!("sandboxes have no users of their own: {what}"),
                remedy: format!(
                    "as root: `apt-get install uidmap`, and `usermod --add-subuids 100000-165535 \
                     --add-subgids 100000-165535` for uid {uid}"
                ),
            }),
            uplink: Uplink::find()
                .map(|uplink| uplink.name())
                .map_err(|what| Missing {
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

/// Tells if this process is in namespaces of its user's own, or could be; the kernel is asked once.
pub fn usable() -> Result<(), Missing> {
    static USABLE: OnceLock<Result<(), Missing>> = OnceLock::new();
    match crate::current() {
        Some(_) => Ok(()),
        None => USABLE.get_or_init(namespaces).clone(),
    }
}

fn namespaces() -> Result<(), Missing> {
    if can_make() {
        return Ok(());
    }
    let read = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
        text.trim().to_owned()
    };
    let (what, remedy) = reason(
        &read("user/max_user_namespaces"),
        &read("kernel/unprivileged_userns_clone"),
        &read("kernel/apparmor_restrict_unprivileged_userns"),
    );
    Err(Missing {
        what: what.to_owned(),
        remedy: remedy.to_owned(),
    })
}

/// What keeps users from namespaces, by the sysctls of that name, and what mends it.
fn reason(most: &str, clone: &str, apparmor: &str) -> (&'static str, &'static str) {
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

/// Tells if a process of this user has rights in a user namespace of its own.
fn can_make() -> bool {
    // SAFETY: the child makes system calls only and then ends.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            // SAFETY: no pointers. The second fails where the first gives no rights.
            let made = unsafe {
                libc::unshare(libc::CLONE_NEWUSER) == 0
                    && libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) == 0
            };
            // SAFETY: it ends this process without running anything of it.
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
    fn what_keeps_users_from_namespaces_is_named_with_its_remedy() {
        for (given, remedy) in [
            (("0", "1", ""), "max_user_namespaces"),
            (("100", "0", ""), "unprivileged_userns_clone"),
            (("100", "", "1"), "apparmor_restrict"),
            (("100", "1", "0"), "container"),
        ] {
            let (what, found) = reason(given.0, given.1, given.2);
            assert!(found.contains(remedy) && !what.is_empty(), "{found}");
        }
    }
}
