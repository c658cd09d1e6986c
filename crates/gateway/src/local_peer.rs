//! Authentication of processes that connect to the owner's socket.
//!
//! The user id alone is not sufficient: a process that the daemon confines may have the owner's
//! user id, such as root without capabilities. A confined process cannot regain its privileges, so
//! the state in `/proc` after connecting is conclusive. If the process exits meanwhile, its
//! connection closes.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Bit of the capability to access files of all users (`CAP_DAC_OVERRIDE`).
const CAP_DAC_OVERRIDE: u64 = 1 << 1;

/// Privileges of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Privileges {
    /// True if the effective user is root.
    is_root: bool,
    /// Effective capabilities, one bit per capability.
    effective: u64,
    /// Bounding set of capabilities, one bit per capability.
    bounding: u64,
    /// Inode of its user namespace. `None` if the daemon may not read it.
    user_namespace: Option<u64>,
}

impl Privileges {
    /// Reads the privileges of `process`, a process id or `self`.
    fn of(process: &str) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let namespace = fs::metadata(format!("/proc/{process}/ns/user"));
        Self::parse(&status, namespace.ok().map(|metadata| metadata.ino()))
    }

    /// Parses the contents of `/proc/PID/status`.
    fn parse(status: &str, user_namespace: Option<u64>) -> Option<Self> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.strip_prefix(':')?.split_whitespace())
        };
        let set = |name| u64::from_str_radix(field(name)?.next()?, 16).ok();
        Some(Self {
            // The second field is the effective user id.
            is_root: field("Uid")?.nth(1)? == "0",
            effective: set("CapEff")?,
            bounding: set("CapBnd")?,
            user_namespace,
        })
    }

    /// Returns whether this process may be the owner of a daemon with the privileges `daemon`.
    /// `is_first` states whether the daemon is in the initial user namespace.
    fn may_own(self, daemon: Self, is_first: bool) -> bool {
        let is_same_namespace = self.user_namespace == daemon.user_namespace;
        // The daemon empties the bounding set of processes that it confines, such as VMMs. Other
        // processes usually retain theirs.
        let is_confined = self.bounding == 0 && daemon.bounding != 0;
        // A daemon in the initial namespace trusts no process in another user namespace, or in one
        // that it may not read.
        let is_outer = is_first && !is_same_namespace;
        let lacks = |of: Self| of.effective & CAP_DAC_OVERRIDE == 0;
        // A root process without this capability was confined, if the daemon has it.
        let is_weak_root =
            is_same_namespace && self.is_root && daemon.is_root && lacks(self) && !lacks(daemon);
        !(is_confined || is_outer || is_weak_root)
    }
}

/// Returns whether the process `pid`, which has the owner's user id, may be the owner. `None` or 0
/// means that the process is outside this PID namespace, and is therefore not confined by this
/// daemon.
pub(crate) fn may_be_owner(pid: Option<i32>) -> bool {
    let Some(pid) = pid.filter(|pid| *pid > 0) else {
        return true;
    };
    // Deny access if the comparison is impossible.
    let Some(daemon) = Privileges::of("self") else {
        return false;
    };
    let is_first = is_first_namespace(fs::read_to_string("/proc/self/uid_map"));
    let peer = Privileges::of(&pid.to_string());
    peer.is_some_and(|peer| peer.may_own(daemon, is_first))
}

/// Returns whether this map belongs to the initial user namespace. Assumes so if the map cannot be
/// read: the daemon then trusts no process in another user namespace.
fn is_first_namespace(map: io::Result<String>) -> bool {
    map.map_or(true, |map| {
        map.split_whitespace().eq(["0", "0", "4294967295"])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set of all 41 capabilities of Linux.
    const ALL: u64 = 0x1ff_ffff_ffff;

    /// Returns the privileges of a root process with all capabilities.
    fn root() -> Privileges {
        Privileges {
            is_root: true,
            effective: ALL,
            bounding: ALL,
            user_namespace: Some(1),
        }
    }

    #[test]
    fn a_user_id_alone_does_not_make_a_process_the_owner() {
        let owner = root();
        assert!(owner.may_own(root(), true));
        // Root of a container with Docker's default capabilities.
        let contained = Privileges {
            effective: 0xa804_25fb,
            bounding: 0xa804_25fb,
            ..root()
        };
        assert!(contained.may_own(root(), true));
        let without_capabilities = Privileges {
            effective: 0,
            ..root()
        };
        let confined = Privileges {
            bounding: 0,
            ..without_capabilities
        };
        let elsewhere = Privileges {
            user_namespace: Some(2),
            ..root()
        };
        let hidden = Privileges {
            user_namespace: None,
            ..root()
        };
        for peer in [without_capabilities, confined, elsewhere, hidden] {
            assert!(!peer.may_own(root(), true), "{peer:?}");
        }
    }

    #[test]
    fn an_ordinary_user_reaches_a_daemon_in_a_namespace_of_its_own() {
        let user = Privileges {
            is_root: true,
            effective: 0,
            bounding: ALL,
            user_namespace: Some(2),
        };
        assert!(user.may_own(root(), false));
        let confined = Privileges {
            bounding: 0,
            ..user
        };
        assert!(!confined.may_own(root(), false));
        // Neither process has capabilities.
        let daemon = Privileges {
            is_root: false,
            effective: 0,
            ..root()
        };
        assert!(daemon.may_own(daemon, true));
    }

    #[test]
    fn an_unreadable_map_of_user_ids_gives_no_access() {
        let map = |text: &str| Ok(text.to_owned());
        assert!(is_first_namespace(map(
            "         0          0 4294967295\n"
        )));
        assert!(!is_first_namespace(map("0 1000 1\n")));
        assert!(is_first_namespace(Err(io::ErrorKind::OutOfMemory.into())));
    }

    #[test]
    fn privileges_are_read_from_proc() {
        let status = "Name:\tx\nUid:\t1000\t0\t0\t0\nCapEff:\t0000000000000002\n\
                      CapBnd:\t00000000000000ff\n";
        let expected = Privileges {
            is_root: true,
            effective: 2,
            bounding: 255,
            user_namespace: None,
        };
        assert_eq!(Privileges::parse(status, None), Some(expected));
        assert_eq!(Privileges::parse("Uid:\t0\n", None), None);
        assert!(may_be_owner(i32::try_from(std::process::id()).ok()));
        assert!(may_be_owner(Some(0)) && may_be_owner(None));
        assert!(!may_be_owner(Some(i32::MAX)));
    }
}
