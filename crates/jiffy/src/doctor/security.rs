//! `jiffy doctor --security`: checks the host for settings that weaken the isolation of sandboxes.

use super::{Finding, files, kernel};
use jiffy_engines::Host;
use jiffy_image::Home;
use jiffy_microvm_engine::Cgroups;
use jiffy_microvm_engine::host_kvm::{self, KvmKind};
use nix::unistd::geteuid;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Runs all checks, the most important first.
pub fn run_all(report: &mut dyn FnMut(Finding)) {
    // Tests check other directories with the same structure.
    let root = Path::new("/");
    report(virtualization());
    report(jail());
    report(limits());
    report(user());
    if let Ok(home) = Home::locate() {
        files::run_all(home.path(), report);
    }
    report(kvm_device(&root.join("dev/kvm")));
    report(smt(root));
    report(mitigations(root));
    report(ksm(root));
    report(swap(root));
    report(landlock(root));
    report(kernel::users(root));
    report(kernel::connections(root));
    report(kernel::namespaces(root));
}

/// Returns the text of a host file below `root` without surrounding white space.
pub(super) fn read(root: &Path, path: &str) -> Option<String> {
    let text = fs::read_to_string(root.join(path)).ok()?;
    Some(text.trim().to_owned())
}

/// Checks whether KVM uses hardware virtualization.
fn virtualization() -> Finding {
    match host_kvm::kind() {
        KvmKind::Hardware => Finding::ok("virtualization", "hardware virtualization"),
        KvmKind::Software => Finding::note(
            "virtualization",
            "KVM without hardware virtualization: isolation depends on the shadow paging of the host kernel",
            "use a host with VT-x or AMD-V for tenants who do not trust each other",
        ),
    }
}

/// Checks whether VMMs are confined.
fn jail() -> Finding {
    let host = match Host::open() {
        Ok(host) => host,
        Err(e) => return Finding::fail("jail", e.to_string(), "run `jiffy doctor`"),
    };
    let vmm = &host.programs().vmm;
    if !vmm.is_jailed() {
        return Finding::note(
            "jail",
            "disabled: VMMs run as the user of the daemon, with a system call filter only",
            "run `jiffy serve` as root, without JIFFY_JAIL=off",
        );
    }
    match vmm.prepare() {
        Ok(()) => Finding::ok(
            "jail",
            "each VMM runs as a separate user without capabilities, files, network or access to other processes",
        ),
        Err(e) => Finding::fail("jail", e.to_string(), "fix the error"),
    }
}

/// Checks whether control groups can limit VMMs.
fn limits() -> Finding {
    let remedy = "mount cgroups, or run in a delegated cgroup: without limits, escaped code can exhaust the host";
    match Cgroups::find() {
        Ok(Some(_)) => Finding::ok(
            "limits",
            "memory and tasks of VMMs are limited by control groups",
        ),
        Ok(None) => Finding::note("limits", "control groups are not available", remedy),
        Err(e) => Finding::note("limits", e.to_string(), remedy),
    }
}

/// Checks the user of the daemon, which is assumed to be the user of this command.
fn user() -> Finding {
    if geteuid().is_root() && jiffy_rootless::current().is_none() {
        Finding::ok(
            "daemon",
            "runs as root, VMMs do not; needed for jail, network and templates",
        )
    } else {
        Finding::note(
            "daemon",
            "not root: VMMs run without a jail and as the user of the daemon",
            "run the daemon as root to execute code of other users",
        )
    }
}

/// Checks the mode of /dev/kvm.
fn kvm_device(path: &Path) -> Finding {
    match fs::metadata(path) {
        Ok(device) if device.mode() & 0o006 != 0 => Finding::note(
            "kvm device",
            "all users of this host can create virtual machines",
            format!(
                "run `chmod 660 {}` and add users to its group",
                path.display()
            ),
        ),
        Ok(_) => Finding::ok("kvm device", "accessible to its owner and group only"),
        Err(e) => Finding::note("kvm device", e.to_string(), "run `jiffy doctor`"),
    }
}

/// Checks whether two guests can share a processor core.
fn smt(root: &Path) -> Finding {
    match read(root, "sys/devices/system/cpu/smt/active").as_deref() {
        Some("0") => Finding::ok(
            "smt",
            "disabled: guests never share a core at the same time",
        ),
        Some("1") => Finding::note(
            "smt",
            "enabled: two guests can share a core at the same time, which permits side channels",
            "for tenants who do not trust each other, boot with `nosmt` or run `echo off > \
             /sys/devices/system/cpu/smt/control`",
        ),
        _ => Finding::note(
            "smt",
            "the kernel does not report the state",
            "contact the operator of the physical machine",
        ),
    }
}

