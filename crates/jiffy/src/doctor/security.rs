//! `jiffy doctor --security`: what of this host's state helps somebody in a sandbox, and how to
//! change it.

use super::{Finding, files, kernel};
use jiffy_engines::Host;
use jiffy_image::Home;
use jiffy_microvm_engine::Cgroups;
use jiffy_microvm_engine::host_kvm::{self, KvmKind};
use nix::unistd::geteuid;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Runs all of them in the order in which they matter.
pub fn run_all(tell: &mut dyn FnMut(Finding)) {
    let root = Path::new("/");
    tell(virtualization());
    tell(jail());
    tell(limits());
    tell(user());
    if let Ok(home) = Home::locate() {
        files::run_all(home.path(), tell);
    }
    tell(kvm_device(&root.join("dev/kvm")));
    tell(smt(root));
    tell(mitigations(root));
    tell(ksm(root));
    tell(swap(root));
    tell(landlock(root));
    tell(kernel::users(root));
    tell(kernel::connections(root));
    tell(kernel::namespaces(root));
}

/// A file of the host below `root`, without what is around its text.
pub(super) fn read(root: &Path, path: &str) -> Option<String> {
    let text = fs::read_to_string(root.join(path)).ok()?;
    Some(text.trim().to_owned())
}

fn virtualization() -> Finding {
    match host_kvm::kind() {
        KvmKind::Hardware => Finding::ok("wall", "hardware virtualization"),
        KvmKind::Software => Finding::note(
            "wall",
            "KVM without hardware virtualization: the wall is the host kernel's shadow paging",
            "for tenants who do not trust each other use a host with VT-x or AMD-V",
        ),
    }
}

fn jail() -> Finding {
    let host = match Host::open() {
        Ok(host) => host,
        Err(e) => return Finding::fail("jail", e.to_string(), "see `jiffy doctor`"),
    };
    let vmm = &host.programs().vmm;
    if !vmm.is_jailed() {
        return Finding::note(
            "jail",
            "off: VMMs run as their starter, with a system call filter only",
            "run `jiffy serve` as root, without JIFFY_JAIL=off",
        );
    }
    match vmm.prepare() {
        Ok(()) => Finding::ok(
            "jail",
            "each VMM is a user of its own, without rights, files, network or sight of other processes",
        ),
        Err(e) => Finding::fail("jail", e.to_string(), "see above"),
    }
}

fn limits() -> Finding {
    let remedy = "escaped code could take more than its share: mount cgroups, or run below a group that is delegated";
    match Cgroups::find() {
        Ok(Some(_)) => Finding::ok(
            "limits",
            "memory and tasks of VMMs are limited by control groups",
        ),
        Ok(None) => Finding::note("limits", "no control groups", remedy),
        Err(e) => Finding::note("limits", e.to_string(), remedy),
    }
}

fn user() -> Finding {
    match geteuid().is_root() && jiffy_rootless::current().is_none() {
        true => Finding::ok(
            "daemon",
            "root, which VMMs are not; needed for jail, network and templates",
        ),
        false => Finding::note(
            "daemon",
            "not root: no jail, no users for VMMs",
            "fine for one person's own sandboxes; for others' code run it as root",
        ),
    }
}

fn kvm_device(path: &Path) -> Finding {
    match fs::metadata(path) {
        Ok(device) if device.mode() & 0o006 != 0 => Finding::note(
            "kvm device",
            "everybody on this host may make virtual machines",
            format!("chmod 660 {}, and put users into its group", path.display()),
        ),
        Ok(_) => Finding::ok("kvm device", "for its owner and group only"),
        Err(e) => Finding::note("kvm device", e.to_string(), "see `jiffy doctor`"),
    }
}

fn smt(root: &Path) -> Finding {
    match read(root, "sys/devices/system/cpu/smt/active").as_deref() {
        Some("0") => Finding::ok("smt", "off: no two guests share a core at the same time"),
        Some("1") => Finding::note(
            "smt",
            "on: two guests may share a core at the same time, and learn from its caches and buffers",
            "where tenants do not trust each other: boot with `nosmt`, or `echo off > \
             /sys/devices/system/cpu/smt/control`",
        ),
        _ => Finding::note(
            "smt",
            "this kernel does not tell",
            "ask whoever runs the machine that this host is part of",
        ),
    }
}

fn mitigations(root: &Path) -> Finding {
    let directory = root.join("sys/devices/system/cpu/vulnerabilities");
    let mut open: Vec<String> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| fs::read_to_string(entry.path()).is_ok_and(|s| s.starts_with("Vulnerable")))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    open.sort();
    match open.is_empty() {
        true => Finding::ok("processor", "no weakness that the kernel knows of is open"),
        false => Finding::note(
            "processor",
            format!("open: {}", open.join(", ")),
            "update microcode and kernel, and boot without `mitigations=off`",
        ),
    }
}

fn ksm(root: &Path) -> Finding {
    match read(root, "sys/kernel/mm/ksm/run").as_deref() {
        None | Some("0" | "2") => Finding::ok("ksm", "off"),
        _ => Finding::note(
            "ksm",
            "on: equal pages of guests are merged, and the time that a write takes tells one what another has",
            "echo 2 > /sys/kernel/mm/ksm/run",
        ),
    }
}

fn swap(root: &Path) -> Finding {
    let swaps = read(root, "proc/swaps").unwrap_or_default();
    let devices: Vec<&str> = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .filter(|device| !device.starts_with("/dev/zram"))
        .collect();
    match devices.is_empty() {
        true => Finding::ok("swap", "none that outlives the host"),
        false => Finding::note(
            "swap",
            format!(
                "{}: guests' memory stays there after they ended",
                devices.join(", ")
            ),
            "`swapoff -a`, or encrypt it with a key that is made at each start",
        ),
    }
}

fn landlock(root: &Path) -> Finding {
    match read(root, "sys/kernel/security/lsm") {
        Some(modules) if modules.split(',').any(|m| m == "landlock") => {
            Finding::ok("landlock", "a second wall around each VMM")
        }
        _ => Finding::note(
            "landlock",
            "not in force: the jail has one wall less",
            "a kernel with CONFIG_SECURITY_LANDLOCK, and `lsm=landlock,...`",
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
        assert_eq!(mitigations(root).found, "open: mds");
        assert!(swap(root).found.starts_with("/dev/sda2:"));
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
