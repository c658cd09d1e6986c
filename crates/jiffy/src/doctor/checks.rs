//! Checks of `jiffy doctor` that do not boot a guest: devices, engines, user, memory, disk and
//! templates. The *uplink* is a process that connects the namespaces of an unprivileged user to the
//! network of the host.

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

/// Minimum available memory of the host in KiB.
const MIN_MEMORY_KIB: u64 = 512 * 1024;
/// Minimum free disk space in bytes, for sandboxes and snapshots in addition to templates.
const MIN_SPACE_BYTES: u64 = 2 << 30;

/// Runs all checks, the most important first.
pub fn run_all(report: &mut dyn FnMut(Finding)) {
    let host = Host::open();
    let facts = match &host {
        Ok(host) => EngineFacts::of(host),
        // Without the programs of this host, no engine is usable. The empty reason is never shown:
        // `kvm` opens the device itself.
        Err(e) => EngineFacts {
            kvm: Err(String::new()),
            gvisor: Err(e.to_string()),
            measured_ms: None,
        },
    };
    report(kvm(&facts));
    if let Ok(host) = &host {
        report(gvisor(host, &facts));
        report(engine(&facts));
    }
    // At the start of the command, `rootless::enter_for` determines the support for an ordinary
    // user, and may enter a user namespace in which this process is root. The support is unknown if
    // root runs the command, or if the data directory cannot be determined.
    match jiffy_daemon::rootless_notice::known_support() {
        None => report(user()),
        Some(facts) => rootless(facts, report),
    }
    report(memory());
    report(huge_pages());
    report(cgroups());
    report(programs(&host));
    match Home::locate() {
        Ok(home) => {
            report(space(home.path()));
            report(reflink(home.path()));
            report(template(&home));
            report(restores(&home));
        }
        Err(e) => report(Finding::fail(
            "data",
            e.to_string(),
            "set JIFFY_HOME to a writable directory",
        )),
    }
}

/// Checks /dev/kvm. Hosts with gVisor do not need it.
fn kvm(facts: &EngineFacts) -> Finding {
    match host_kvm::open() {
        Ok(_) => match host_kvm::kind() {
            KvmKind::Hardware => Finding::ok("kvm", "/dev/kvm, with hardware virtualization"),
            KvmKind::Software => Finding::note(
                "kvm",
                "/dev/kvm without hardware virtualization: guests use shadow page tables, and \
                 each exit takes tens of microseconds",
                "optional: use a host with VT-x or AMD-V, or enable nested virtualization, for full speed",
            ),
        },
        Err(e) => {
            let remedy = match &e {
                KvmError::Missing => {
                    "enable VT-x or AMD-V in the firmware, and run `modprobe kvm_intel` or `modprobe kvm_amd`"
                }
                KvmError::Denied => "run `usermod -aG kvm $USER` and log in again, or run as root",
                KvmError::Broken(_) => "update the host kernel",
            };
            let (description, gvisor) = (e.to_string(), facts.check(EngineName::Gvisor).is_ok());
            if gvisor {
                Finding::note(
                    "kvm",
                    description,
                    format!("optional: sandboxes use gVisor; for microVMs: {remedy}"),
                )
            } else {
                Finding::fail(
                    "kvm",
                    description,
                    format!("{remedy}; or install gVisor, which needs no KVM"),
                )
            }
        }
    }
}

/// Checks gVisor, which hosts with KVM do not need.
fn gvisor(host: &Host, facts: &EngineFacts) -> Finding {
    let version = |program: &Path| {
        let output = Command::new(program)
            .arg("version")
            .output()
            .map_err(|e| format!("cannot start {}: {e}", program.display()))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(format!("{} failed: {}", program.display(), output.status))
        }
    };
    let version = match (&facts.gvisor, &host.programs().gvisor) {
        (Ok(()), Ok(program)) => version(program),
        (Err(reason), _) => Err(reason.clone()),
        (_, Err(reason)) => Err(reason.to_string()),
    };
    match (version, &facts.kvm) {
        (Ok(version), _) => Finding::ok("gvisor", format!("jiffy-gvisor, {version}")),
        (Err(reason), Ok(_)) => Finding::note(
            "gvisor",
            reason,
            "optional: sandboxes are microVMs; the engine gvisor is not available",
        ),
        (Err(reason), Err(_)) => Finding::fail(
            "gvisor",
            reason,
            format!(
                "install jiffy-gvisor to run sandboxes without KVM ({}); it needs root or user namespaces",
                Package::current().remedy(Component::Gvisor)
            ),
        ),
    }
}