/// Checks for known vulnerabilities of the processor without mitigation.
fn mitigations(root: &Path) -> Finding {
    let directory = root.join("sys/devices/system/cpu/vulnerabilities");
    let mut open: Vec<String> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        // Other texts are `Not affected` and `Mitigation: ...`.
        .filter(|entry| fs::read_to_string(entry.path()).is_ok_and(|s| s.starts_with("Vulnerable")))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    open.sort();
    if open.is_empty() {
        Finding::ok("processor", "all known vulnerabilities are mitigated")
    } else {
        Finding::note(
            "processor",
            format!("vulnerable: {}", open.join(", ")),
            "update microcode and kernel, and boot without `mitigations=off`",
        )
    }
}

/// Checks whether the kernel merges equal pages of guests.
fn ksm(root: &Path) -> Finding {
    match read(root, "sys/kernel/mm/ksm/run").as_deref() {
        // 0: stopped; 2: stopped, and merged pages are separated again.
        None | Some("0" | "2") => Finding::ok("ksm", "disabled"),
        _ => Finding::note(
            "ksm",
            "enabled: equal pages of guests are merged, and write times reveal memory contents of other guests",
            "run `echo 2 > /sys/kernel/mm/ksm/run`",
        ),
    }
}

/// Checks for swap on disk. Compressed swap in memory (zram) is lost at power-off.
fn swap(root: &Path) -> Finding {
    let swaps = read(root, "proc/swaps").unwrap_or_default();
    let devices: Vec<&str> = swaps
        .lines()
        // The first line is the heading.
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .filter(|device| !device.starts_with("/dev/zram"))
        .collect();
    if devices.is_empty() {
        Finding::ok("swap", "no swap on disk")
    } else {
        Finding::note(
            "swap",
            format!(
                "{}: memory of terminated guests remains on disk",
                devices.join(", ")
            ),
            "run `swapoff -a`, or encrypt the swap with a random key for each boot",
        )
    }
}

/// Checks whether the kernel supports Landlock, an additional restriction of the jail.
fn landlock(root: &Path) -> Finding {
    match read(root, "sys/kernel/security/lsm") {
        Some(modules) if modules.split(',').any(|m| m == "landlock") => Finding::ok(
            "landlock",
            "enabled: additional file access restrictions for each VMM",
        ),
        _ => Finding::note(
            "landlock",
            "disabled: the jail has no additional file access restrictions",
            "use a kernel with CONFIG_SECURITY_LANDLOCK and boot with `lsm=landlock,...`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn shared_cores_pages_and_disks_are_reported_with_their_remedy() {
        let cpu = "sys/devices/system/cpu";
        let root = host(&[
            (&format!("{cpu}/smt/active"), "1\n"),
            (
                &format!("{cpu}/vulnerabilities/mds"),
                "Vulnerable: no microcode\n",
            ),
            (
                &format!("{cpu}/vulnerabilities/l1tf"),
                "Mitigation: PTE Inversion\n",
            ),
            ("sys/kernel/mm/ksm/run", "1\n"),
            (
                "proc/swaps",
                "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n/dev/zram0 partition 1 0 5\n",
            ),
            ("sys/kernel/security/lsm", "capability,yama\n"),
        ]);
        let root = root.path();
        for finding in [
            smt(root),
            mitigations(root),
            ksm(root),
            swap(root),
            landlock(root),
        ] {
            assert_eq!(finding.status, Status::Note, "{finding:?}");
            assert!(finding.remedy.is_some(), "{finding:?}");
        }
        assert_eq!(mitigations(root).description, "vulnerable: mds");
        assert!(swap(root).description.starts_with("/dev/sda2:"));
    }

    #[test]
    fn a_hardened_host_has_no_findings() {
        let root = host(&[
            ("sys/devices/system/cpu/smt/active", "0\n"),
            ("sys/kernel/mm/ksm/run", "0\n"),
            ("proc/swaps", "Filename Type Size Used Priority\n"),
            ("sys/kernel/security/lsm", "capability,landlock,yama\n"),
        ]);
        let root = root.path();
        for finding in [
            smt(root),
            mitigations(root),
            ksm(root),
            swap(root),
            landlock(root),
        ] {
            assert_eq!(finding.status, Status::Ok, "{finding:?}");
        }
    }
}
