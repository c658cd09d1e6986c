//! Applies the identity that the host sends to a booted or restored guest: id, clock, random bytes,
//! host name, environment and settings of the site (its network).
//!
//! All steps must succeed before the guest reports to the host that it is ready. After a failed
//! step, a clone could run with random numbers of its parent. Worker threads perform the steps.
//! A file system of the sandbox that does not answer must not prevent a resume. If a step waits for
//! such a file system, and the sandbox is usable without the step, the step is skipped. A message
//! on the console names skipped steps.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.

mod files;

use super::environment::EnvironmentFile;
use super::site::InstalledSite;
use super::{GuestEngine, clone_renewal, connection_reset, generation};
use crate::settings::{AgentSettings, SandboxLabels};
use crate::state::Agent;
use crate::sys;
use crate::users::UserLookup;
use crate::workers::{CallClass, CallError, Progress, lock};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiffy_proto::agent::Identity;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Minimum number of bytes of entropy that make the clones of one snapshot differ.
const MIN_ENTROPY: usize = 32;

/// Applies identities, and records whether an identity was applied before.
#[derive(Debug)]
pub struct IdentityApplier {
    engine: GuestEngine,
    last_id: Option<String>,
    /// Host's clock and guest's time since boot when the last identity was applied, in nanoseconds.
    last_seen: Arc<Mutex<Option<(u64, u64)>>>,
}

impl IdentityApplier {
    /// Creates an applier for a guest that has not received an identity yet.
    pub fn new(engine: GuestEngine) -> Self {
        Self {
            engine,
            last_id: None,
            last_seen: Arc::default(),
        }
    }

    /// Returns true if the agent sets the clock of the guest. In gVisor, it is the host's clock.
    pub fn sets_clock(&self) -> bool {
        self.engine == GuestEngine::MicroVm
    }

    /// Applies an identity completely, or returns an error. `received` is the time at which the
    /// identity was received.
    pub async fn apply(
        &mut self,
        agent: &Agent,
        identity: Identity,
        received: Instant,
    ) -> Result<(), String> {
        let labels = SandboxLabels {
            sandbox: identity.id.clone(),
            template: identity.template_id.clone(),
            team: identity.team_id.clone(),
        };
        let work = Arc::new(IdentityWork {
            has_kernel: self.sets_clock(),
            is_first: self.last_id.is_none(),
            is_same: self.last_id.as_ref() == Some(&identity.id),
            last_seen: Arc::clone(&self.last_seen),
            site: Arc::clone(&agent.site),
            labels,
            identity,
            received,
            site_variables: Mutex::default(),
            owner: Mutex::default(),
            position: Mutex::default(),
        });
        run_steps(agent, &work).await?;
        let identity = &work.identity;
        // The settings become visible to requests only now, when all files of the identity exist.
        *agent.settings.borrow_mut() = AgentSettings {
            env: identity.env.clone(),
            access_token: identity.access_token.clone(),
            default_user: identity.default_user.clone(),
            default_workdir: identity.default_workdir.clone(),
            labels: Some(work.labels.clone()),
        };
        *agent.site_variables.borrow_mut() = lock(&work.site_variables).clone();
        self.last_id = Some(identity.id.clone());
        Ok(())
    }
}

/// Runs all steps. A step whose file system does not answer is skipped if it is optional.
async fn run_steps(agent: &Agent, work: &Arc<IdentityWork>) -> Result<(), String> {
    // Each run completes all steps or skips one step, so one more run than there are steps
    // suffices.
    for run in 0..=STEPS.len() {
        lock(&work.position).run = run;
        let steps = Arc::clone(work);
        let call = move |progress: &Progress| steps.run(run, progress);
        let what = "cannot apply the identity";
        match agent.workers.run(CallClass::Identity, what, call).await {
            Ok(outcome) => return outcome,
            Err(e @ (CallError::NoAnswer { .. } | CallError::Exhausted { .. })) => {
                let mut position = lock(&work.position);
                // From here on, the stuck worker must not change the position.
                position.run = run + 1;
                let step = STEPS.get(position.step).ok_or_else(|| e.to_string())?;
                if !(step.may_be_skipped)(work) {
                    return Err(format!("{}: {e}", step.what));
                }
                eprintln!("jiffy-agent: {}: skipped: {e}", step.what);
                position.step += 1;
            }
            Err(e) => return Err(e.to_string()),
        }
    }
    Err("cannot apply the identity: no file system answers".to_owned())
}