/// Checks that the default engine of new sandboxes is usable.
fn engine(facts: &EngineFacts) -> Finding {
    let choice = facts.choose();
    let description = format!("{}: {}", choice.engine, choice.why);
    match facts.check(choice.engine) {
        Ok(()) => Finding::ok("engine", description),
        Err(_) => Finding::fail(
            "engine",
            "no engine is usable",
            "fix `kvm` or `gvisor` above",
        ),
    }
}

/// Checks the privileges of this process, if its rootless support is unknown.
fn user() -> Finding {
    if jiffy_rootless::is_chroot() {
        Finding::fail(
            "user",
            "this process runs in a chroot, which forbids user namespaces",
            jiffy_rootless::CHROOT_REMEDY,
        )
    } else if geteuid().is_root() {
        Finding::ok("user", "root: can build templates and run sandboxes")
    } else {
        Finding::note(
            "user",
            "not root: sandboxes run if this user can open /dev/kvm",
            "run `sudo jiffy template build base`: building stock templates needs root",
        )
    }
}

/// Checks the features that replace root privileges for an unprivileged user.
fn rootless(facts: &RootlessSupport, report: &mut dyn FnMut(Finding)) {
    report(Finding::note(
        "user",
        "not root: sandboxes run without the jail and resource limits",
        "run untrusted code as root instead; docs/rootless.md lists the differences",
    ));
    let note = |check, missing: &MissingRequirement| {
        Finding::note(check, &missing.description, &missing.remedy)
    };
    report(match &facts.namespaces {
        Ok(()) => Finding::ok("namespaces", "this user can create user namespaces"),
        Err(missing) => Finding::note(
            "namespaces",
            format!(
                "{}: gVisor and network are not available",
                missing.description
            ),
            &missing.remedy,
        ),
    });
    report(match &facts.ranges {
        Ok(()) => Finding::ok("users", "sandboxes on gVisor use subordinate user ids"),
        Err(missing) => note("users", missing),
    });
    report(
        match (
            &facts.uplink,
            jiffy_rootless::current().map(|own| own.uplink()),
        ) {
            (Err(missing), _) => Finding::note(
                "uplink",
                format!("sandboxes have no network: {}", missing.description),
                &missing.remedy,
            ),
            (Ok(_), Some(Ok(name))) => Finding::ok(
                "uplink",
                format!("{name} connects sandboxes to the internet"),
            ),
            (Ok(_), Some(Err(reason))) => Finding::note(
                "uplink",
                format!("sandboxes have no network: {reason}"),
                "check the network connection of this host",
            ),
            (Ok(name), None) => Finding::note(
                "uplink",
                format!("{name} is installed, but needs a user namespace"),
                "fix `namespaces` above",
            ),
        },
    );
}

/// Returns a value of /proc/meminfo in KiB.
fn meminfo(key: &str) -> Option<u64> {
    fs::read_to_string("/proc/meminfo")
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
}

/// Checks the free memory of the host.
fn memory() -> Finding {
    let available = meminfo("MemAvailable").unwrap_or(0);
    let total = meminfo("MemTotal").unwrap_or(0);
    let description = format!("{} MiB available of {} MiB", available / 1024, total / 1024);
    if available < MIN_MEMORY_KIB {
        Finding::fail(
            "memory",
            description,
            "free memory: a sandbox of default size uses up to 512 MiB",
        )
    } else {
        Finding::ok("memory", description)
    }
}

