//! User ids and capabilities of confined processes.

use super::{check, end_with_parent};
use std::io;
use std::mem::size_of_val;

/// Capabilities by their numbers (include/uapi/linux/capability.h).
pub(crate) const CAP_CHOWN: u32 = 0;
pub(crate) const CAP_DAC_OVERRIDE: u32 = 1;
pub(crate) const CAP_DAC_READ_SEARCH: u32 = 2;
pub(crate) const CAP_FOWNER: u32 = 3;
pub(crate) const CAP_FSETID: u32 = 4;
pub(crate) const CAP_SYS_ADMIN: u32 = 21;
pub(crate) const CAP_SETFCAP: u32 = 31;

/// Upper bound of capability numbers.
const MAX_CAPABILITY: u32 = 63;
/// Base of the user ids, to which the process id is added; shared with VMMs
/// (`jiffy_proto::vm::jail`).
const BASE_UID: u32 = 1_900_000_000;
/// Maximum number of tasks of a process, which is the only one of its user.
const MAX_TASKS: libc::rlim_t = 64;
const MAX_FILES: libc::rlim_t = 1024;

/// `struct __user_cap_header_struct` and `struct __user_cap_data_struct` of version 3.
#[repr(C)]
struct CapHeader {
    version: u32,
    pid: libc::c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const VERSION_3: u32 = 0x2008_0522;

/// User and group id of the calling process after [`leave`].
pub(crate) fn own_user() -> u32 {
    BASE_UID + std::process::id()
}

/// Switches to a user id of its own, with the capabilities `kept`, which survive an exec, and
/// without a way to gain others. The process is killed with its parent.
pub(crate) fn leave(kept: &[u32]) -> io::Result<()> {
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_NPROC, MAX_TASKS)?;
    limit(libc::RLIMIT_NOFILE, MAX_FILES)?;
    let user = own_user();
    // SAFETY: no pointers but one to an empty list of groups.
    unsafe {
        // Kept capabilities must stay in the bounding set to be inherited.
        for capability in (0..=MAX_CAPABILITY).filter(|c| !kept.contains(c)) {
            // Unknown to this kernel.
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
        check(libc::setgroups(0, std::ptr::null()))?;
        check(libc::setresgid(user, user, user))?;
        check(libc::setresuid(user, user, user))?;
    }
    keep(kept)?;
    // SAFETY: no pointers.
    unsafe {
        for &capability in kept {
            check(libc::prctl(
                libc::PR_CAP_AMBIENT,
                libc::PR_CAP_AMBIENT_RAISE,
                capability,
                0,
                0,
            ))?;
        }
        // After the change of user, which clears it.
        end_with_parent()?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

fn keep(kept: &[u32]) -> io::Result<()> {
    let mask = kept.iter().fold(0u64, |mask, n| mask | 1 << n);
    let word = |shift: u32| {
        #[expect(clippy::cast_possible_truncation, reason = "half of the mask")]
        let half = (mask >> shift) as u32;
        CapData {
            effective: half,
            permitted: half,
            inheritable: half,
        }
    };
    let header = CapHeader {
        version: VERSION_3,
        pid: 0,
    };
    let data = [word(0), word(32)];
    debug_assert_eq!(size_of_val(&data), 24);
    // SAFETY: version 3 reads a header and two sets of data.
    let done = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    check(done.try_into().unwrap_or(-1))
}

/// Sets a resource limit of the calling process.
pub(crate) fn limit(resource: libc::__rlimit_resource_t, most: libc::rlim_t) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    // SAFETY: one rlimit.
    check(unsafe { libc::setrlimit(resource, &raw const limit) })
}
