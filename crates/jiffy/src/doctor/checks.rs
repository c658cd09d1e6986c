//! Checks before a guest is booted.

use super::Finding;
use jiffy_engine_api::EngineName;
use jiffy_engines::{EngineFacts, Host, HostError, HostFingerprint, PolicyInForce, PolicyReason};
use jiffy_image::Home;
use jiffy_installation::{Component, Package};
use jiffy_microvm_engine::host_kvm::{self, KvmError, KvmKind};
use jiffy_rootless::{MissingRequirement, RootlessSupport};
use nix::unistd::geteuid;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

/// Memory below which even one small sandbox is a squeeze, in KiB.
const MIN_MEMORY_KIB: u64 = 512 * 1024;
/// Space below which templates do not fit, in bytes.
const MIN_SPACE_BYTES: u64 = 2 << 30;

/// Runs all of them in the order in which they matter.
pub fn run_all(tell: &mut dyn FnMut(Finding)) {
    let host = Host::open();
    let facts = match &host {
        Ok(host) => EngineFacts::of(host),
        Err(e) => EngineFacts {
            kvm: Err(String::new()),
            gvisor: Err(e.to_string()),
            measured_ms: None,
        },
    };
    tell(kvm(&facts));
    if let Ok(host) = &host {
        tell(gvisor(host, &facts));
        tell(engine(&facts));
    }
    match jiffy_daemon::rootless_notice::known_support() {
        None => tell(user()),
        Some(facts) => rootless(facts, tell),
    }
    tell(memory());
    tell(huge_pages());
    tell(cgroups());
    tell(programs(&host));
    match Home::locate() {
        Ok(home) => {
            tell(space(home.path()));
            tell(reflink(home.path()));
            tell(template(&home));
            tell(restores(&home));
        }
        Err(e) => tell(Finding::fail(
            "data",
            e.to_string(),
            "name a directory you may write in JIFFY_HOME",
        )),
    }
}

fn kvm(facts: &EngineFacts) -> Finding {
    match host_kvm::open() {
        Ok(_) => match host_kvm::kind() {
            KvmKind::Hardware => Finding::ok("kvm", "/dev/kvm, with hardware virtualization"),
            KvmKind::Software => Finding::note(
                "kvm",
                "/dev/kvm without hardware virtualization: guests run on shadow page tables, exits \
                 cost tens of microseconds",
                "works; for full speed use a host with VT-x or AMD-V, or turn nested virtualization on",
            ),
        },
        Err(e) => {
            let remedy = match &e {
                KvmError::Missing => {
                    "enable VT-x or AMD-V in the firmware, `modprobe kvm_intel` or `modprobe kvm_amd`"
                }
                KvmError::Denied => "`usermod -aG kvm $USER` and log in again, or run as root",
                KvmError::Broken(_) => "update the host kernel",
            };
            let (found, gvisor) = (e.to_string(), facts.check(EngineName::Gvisor).is_ok());
            match gvisor {
                true => Finding::note(
                    "kvm",
                    found,
                    format!("sandboxes run on gVisor instead; for microVMs: {remedy}"),
                ),
                false => Finding::fail(
                    "kvm",
                    found,
                    format!("{remedy}; or make gVisor usable, which needs no KVM"),
                ),
            }
        }
    }
}

/// The other engine, which hosts with KVM can do without.
fn gvisor(host: &Host, facts: &EngineFacts) -> Finding {
    let version = |program: &Path| {
        let output = Command::new(program).arg("version").output();
        let output = output.map_err(|e| format!("cannot start {}: {e}", program.display()))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(format!("{} ended: {}", program.display(), output.status)),
        }
    };
    let found = match (&facts.gvisor, &host.programs().gvisor) {
        (Ok(()), Ok(program)) => version(program),
        (Err(why), _) => Err(why.clone()),
        (_, Err(why)) => Err(why.to_string()),
    };
    match (found, &facts.kvm) {
        (Ok(version), _) => Finding::ok("gvisor", format!("jiffy-gvisor found, {version}")),
        (Err(why), Ok(_)) => Finding::note(
            "gvisor",
            why,
            "works; sandboxes are microVMs, and the engine gvisor is not there",
        ),
        (Err(why), Err(_)) => Finding::fail(
            "gvisor",
            why,
            format!(
                "sandboxes need no KVM with jiffy-gvisor ({}) and root or user namespaces",
                Package::current().remedy(Component::Gvisor)
            ),
        ),
    }
}