/// An identity that is being applied.
struct IdentityWork {
    identity: Identity,
    received: Instant,
    labels: SandboxLabels,
    /// Set if the guest has its own kernel. gVisor sets the clock and the randomness itself, and
    /// resets connections during a restore.
    has_kernel: bool,
    /// Set if no identity was applied before.
    is_first: bool,
    /// Set if the last identity had the same id.
    is_same: bool,
    last_seen: Arc<Mutex<Option<(u64, u64)>>>,
    site: Arc<Mutex<InstalledSite>>,
    /// Variables of the installed site.
    site_variables: Mutex<BTreeMap<String, String>>,
    /// User and group of the default user, if the look-up succeeded.
    owner: Mutex<Option<(u32, u32)>>,
    position: Mutex<IdentityPosition>,
}

/// Progress of an [`IdentityWork`].
#[derive(Default)]
struct IdentityPosition {
    /// Number of the current run. A worker of an earlier run, which was stuck meanwhile, stops.
    run: usize,
    /// Index of the current step.
    step: usize,
}

/// A step of [`IdentityWork`].
struct Step {
    /// Message of a failure, for the console and the host.
    what: &'static str,
    work: fn(&IdentityWork) -> Result<(), String>,
    /// Returns true if the sandbox is usable without this step.
    may_be_skipped: fn(&IdentityWork) -> bool,
}

/// Values of `may_be_skipped`.
const NEVER: fn(&IdentityWork) -> bool = |_| false;
const ALWAYS: fn(&IdentityWork) -> bool = |_| true;

/// All steps in their order. Time and randomness come first, since later steps depend on both. The
/// generation comes last, so that a program that reads the new generation finds all other changes
/// complete.
const STEPS: [Step; 10] = [
    Step {
        what: "cannot set clock and randomness",
        work: IdentityWork::renew_kernel,
        may_be_skipped: NEVER,
    },
    Step {
        what: "cannot set the host name",
        work: IdentityWork::set_name,
        may_be_skipped: ALWAYS,
    },
    Step {
        what: "cannot write /etc/machine-id",
        work: IdentityWork::renew_machine_id,
        may_be_skipped: ALWAYS,
    },
    Step {
        what: "cannot replace the boot id",
        work: IdentityWork::renew_boot_id,
        may_be_skipped: NEVER,
    },
    Step {
        what: "cannot replace a random seed",
        work: IdentityWork::renew_seeds,
        may_be_skipped: ALWAYS,
    },
    Step {
        what: "cannot reset the connections of the original",
        work: IdentityWork::reset_connections,
        may_be_skipped: NEVER,
    },
    Step {
        what: "cannot look up the default user",
        work: IdentityWork::look_up_owner,
        may_be_skipped: ALWAYS,
    },
    Step {
        what: "cannot install certificate authorities and proxy",
        work: IdentityWork::install_site,
        may_be_skipped: |work| work.is_same,
    },
    Step {
        what: "cannot write the environment",
        work: IdentityWork::write_environment,
        may_be_skipped: NEVER,
    },
    Step {
        what: "cannot write the generation",
        work: IdentityWork::renew_generation,
        may_be_skipped: NEVER,
    },
];

impl IdentityWork {
    /// Performs the remaining steps, beginning with the current one. `run` is the number of the run
    /// to which the calling worker belongs.
    fn run(&self, run: usize, progress: &Progress) -> Result<(), String> {
        loop {
            let index = self.index(run)?;
            let Some(step) = STEPS.get(index) else {
                return Ok(());
            };
            (step.work)(self)?;
            progress.advance();
            // While this worker was stuck, the caller may have skipped the step and started another
            // run, which continues with the next step.
            let mut position = lock(&self.position);
            if position.run == run {
                position.step = index + 1;
            }
        }
    }

