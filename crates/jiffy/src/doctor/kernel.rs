//! Checks of `jiffy doctor --security`: kernel settings of the host. The settings are the size of
//! the connection tracking table, the mount with the network namespaces of sandboxes, and
//! privileges of unprivileged users and escaped processes.

use super::Finding;
use super::security::read;
use std::path::Path;

/// Default maximum number of connections of a sandbox.
const SANDBOX_CONNECTIONS: u64 = 4096;
/// Host memory for a sandbox of the default size in KiB: 512 MiB with an overcommit of 8.
const SANDBOX_MEMORY_KIB: u64 = 512 * 1024 / 8;
/// Maximum number of sandboxes with a network.
const MAX_SANDBOXES: u64 = 4096;
/// Mount with the network namespaces of sandboxes.
const NAMESPACE_MOUNT: &str = "/run/jiffy-net/netns";

/// Hardening settings: name, accepted values, and the consequence of other values. The remedy sets
/// the first accepted value.
const HARDENING_SETTINGS: [(&str, &[&str], &str); 6] = [
    (
        "kernel/unprivileged_userns_clone",
        &["0"],
        "all users can be root in a user namespace",
    ),
    (
        "kernel/unprivileged_bpf_disabled",
        &["1", "2"],
        "all users can load BPF programs",
    ),
    (
        "kernel/kptr_restrict",
        &["1", "2"],
        "all users can read kernel addresses",
    ),
    (
        "kernel/dmesg_restrict",
        &["1"],
        "all users can read kernel messages",
    ),
    (
        "fs/protected_hardlinks",
        &["1"],
        "users can create hard links to files of other users",
    ),
    (
        "fs/protected_symlinks",
        &["1"],
        "symbolic links of other users in shared directories are followed",
    ),
];

/// Returns a sysctl value below `root`.
fn setting(root: &Path, name: &str) -> Option<String> {
    read(root, &format!("proc/sys/{name}"))
}

/// Checks the size of the connection tracking table, which the host and all sandboxes share.
pub fn connections(root: &Path) -> Finding {
    let check = "connections";
    let number = |name: &str| setting(root, name)?.parse::<u64>().ok();
    let Some(maximum) = number("net/netfilter/nf_conntrack_max") else {
        return Finding::note(
            check,
            "the kernel does not report the size of its connection tracking table",
            "no action needed: the size is known after the first sandbox with a network is created",
        );
    };
    let meminfo = read(root, "proc/meminfo").unwrap_or_default();
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok());
    let sandboxes = (total.unwrap_or(0_u64) / SANDBOX_MEMORY_KIB).clamp(1, MAX_SANDBOXES);
    // Sandboxes may use three quarters of the table; the rest is reserved for the host.
    let required = (sandboxes * SANDBOX_CONNECTIONS).div_ceil(3) * 4;
    // A maximum of 0 means that the table is unlimited.
    if maximum == 0 || maximum >= required {
        return Finding::ok(
            check,
            format!(
                "the table fits {sandboxes} sandboxes with {SANDBOX_CONNECTIONS} connections each"
            ),
        );
    }
    // Number of sandboxes that can use all their connections at the same time.
    let full = maximum / 4 * 3 / SANDBOX_CONNECTIONS;
    // Limit per sandbox at which all sandboxes fit the table. At least 16, so that a sandbox
    // remains usable.
    let each = (maximum / 4 * 3 / sandboxes).max(16);
    // An entry occupies 320 bytes of kernel memory.
    let memory_mib = (required * 320) >> 20;
    Finding::note(
        check,
        format!(
            "the table has {maximum} entries: when {full} of the {sandboxes} sandboxes that fit this host use \
             all {SANDBOX_CONNECTIONS} connections, new connections are throttled"
        ),
        format!(
            "sysctl -w net.netfilter.nf_conntrack_max={required} (up to {memory_mib} MiB of memory), or use \
             `jiffy serve --connections {each}`"
        ),
    )
}

/// Checks the mount with network namespaces. If mounts in it propagate to other mount namespaces,
/// network namespaces of removed sandboxes can remain there.
pub fn namespaces(root: &Path) -> Finding {
    let check = "namespaces";
    let mounts = read(root, "proc/self/mountinfo").unwrap_or_default();
    // Fields before the dash (proc(5)): mount id, parent id, device, root, mount point, options and
    // propagation tags. The last mount at a path hides earlier mounts.
    let mount = mounts
        .lines()
        .rfind(|line| line.split(' ').nth(4) == Some(NAMESPACE_MOUNT));
    let Some(mount) = mount else {
        return Finding::ok(
            check,
            format!("{NAMESPACE_MOUNT} is not mounted before the first sandbox starts"),
        );
    };
    let tags = mount.split(" - ").next().unwrap_or_default();
    // Optional tags follow six fixed fields.
    let unbindable = tags.split(' ').skip(6).any(|tag| tag == "unbindable");
    let shared = tags
        .split(' ')
        .skip(6)
        .any(|tag| tag.starts_with("shared:") || tag.starts_with("master:"));
    if unbindable && !shared {
        return Finding::ok(
            check,
            format!("{NAMESPACE_MOUNT} is not shared with other mount namespaces"),
        );
    }
    Finding::note(
        check,
        format!(
            "{NAMESPACE_MOUNT} is shared with other mount namespaces, which can keep network namespaces of removed sandboxes alive"
        ),
        format!("run `mount --make-unbindable {NAMESPACE_MOUNT}`"),
    )
}