/// Engine of new sandboxes.
fn engine(facts: &EngineFacts) -> Finding {
    let choice = facts.choose();
    let found = format!("{}: {}", choice.engine, choice.why);
    match facts.check(choice.engine) {
        Ok(()) => Finding::ok("engine", found),
        Err(_) => Finding::fail("engine", "none can be used", "mend `kvm` or `gvisor` above"),
    }
}

fn user() -> Finding {
    if jiffy_rootless::is_chroot() {
        Finding::fail(
            "user",
            "this process runs in a chroot, which forbids user namespaces",
            jiffy_rootless::CHROOT_REMEDY,
        )
    } else if geteuid().is_root() {
        Finding::ok("user", "root: may build templates and run sandboxes")
    } else {
        Finding::note(
            "user",
            "not root: sandboxes run as far as /dev/kvm may be opened",
            "building the stock templates needs root: `sudo jiffy template build base`",
        )
    }
}

/// Means of an ordinary user in place of root's rights.
fn rootless(facts: &RootlessSupport, tell: &mut dyn FnMut(Finding)) {
    tell(Finding::note(
        "user",
        "not root: sandboxes run without the jail and the limits that root's have",
        "fine for your own work; docs/rootless.md says what is weaker",
    ));
    let note =
        |what, missing: &MissingRequirement| Finding::note(what, &missing.what, &missing.remedy);
    tell(match &facts.namespaces {
        Ok(()) => Finding::ok(
            "namespaces",
            "this user may be root of namespaces of its own",
        ),
        Err(missing) => Finding::note(
            "namespaces",
            format!("{}: no gVisor, and no network", missing.what),
            &missing.remedy,
        ),
    });
    tell(match &facts.ranges {
        Ok(()) => Finding::ok("users", "sandboxes on gVisor are subordinate users"),
        Err(missing) => note("users", missing),
    });
    tell(
        match (
            &facts.uplink,
            jiffy_rootless::current().map(|own| own.uplink()),
        ) {
            (Err(missing), _) => Finding::note(
                "way out",
                format!("sandboxes have no network: {}", missing.what),
                &missing.remedy,
            ),
            (Ok(_), Some(Ok(name))) => {
                Finding::ok("way out", format!("{name} leads out of sandboxes"))
            }
            (Ok(_), Some(Err(why))) => Finding::note(
                "way out",
                format!("sandboxes have no network: {why}"),
                "see whether this host reaches anything itself",
            ),
            (Ok(name), None) => Finding::note(
                "way out",
                format!("{name} is there, and needs a namespace"),
                "mend `namespaces` above",
            ),
        },
    );
}

fn meminfo(key: &str) -> Option<u64> {
    fs::read_to_string("/proc/meminfo")
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
}

fn memory() -> Finding {
    let available = meminfo("MemAvailable").unwrap_or(0);
    let total = meminfo("MemTotal").unwrap_or(0);
    let found = format!("{} MiB available of {} MiB", available / 1024, total / 1024);
    if available < MIN_MEMORY_KIB {
        Finding::fail(
            "memory",
            found,
            "free some: a sandbox of default size may use 512 MiB",
        )
    } else {
        Finding::ok("memory", found)
    }
}

fn huge_pages() -> Finding {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = fs::read_to_string(path).unwrap_or_default();
    let setting = setting.trim();
    if setting.contains("[always]") || setting.contains("[madvise]") {
        Finding::ok("huge pages", setting)
    } else {
        Finding::note(
            "huge pages",
            if setting.is_empty() {
                "not offered by this kernel"
            } else {
                setting
            },
            format!("guests are slower without them: `echo madvise > {path}`"),
        )
    }
}

