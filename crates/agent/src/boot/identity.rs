//! Application of the identity that the host assigns.
//!
//! Every step must succeed before the host learns that the guest is ready: a clone that kept its
//! parent's random numbers or token is worse than none.

use super::{GuestEngine, clone_renewal, connection_reset, environment, generation};
use crate::settings::AgentSettings;
use crate::state::Agent;
use crate::sys;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiffy_proto::agent::Identity;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd;
use std::path::Path;

/// Least bytes of entropy that make the clones of one snapshot differ.
const MIN_ENTROPY: usize = 32;
/// Ends the one line of `/etc/hosts` that is ours to rewrite.
const HOSTS_MARK: &str = "# jiffy: this sandbox";
/// Contents of `/etc/hosts` if the image has none.
const HOSTS_DEFAULT: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";

/// Applies identities, and knows whether one was applied before.
#[derive(Debug)]
pub struct IdentityApplier {
    engine: GuestEngine,
    last_id: Option<String>,
    /// The host's clock and the guest's time since boot when the last identity came, nanoseconds.
    last_seen: Option<(u64, u64)>,
}

impl IdentityApplier {
    /// One that has applied none.
    pub fn new(engine: GuestEngine) -> Self {
        Self {
            engine,
            last_id: None,
            last_seen: None,
        }
    }

    /// Makes an identity take effect, completely or with an error.
    pub fn apply(&mut self, agent: &Agent, identity: Identity) -> Result<(), String> {
        let has_kernel = self.engine == GuestEngine::MicroVm;
        // Time and randomness first: the later steps draw on both.
        if has_kernel {
            // A clone or a sandbox that was rolled back was made just now: it did not sleep.
            let is_same = self.last_id.as_ref() == Some(&identity.id) && !identity.rewound;
            if let Some(seen) = self.last_seen.filter(|_| is_same) {
                let slept = slept_ns(seen, (identity.time_ns, boot_ns()));
                count_sleep(slept).map_err(|e| format!("cannot count the time asleep: {e}"))?;
            }
            set_clock(identity.time_ns).map_err(|e| format!("cannot set the clock: {e}"))?;
            self.last_seen = Some((identity.time_ns, boot_ns()));
            mix_entropy(&identity.entropy)?;
        }
        if has_kernel && self.last_id.is_some() {
            clone_renewal::wipe_on_fork()
                .map_err(|e| format!("cannot wipe what forks wipe: {e}"))?;
        }
        let hostname = identity.hostname.as_deref().unwrap_or(&identity.id);
        set_hostname(hostname).map_err(|e| format!("cannot set the host name: {e}"))?;
        let replaced = self.last_id.as_ref().is_some_and(|id| *id != identity.id);
        if self.last_id.as_ref() != Some(&identity.id) {
            new_machine_id().map_err(|e| format!("cannot write /etc/machine-id: {e}"))?;
        }
        if replaced {
            clone_renewal::new_boot_id().map_err(|e| format!("cannot replace the boot id: {e}"))?;
            clone_renewal::new_random_seeds()
                .map_err(|e| format!("cannot replace a random seed: {e}"))?;
        }
        // One that wakes where it fell asleep is the only copy, and keeps its connections.
        if has_kernel && (replaced || identity.rewound) {
            connection_reset::reset()
                .map_err(|e| format!("cannot reset the connections of the original: {e}"))?;
        }
        if let Some(user) = &identity.default_user {
            agent.user(Some(user)).map_err(|e| e.to_string())?;
        }
        let mut site = agent.site.borrow_mut();
        if let Err(e) = site.replace(Path::new("/"), identity.site, &identity.env) {
            let why = format!("cannot put certificate authorities and proxy into place: {e}");
            // One that wakes, with a full disk perhaps, is of more use than none.
            match self.last_id.as_ref() == Some(&identity.id) {
                true => eprintln!("jiffy-agent: {why}"),
                false => return Err(why),
            }
        }
        drop(site);
        let mut settings = agent.settings.borrow_mut();
        *settings = AgentSettings {
            env: identity.env,
            access_token: identity.access_token,
            default_user: identity.default_user,
            default_workdir: identity.default_workdir,
        };
        drop(settings);
        environment::write_file(agent).map_err(|e| format!("cannot show the environment: {e}"))?;
        // Last: a program that reads it finds everything else in force.
        generation::renew(&identity.id)
            .map_err(|e| format!("cannot tell programs of their new identity: {e}"))?;
        self.last_id = Some(identity.id);
        Ok(())
    }
}

/// The guest kernel's: how long the machine slept, to be added to `CLOCK_BOOTTIME`.
const SLEPT_NS: &str = "/proc/sys/kernel/slept_ns";
/// Longest sleep that is counted, the kernel's limit: 100 years.
const MAX_SLEPT_NS: u64 = 100 * 365 * 24 * 3600 * 1_000_000_000;

fn boot_ns() -> u64 {
    sys::boot_us() * 1000
}