/// Checks whether guests can use transparent huge pages: with `always`, or with `madvise`, because
/// the VMM requests them for guest memory.
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
                "not supported by this kernel"
            } else {
                setting
            },
            format!("run `echo madvise > {path}`: guests are faster with huge pages"),
        )
    }
}

/// Checks whether control groups are mounted.
fn cgroups() -> Finding {
    // This file exists only if version 2 is mounted at /sys/fs/cgroup.
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers");
    if let Ok(controllers) = fs::read_to_string(v2) {
        return Finding::ok("cgroup", format!("version 2: {}", controllers.trim()));
    }
    if Path::new("/sys/fs/cgroup/memory").is_dir() {
        return Finding::ok("cgroup", "version 1");
    }
    Finding::note(
        "cgroup",
        "not mounted",
        "mount cgroup2 on /sys/fs/cgroup: without it, VMM processes have no resource limits",
    )
}

/// Reports the result of the search for the programs of this host.
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

/// Checks the free space of the data directory.
fn space(home: &Path) -> Finding {
    let description = |free: u64| format!("{}: {} MiB free", home.display(), free >> 20);
    match nix::sys::statvfs::statvfs(home) {
        Ok(s) => {
            // Available to users without root privileges, which excludes reserved blocks.
            let free = s.blocks_available() * s.fragment_size();
            if free < MIN_SPACE_BYTES {
                Finding::fail(
                    "data",
                    description(free),
                    "free disk space, or set JIFFY_HOME to another directory",
                )
            } else {
                Finding::ok("data", description(free))
            }
        }
        Err(e) => Finding::fail(
            "data",
            format!("{}: {e}", home.display()),
            "check the directory",
        ),
    }
}

/// `FICLONE` (ioctl_ficlone(2)): makes a file share the blocks of another file.
const FICLONE: libc::c_ulong = 0x4004_9409;

/// Returns whether files in the data directory can share blocks.
fn can_reflink(home: &Path) -> std::io::Result<bool> {
    use std::io::Write;
    let make = |name: &str| {
        let path = home.join(format!(".doctor-{name}-{}", std::process::id()));
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path);
        // The file is unlinked immediately, so that no file remains after a crash.
        fs::remove_file(&path).and(file)
    };
    let mut from = make("a")?;
    let to = make("b")?;
    // An empty file has no blocks to share.
    from.write_all(&[1; 4096])?;
    // SAFETY: FICLONE takes a descriptor by value and accesses no memory of this process.
    let result = unsafe { libc::ioctl(to.as_raw_fd(), FICLONE, from.as_raw_fd()) };
    Ok(result == 0)
}

/// Checks whether disks can be copied without copying their data.
fn reflink(home: &Path) -> Finding {
    match can_reflink(home) {
        Ok(true) => Finding::ok("file system", "supports reflink copies"),
        Ok(false) => Finding::note(
            "file system",
            "does not support reflink: disks are copied completely",
            "optional: use XFS or btrfs for JIFFY_HOME to save space and time",
        ),
        Err(e) => Finding::fail(
            "file system",
            format!("cannot write to {}: {e}", home.display()),
            "check its owner and mode, or set JIFFY_HOME to another directory",
        ),
    }
}

/// Reports the memory policy of restores and the reason for it.
fn restores(home: &Home) -> Finding {
    let policy = PolicyInForce::find(home.path(), &HostFingerprint::here());
    let description = format!(
        "memory of restored sandboxes: {} ({})",
        policy.policy, policy.why
    );
    match policy.why {
        PolicyReason::Measured(_) => Finding::ok("restores", description),
        _ => Finding::note(
            "restores",
            description,
            "optional: run `jiffy doctor --measure` to find the best policy for this host",
        ),
    }
}

/// Checks the template `base`.
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
            "run `jiffy template build base`; the first `jiffy run` also builds it",
        ),
        Err(e) => Finding::fail(
            "template",
            e.to_string(),
            "run `jiffy template rm base` and build the template again",
        ),
    }
}