    /// Returns the index of the current step for a worker of run `run`.
    fn index(&self, run: usize) -> Result<usize, String> {
        let position = lock(&self.position);
        if position.run != run {
            return Err("another worker continues".to_owned());
        }
        Ok(position.step)
    }

    /// Returns true if the last identity belonged to another sandbox, that is, if this sandbox is a
    /// clone.
    fn is_clone(&self) -> bool {
        !self.is_first && !self.is_same
    }

    /// Sets the clock, adds the host's random bytes, and clears memory marked `MADV_WIPEONFORK`.
    fn renew_kernel(&self) -> Result<(), String> {
        if !self.has_kernel {
            return Ok(());
        }
        let identity = &self.identity;
        let mut last_seen = lock(&self.last_seen);
        // A clone or a sandbox that was rolled back starts at this moment, so no time was spent in
        // suspend.
        let may_have_slept = self.is_same && !identity.rewound;
        if let Some(seen) = last_seen.filter(|_| may_have_slept) {
            let slept = slept_ns(seen, (self.host_time_ns(), boot_ns()));
            count_sleep(slept).map_err(|e| format!("cannot advance the boot-time clock: {e}"))?;
        }
        set_clock(self.host_time_ns()).map_err(|e| format!("cannot set the clock: {e}"))?;
        *last_seen = Some((self.host_time_ns(), boot_ns()));
        mix_entropy(&identity.entropy)?;
        if self.is_first {
            return Ok(());
        }
        clone_renewal::wipe_on_fork()
            .map_err(|e| format!("cannot clear memory marked MADV_WIPEONFORK: {e}"))
    }

    /// Returns the current time of the host's clock, without the duration of the transfer.
    fn host_time_ns(&self) -> u64 {
        let since = u64::try_from(self.received.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.identity.time_ns.saturating_add(since)
    }

    fn set_name(&self) -> Result<(), String> {
        let name = self.identity.hostname.as_ref();
        files::set_hostname(name.unwrap_or(&self.identity.id))
            .map_err(|e| format!("cannot set the host name: {e}"))
    }

    fn renew_machine_id(&self) -> Result<(), String> {
        if self.is_same {
            return Ok(());
        }
        files::new_machine_id().map_err(|e| format!("cannot write /etc/machine-id: {e}"))
    }

    fn renew_boot_id(&self) -> Result<(), String> {
        if !self.is_clone() {
            return Ok(());
        }
        clone_renewal::new_boot_id().map_err(|e| format!("cannot replace the boot id: {e}"))
    }

    fn renew_seeds(&self) -> Result<(), String> {
        // The disk of a booted guest may be a copy of the disk of another sandbox.
        if self.is_same {
            return Ok(());
        }
        clone_renewal::new_random_seeds().map_err(|e| format!("cannot replace a random seed: {e}"))
    }

    fn reset_connections(&self) -> Result<(), String> {
        // A sandbox that is resumed from its pause is the only copy, and its connections remain
        // valid.
        if !self.has_kernel || !self.is_clone() && !self.identity.rewound {
            return Ok(());
        }
        connection_reset::reset()
            .map_err(|e| format!("cannot reset the connections of the original: {e}"))
    }

    fn look_up_owner(&self) -> Result<(), String> {
        let name = self.identity.default_user.clone();
        match (UserLookup { name }).find() {
            Ok(user) => *lock(&self.owner) = Some((user.uid, user.gid)),
            Err(e) if self.is_first => return Err(e.to_string()),
            // The sandbox removed the user or replaced the user database. The sandbox is still
            // usable with another user.
            Err(e) => eprintln!("jiffy-agent: {e}"),
        }
        Ok(())
    }

    /// Installs the certificate authorities and the proxy of the host and the sandbox in the guest.
    fn install_site(&self) -> Result<(), String> {
        let mut site = lock(&self.site);
        let settings = self.identity.site.clone();
        if let Err(e) = site.replace(Path::new("/"), settings, &self.identity.env) {
            let why = format!("cannot install certificate authorities and proxy: {e}");
            // A resumed sandbox without these settings, for example because its disk is full, is
            // better than a failed resume.
            if self.is_same {
                eprintln!("jiffy-agent: {why}")
            } else {
                return Err(why);
            }
        }
        *lock(&self.site_variables) = site.variables().clone();
        Ok(())
    }

    /// Writes the environment of the sandbox to a file, for programs that the agent does not start.
    fn write_environment(&self) -> Result<(), String> {
        let failed = |e: io::Error| format!("cannot write the environment: {e}");
        let mut variables: BTreeMap<String, String> = self
            .labels
            .variables()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        variables.extend(self.identity.env.clone());
        super::site::add_missing(&mut variables, &lock(&self.site_variables));
        // If the owner is unknown, only root may read the file.
        let owner = lock(&self.owner).unwrap_or((0, 0));
        EnvironmentFile { variables, owner }
            .write()
            .map_err(failed)?;
        files::write_labels(&self.labels).map_err(failed)
    }

    fn renew_generation(&self) -> Result<(), String> {
        generation::renew(&self.identity.id)
            .map_err(|e| format!("cannot announce the new identity to programs: {e}"))
    }
}

/// File of the guest kernel: duration of a suspend, which the kernel adds to `CLOCK_BOOTTIME`.
const SLEPT_NS: &str = "/proc/sys/kernel/slept_ns";
/// Maximum duration of a suspend, the limit of the kernel: 100 years.
const MAX_SLEPT_NS: u64 = 100 * 365 * 24 * 3600 * 1_000_000_000;

fn boot_ns() -> u64 {
    sys::boot_us() * 1000
}

/// Returns the time that passed on the host's clock but not in the guest. Each argument is a
/// reading of both clocks: host, guest.
fn slept_ns(before: (u64, u64), now: (u64, u64)) -> u64 {
    let outside = now.0.saturating_sub(before.0);
    let inside = now.1.saturating_sub(before.1);
    outside.saturating_sub(inside).min(MAX_SLEPT_NS)
}

/// Advances `CLOCK_BOOTTIME` as after a suspend.
fn count_sleep(ns: u64) -> io::Result<()> {
    match std::fs::write(SLEPT_NS, ns.to_string()) {
        // Another kernel, or the kernel of an early snapshot, does not have the file.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Sets the wall clock. The monotonic clock is unchanged.
pub fn set_clock(time_ns: u64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: (time_ns / 1_000_000_000).cast_signed(),
        tv_nsec: (time_ns % 1_000_000_000).cast_signed(),
    };
    // SAFETY: `time` is a valid timespec.
    sys::check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) }).map(drop)
}