/// Time that passed on the host's clock and not in the guest, between two looks at both.
fn slept_ns(before: (u64, u64), now: (u64, u64)) -> u64 {
    let outside = now.0.saturating_sub(before.0);
    let inside = now.1.saturating_sub(before.1);
    outside.saturating_sub(inside).min(MAX_SLEPT_NS)
}

/// Moves `CLOCK_BOOTTIME` on, as the end of a suspend does.
fn count_sleep(ns: u64) -> io::Result<()> {
    match std::fs::write(SLEPT_NS, ns.to_string()) {
        // The kernel is another one, or the snapshot is of an earlier one.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Steps the wall clock; the monotonic clock goes on.
pub fn set_clock(time_ns: u64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: (time_ns / 1_000_000_000).cast_signed(),
        tv_nsec: (time_ns % 1_000_000_000).cast_signed(),
    };
    // SAFETY: `time` is a valid timespec.
    sys::check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) }).map(drop)
}

/// Credits the host's bytes to the kernel's pool and reseeds its generator at once.
fn mix_entropy(encoded: &str) -> Result<(), String> {
    #[repr(C)]
    struct PoolInfo {
        bits: libc::c_int,
        bytes: libc::c_int,
        data: [u8; 512],
    }
    /// `_IOW('R', 0x03, int[2])`, linux/random.h.
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    /// `_IO('R', 0x07)`, linux/random.h.
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

    let bytes = STANDARD
        .decode(encoded)
        .map_err(|e| format!("entropy is not base64: {e}"))?;
    if bytes.len() < MIN_ENTROPY {
        return Err(format!(
            "{} bytes of entropy are less than {MIN_ENTROPY}",
            bytes.len()
        ));
    }
    let take = bytes.len().min(512);
    let mut info = PoolInfo {
        bits: (take * 8) as libc::c_int,
        bytes: take as libc::c_int,
        data: [0; 512],
    };
    info.data[..take].copy_from_slice(&bytes[..take]);
    let failed = |e: io::Error| format!("cannot reseed the random number generator: {e}");
    let pool = std::fs::File::options()
        .write(true)
        .open("/dev/urandom")
        .map_err(failed)?;
    // SAFETY: `info` has the layout of rand_pool_info with `bytes` bytes behind it; the second call
    // has no argument.
    unsafe {
        sys::check(libc::ioctl(
            pool.as_raw_fd(),
            RNDADDENTROPY,
            &raw const info,
        ))
        .map_err(failed)?;
        sys::check(libc::ioctl(pool.as_raw_fd(), RNDRESEEDCRNG)).map_err(failed)?;
    }
    Ok(())
}

fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: the pointer and length describe `name`.
    sys::check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })?;
    let before = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    let after = hosts(&before, name);
    if before != after {
        // A root without /etc resolves nothing anyway.
        let _ = write_over("/etc/hosts", &after);
    }
    Ok(())
}

/// `before` with our name in it, in place of an earlier one.
fn hosts(before: &str, name: &str) -> String {
    let kept = if before.is_empty() {
        HOSTS_DEFAULT
    } else {
        before
    };
    let mut text: String = kept
        .lines()
        .filter(|line| !line.ends_with(HOSTS_MARK))
        .flat_map(|line| [line, "\n"])
        .collect();
    let _ = writeln!(text, "127.0.1.1 {name} {HOSTS_MARK}");
    text
}

fn new_machine_id() -> io::Result<()> {
    let id = sys::random_id()? + "\n";
    match write_over("/etc/machine-id", &id) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all("/etc")?;
            write_over("/etc/machine-id", &id)
        }
        other => other,
    }
}

/// Overwrites a small file without giving up its block first: on a full disk there would be no
/// other.
fn write_over(path: &str, text: &str) -> io::Result<()> {
    let mut file = std::fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_name_is_in_etc_hosts_once_and_the_rest_stays() {
        let first = hosts("10.0.0.1 db", "abc");
        assert_eq!(first, format!("10.0.0.1 db\n127.0.1.1 abc {HOSTS_MARK}\n"));
        let second = hosts(&first, "xyz");
        assert_eq!(second, format!("10.0.0.1 db\n127.0.1.1 xyz {HOSTS_MARK}\n"));
        assert!(hosts("", "abc").starts_with("127.0.0.1 localhost\n"));
    }

    #[test]
    fn time_that_passed_only_on_the_host_is_sleep() {
        let minute = 60_000_000_000;
        let seen = (1_000 * minute, 5 * minute);
        assert_eq!(slept_ns(seen, (1_010 * minute, 8 * minute)), 7 * minute);
        // The host's clock was set back, or ran slower.
        assert_eq!(slept_ns(seen, (900 * minute, 8 * minute)), 0);
        assert_eq!(slept_ns(seen, (1_002 * minute, 8 * minute)), 0);
        assert_eq!(slept_ns((0, 0), (u64::MAX, 0)), MAX_SLEPT_NS);
    }
}