fn cgroups() -> Finding {
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers");
    if let Ok(controllers) = fs::read_to_string(v2) {
        return Finding::ok("cgroup", format!("version 2: {}", controllers.trim()));
    }
    if Path::new("/sys/fs/cgroup/memory").is_dir() {
        return Finding::ok("cgroup", "version 1");
    }
    Finding::note(
        "cgroup",
        "none mounted",
        "sandboxes run, but the host cannot limit them beyond their size: mount cgroup2 on /sys/fs/cgroup",
    )
}

fn programs(host: &Result<Host, HostError>) -> Finding {
    match host {
        Ok(_) => Finding::ok("programs", "jiffy-vmm and jiffy-agent found"),
        Err(e) => Finding::fail(
            "programs",
            e.to_string(),
            Package::current().remedy(Component::Host),
        ),
    }
}

fn space(home: &Path) -> Finding {
    let found = |free: u64| format!("{}: {} MiB free", home.display(), free >> 20);
    match nix::sys::statvfs::statvfs(home) {
        Ok(s) => {
            let free = s.blocks_available() * s.fragment_size();
            if free < MIN_SPACE_BYTES {
                Finding::fail(
                    "data",
                    found(free),
                    "free some space, or name another directory in JIFFY_HOME",
                )
            } else {
                Finding::ok("data", found(free))
            }
        }
        Err(e) => Finding::fail(
            "data",
            format!("{}: {e}", home.display()),
            "check that directory",
        ),
    }
}

/// `FICLONE` (ioctl_ficlone(2)): one file sharing the blocks of another.
const FICLONE: libc::c_ulong = 0x4004_9409;

fn can_reflink(home: &Path) -> std::io::Result<bool> {
    use std::io::Write;
    let make = |name: &str| {
        let path = home.join(format!(".doctor-{name}-{}", std::process::id()));
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path);
        // Unlinked at once: nothing is left behind.
        fs::remove_file(&path).and(file)
    };
    let mut from = make("a")?;
    let to = make("b")?;
    from.write_all(&[1; 4096])?;
    // SAFETY: FICLONE takes a descriptor by value and touches no memory of ours.
    let result = unsafe { libc::ioctl(to.as_raw_fd(), FICLONE, from.as_raw_fd()) };
    Ok(result == 0)
}

fn reflink(home: &Path) -> Finding {
    match can_reflink(home) {
        Ok(true) => Finding::ok("file system", "shares blocks between copies (reflink)"),
        Ok(false) => Finding::note(
            "file system",
            "no reflink: copies of disks are real copies",
            "works; XFS or btrfs under JIFFY_HOME would save space and time",
        ),
        Err(e) => Finding::fail(
            "file system",
            format!("cannot write in {}: {e}", home.display()),
            "check its owner and mode, or name another directory in JIFFY_HOME",
        ),
    }
}

/// Memory policy of restores, with the reason for it.
fn restores(home: &Home) -> Finding {
    let in_force = PolicyInForce::find(home.path(), &HostFingerprint::here());
    let found = format!(
        "memory of restored sandboxes: {} ({})",
        in_force.policy, in_force.why
    );
    match in_force.why {
        PolicyReason::Measured(_) => Finding::ok("restores", found),
        _ => Finding::note(
            "restores",
            found,
            "works; `jiffy doctor --measure` finds what is best here",
        ),
    }
}

fn template(home: &Home) -> Finding {
    let templates = jiffy_image::Templates::new(home);
    match templates.get("base") {
        Ok(template) => Finding::ok(
            "template",
            format!("base, {} MiB, verified", template.manifest.size() >> 20),
        ),
        Err(jiffy_image::TemplateError::Unknown { .. }) => Finding::note(
            "template",
            "base is not built yet",
            "`jiffy template build base`; the first `jiffy run` does it too",
        ),
        Err(e) => Finding::fail(
            "template",
            e.to_string(),
            "`jiffy template rm base`, then build it again",
        ),
    }
}