/// Checks the privileges of unprivileged users of this host, and thus of escaped code.
pub fn users(root: &Path) -> Finding {
    let check = "kernel";
    if setting(root, "user/max_user_namespaces").as_deref() == Some("0") {
        return Finding::fail(
            check,
            "user namespaces are disabled; the jails of VMMs and gVisor need them",
            "run `sysctl -w user.max_user_namespaces=16384`",
        );
    }
    let open = HARDENING_SETTINGS
        .iter()
        // Settings that this kernel does not have are skipped.
        .filter_map(|(name, closed, open)| {
            let value = setting(root, name)?;
            let name = name.replace('/', ".");
            (!closed.contains(&value.as_str())).then(|| (format!("{name}={}", closed[0]), *open))
        });
    let (remedies, problems): (Vec<String>, Vec<&str>) = open.unzip();
    if problems.is_empty() {
        Finding::ok(check, "hardening settings for unprivileged users are set")
    } else {
        Finding::note(
            check,
            problems.join("; "),
            format!(
                "unless other programs of this host need these features, run: sysctl -w {}",
                remedies.join(" ")
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;
    use std::fs;

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
    fn a_conntrack_table_that_sandboxes_can_fill_is_reported_with_its_remedy() {
        let table = "proc/sys/net/netfilter/nf_conntrack_max";
        let with = |maximum: &str| {
            let memory = ("proc/meminfo", "MemTotal:  16777216 kB\nMemFree: 1 kB\n");
            connections(host(&[(table, maximum), memory]).path())
        };
        // 16 GiB hold 256 sandboxes of the usual size.
        let small = with("65536\n");
        assert_eq!(small.status, Status::Note);
        assert!(
            small.description.contains("when 12 of the 256"),
            "{}",
            small.description
        );
        let remedy = small.remedy.unwrap();
        assert!(remedy.contains("nf_conntrack_max=1398104"), "{remedy}");
        assert!(remedy.contains("--connections 192"), "{remedy}");
        assert_eq!(with("1398104").status, Status::Ok);
        assert_eq!(with("0").status, Status::Ok);
        assert_eq!(connections(host(&[]).path()).status, Status::Note);
    }

    #[test]
    fn a_shared_mount_of_namespaces_is_reported() {
        let with = |tags: &str| {
            let line = format!(
                "30 1 0:25 / /run rw shared:3 - tmpfs run rw\n\
                 77 30 0:53 / /run/jiffy-net/netns rw,nosuid{tags} - tmpfs jiffy-netns rw\n\
                 78 77 0:4 net:[1] /run/jiffy-net/netns/jf-0 rw - nsfs nsfs rw\n"
            );
            namespaces(host(&[("proc/self/mountinfo", &line)]).path()).status
        };
        assert_eq!(with(" unbindable"), Status::Ok);
        assert_eq!(with(" shared:9"), Status::Note);
        assert_eq!(with(" master:3"), Status::Note);
        assert_eq!(with(""), Status::Note);
        assert_eq!(namespaces(host(&[]).path()).status, Status::Ok);
    }

    #[test]
    fn unprivileged_kernel_features_are_reported_with_their_setting() {
        let open = host(&[
            ("proc/sys/kernel/unprivileged_userns_clone", "1\n"),
            ("proc/sys/kernel/unprivileged_bpf_disabled", "2\n"),
            ("proc/sys/kernel/kptr_restrict", "0\n"),
        ]);
        let finding = users(open.path());
        assert_eq!(finding.status, Status::Note);
        let remedy = finding.remedy.unwrap();
        assert!(
            remedy.ends_with("sysctl -w kernel.unprivileged_userns_clone=0 kernel.kptr_restrict=1"),
            "{remedy}"
        );
        assert_eq!(users(host(&[]).path()).status, Status::Ok);
        let none = host(&[("proc/sys/user/max_user_namespaces", "0\n")]);
        assert_eq!(users(none.path()).status, Status::Fail);
    }
}
