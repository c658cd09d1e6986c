//! Test guest: a kernel, and an initial RAM file system with one static program,
//! `tests/guest/snapshot_init.c`.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Kernel and RAM file system.
pub struct GuestImage {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

/// Returns the reason why tests with a guest cannot run. `None` if they can.
fn missing_requirement() -> Option<String> {
    if let Err(e) = File::options().read(true).write(true).open("/dev/kvm") {
        return Some(format!("/dev/kvm: {e}"));
    }
    ["cc", "zstd"]
        .into_iter()
        .find(|tool| Command::new(tool).arg("--version").output().is_err())
        .map(|tool| format!("`{tool}` is not installed"))
}

/// Returns the guest. `None` if the test was recorded as skipped.
pub fn guest(test: &str) -> Option<&'static GuestImage> {
    static GUEST: OnceLock<Result<GuestImage, String>> = OnceLock::new();
    let guest = GUEST.get_or_init(|| match missing_requirement() {
        Some(reason) => Err(reason),
        None => Ok(build()),
    });
    match guest {
        Ok(guest) => Some(guest),
        Err(reason) => {
            skip(test, reason);
            None
        }
    }
}

/// Records a test as skipped, with the reason.
pub fn skip(test: &str, reason: &str) {
    eprintln!("skipped {test}: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let log = File::options().create(true).append(true).open(log);
        writeln!(log.unwrap(), "{test}: {reason}").unwrap();
    }
}

/// Unpacks the kernel, and compiles the program of the test guest.
fn build() -> GuestImage {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    fs::create_dir_all(&out).unwrap();
    let (kernel, init) = (out.join("vmlinux"), out.join("init"));
    run(Command::new("zstd")
        .args(["-dqf", "-o"])
        .arg(&kernel)
        .arg(root.join("kernel/vmlinux.zst")));
    run(Command::new("cc")
        .args(["-O2", "-static", "-pthread", "-o"])
        .arg(&init)
        .arg(root.join("tests/guest/snapshot_init.c")));
    let initrd = out.join("initrd");
    fs::write(&initrd, cpio(&fs::read(&init).unwrap())).unwrap();
    GuestImage { kernel, initrd }
}

/// Runs a program that must succeed.
fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {message}");
}

/// Returns a "newc" archive with `/dev/console` and `/init`.
fn cpio(init: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut add = |name: &str, mode: u32, device: (u32, u32), data: &[u8]| {
        // Inode, mode, user, group, number of links, time, size of the file, device (2 fields),
        // represented device (2 fields), size of the name with its zero byte, and checksum.
        let fields = [
            0,
            mode,
            0,
            0,
            1,
            0,
            u32::try_from(data.len()).unwrap(),
            0,
            0,
            device.0,
            device.1,
            u32::try_from(name.len() + 1).unwrap(),
            0,
        ];
        archive.extend(b"070701");
        for field in fields {
            archive.extend(format!("{field:08x}").bytes());
        }
        archive.extend(name.bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(data);
        archive.resize(archive.len().next_multiple_of(4), 0);
    };
    add("dev", 0o40755, (0, 0), b"");
    add("dev/console", 0o20600, (5, 1), b"");
    add("init", 0o100755, (0, 0), init);
    add("TRAILER!!!", 0, (0, 0), b"");
    archive
}