/// Changes the wall clock by a number of nanoseconds, and returns the new time.
pub fn step_clock(step_ns: i64) -> io::Result<u64> {
    let now_ns = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = since.map_err(|_| io::ErrorKind::InvalidData)?;
        u64::try_from(since.as_nanos()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
    };
    if step_ns != 0 {
        set_clock(now_ns()?.saturating_add_signed(step_ns))?;
    }
    now_ns()
}

/// Adds the host's bytes to the kernel's entropy pool and reseeds its generator immediately.
fn mix_entropy(encoded: &str) -> Result<(), String> {
    /// Argument of `RNDADDENTROPY` (`rand_pool_info`, random(4)): number of credited bits, number
    /// of bytes, and the bytes.
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
            "{} bytes of entropy, at least {MIN_ENTROPY} are required",
            bytes.len()
        ));
    }
    // `take` is at most 512, so the conversions to `c_int` cannot overflow.
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
    // SAFETY: `info` has the layout of rand_pool_info, followed by `bytes` bytes. The second call
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_passed_only_on_the_host_is_sleep() {
        let minute = 60_000_000_000;
        let seen = (1_000 * minute, 5 * minute);
        assert_eq!(slept_ns(seen, (1_010 * minute, 8 * minute)), 7 * minute);
        // The clock of the host was set back, or was slower.
        assert_eq!(slept_ns(seen, (900 * minute, 8 * minute)), 0);
        assert_eq!(slept_ns(seen, (1_002 * minute, 8 * minute)), 0);
        assert_eq!(slept_ns((0, 0), (u64::MAX, 0)), MAX_SLEPT_NS);
    }
}
