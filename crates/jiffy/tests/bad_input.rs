//! Tests that error messages name the problem, the object and the remedy. Failures of Jiffy itself
//! have the exit code 125.

use crate::support::{call, finish, jiffy, programs, skip, vmm_of};
use jiffy_test_attributes::jiffy_test;
use std::process::{Command, Stdio};

#[test]
fn the_error_for_an_unknown_template_lists_the_existing_templates() {
    let done = call(&["run", "--template", "nosuch", "--", "true"]);
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(
        done.stderr.contains("nosuch") && done.stderr.contains("base"),
        "{done:?}"
    );
}

#[test]
fn sizes_out_of_bounds_are_rejected_with_the_bounds() {
    for (flag, value, word) in [
        ("--memory", "64MiB", "128"),
        ("--memory", "100GiB", "65536"),
        ("--cpus", "9", "1 to 8"),
        ("--cpus", "0", "1 to 8"),
        ("--disk", "10MiB", "64"),
    ] {
        let done = call(&["run", flag, value, "--", "true"]);
        assert_eq!(done.code, Some(125), "{flag} {value}: {done:?}");
        assert!(done.stderr.contains(word), "{flag} {value}: {done:?}");
    }
}

#[test]
fn invalid_command_lines_are_usage_errors() {
    for args in [
        &["run"][..],
        &["run", "--memory", "lots", "--", "true"],
        &["run", "--timeout", "soon", "--", "true"],
        &["fly"],
    ] {
        let done = call(args);
        assert_eq!(done.code, Some(2), "{done:?}");
        assert!(
            done.stderr.contains("Usage") || done.stderr.contains("--help"),
            "{done:?}"
        );
    }
}

/// Runs a shell script as root in its own mount namespace, where it can hide files.
fn run_unshared(script: &str) -> Option<crate::support::Done> {
    let programs = programs();
    let command = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sh", "-c", script])
            .env("JIFFY", programs.join("jiffy"))
            .env("JIFFY_VMM", programs.join("jiffy-vmm"))
            .env("JIFFY_AGENT", programs.join("jiffy-agent"))
            // gVisor is not available either.
            .env("JIFFY_GVISOR", "/no/such/helper")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    let allowed = command("true").status().is_ok_and(|s| s.success());
    allowed.then(|| finish(command(script).spawn().unwrap()))
}

#[jiffy_test]
fn a_host_without_kvm_is_reported_with_its_remedy() {
    let Some(done) = run_unshared("mount -t tmpfs none /dev && exec \"$JIFFY\" run -- true") else {
        return skip("mount namespaces are not permitted on this host");
    };
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(
        done.stderr.contains("/dev/kvm does not exist") && done.stderr.contains("jiffy-gvisor"),
        "{done:?}"
    );
    let done =
        run_unshared("mount -t tmpfs none /dev && touch /dev/kvm && exec \"$JIFFY\" run -- true")
            .unwrap();
    assert!(
        done.code == Some(125) && done.stderr.contains("cannot use /dev/kvm"),
        "{done:?}"
    );
}

#[jiffy_test]
fn missing_rights_on_kvm_are_reported_with_the_group() {
    // User 65534 runs `doctor` with a `/dev/kvm` that only root may open. The programs and the data
    // directory are copied to the new `/dev`, where this user may read them.
    let script = "mount -t tmpfs none /dev && mknod /dev/kvm c 10 232 && chmod 600 /dev/kvm && mknod -m 666 /dev/null c 1 3 && mknod -m 444 /dev/urandom c 1 9 && \
        mkdir -m 777 /dev/shm /dev/home && cp \"$JIFFY\" \"$JIFFY_VMM\" \"$JIFFY_AGENT\" /dev/shm && \
        exec setpriv --reuid 65534 --clear-groups env JIFFY_HOME=/dev/home JIFFY_VMM= JIFFY_AGENT= /dev/shm/jiffy doctor";
    let Some(done) = run_unshared(script) else {
        return skip("mount namespaces are not permitted on this host");
    };
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(
        done.stdout.contains("`kvm` group") || done.stdout.contains("usermod -aG kvm"),
        "{done:?}"
    );
}

#[jiffy_test]
fn a_damaged_image_is_rejected_with_its_name() {
    // A bind mount over the image simulates damage on disk: another size, other bytes.
    let script = r#"home=${JIFFY_HOME:-/var/lib/jiffy}
        sum=$("$JIFFY" template inspect base --json | sed -n 's/^ *"sha256": "\(.*\)".*/\1/p' | head -1)
        img=$(readlink -f "$home/images/sha256-$sum.erofs")
        tmp=$(mktemp) && head -c 1000000 "$img" > "$tmp" && mount --bind "$tmp" "$img" && rm "$tmp"
        "$JIFFY" run -- true; a=$?; umount "$img"
        tmp=$(mktemp) && cp "$img" "$tmp" && printf X | dd of="$tmp" bs=1 seek=123456 conv=notrunc 2>/dev/null && mount --bind "$tmp" "$img"
        rm "$tmp"; "$JIFFY" run -- true; echo "codes $a $?""#;
    let Some(done) = run_unshared(script) else {
        return skip("mount namespaces are not permitted on this host");
    };
    assert!(done.stdout.contains("codes 125 125"), "{done:?}");
    assert!(
        done.stderr.matches(".erofs is corrupted").count() == 2,
        "{done:?}"
    );
    assert!(done.stderr.contains("sha256"), "{done:?}");
}

#[jiffy_test]
fn a_damaged_kernel_is_rejected_with_its_name() {
    // The first run extracts the kernel image. The second run finds the image with a changed byte.
    let script = r#"home=$(mktemp -d); export JIFFY_HOME=$home; trap 'rm -rf "$home"' EXIT
        ln -s "${REAL_HOME:-/var/lib/jiffy}/templates" "$home/templates"
        images=${REAL_HOME:-/var/lib/jiffy}/images; if [ -d "$images" ]; then ln -s "$images" "$home/images"; fi
        "$JIFFY" run -- true; rm -rf /tmp/none; k=$(ls "$home"/kernel/vmlinux-* | grep -v stamp | head -1)
        printf X | dd of="$k" bs=1 seek=5000 conv=notrunc 2>/dev/null; "$JIFFY" run -- true; echo "code $?""#;
    let Some(done) = run_unshared(script) else {
        return skip("mount namespaces are not permitted on this host");
    };
    assert!(done.stdout.contains("code 125"), "{done:?}");
    assert!(
        done.stderr.contains("kernel image") && done.stderr.contains("corrupted"),
        "{done:?}"
    );
}

/// Runs a Python program as root in a guest with the memory size `memory`.
fn as_root(memory: &str, program: &str) -> crate::support::Done {
    call(&[
        "run", "-u", "root", "--memory", memory, "--", "python3", "-c", program,
    ])
}

#[jiffy_test]
fn a_guest_kernel_panic_is_reported_with_the_last_console_lines() {
    // The program fills the code of process 1 with a one-byte invalid instruction: the kernel
    // panics when process 1 terminates.
    let program = r#"
code = next(l for l in open('/proc/1/maps') if 'r-xp' in l)
start, end = (int(x, 16) for x in code.split()[0].split('-'))
with open('/proc/1/mem', 'r+b', 0) as memory:
    memory.seek(start)
    memory.write(b'\x06' * (end - start))"#;
    let done = as_root("512MiB", program);
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(
        done.stderr
            .contains("the guest kernel panicked: Attempted to kill init!"),
        "{done:?}"
    );
    assert!(
        // The last line is the trap or the registers, depending on the thread.
        done.stderr.contains("| ")
            && (done.stderr.contains("invalid_op") || done.stderr.contains("Code: 06 06")),
        "{done:?}"
    );
}

const EAT_MEMORY: &str = "x = []\nwhile True: x.append(bytearray(1 << 20))";

#[jiffy_test(engine = "each")]
fn a_process_killed_for_memory_is_reported() {
    // The program offers other processes as victims. The kernel may need memory before the killed
    // process has released its own; it then kills one of them instead of panicking. The next test
    // covers the panic.
    let program = format!(
        "import subprocess\nfor _ in range(20): subprocess.Popen(['sleep', '600'])\n{EAT_MEMORY}"
    );
    let done = as_root("192MiB", &program);
    // 128 and the number of SIGKILL.
    assert_eq!(done.code, Some(137), "{done:?}");
    assert!(
        done.stderr.contains("ran out of memory (192 MiB)") && done.stderr.contains("--memory"),
        "{done:?}"
    );
}

#[jiffy_test]
fn a_guest_out_of_memory_is_reported() {
    // 2: the kernel panics instead of killing a process.
    let program = format!("open('/proc/sys/vm/panic_on_oom', 'w').write('2')\n{EAT_MEMORY}");
    let done = as_root("192MiB", &program);
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(
        done.stderr.contains("the guest ran out of memory") && done.stderr.contains("--memory"),
        "{done:?}"
    );
}

#[jiffy_test]
fn a_guest_reboot_is_reported() {
    // LINUX_REBOOT_CMD_RESTART (reboot(2)).
    let done = as_root(
        "512MiB",
        "import ctypes; ctypes.CDLL(None).reboot(0x01234567)",
    );
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(done.stderr.contains("guest shut itself down"), "{done:?}");
}

#[jiffy_test]
fn a_vmm_killed_from_outside_is_a_clear_error() {
    let mut child = jiffy(&["run", "--", "sh", "-c", "echo up; sleep 600"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    crate::support::read_until(&mut stdout, "up\n");
    let vmm = vmm_of(&child);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(vmm.try_into().unwrap()),
        nix::sys::signal::SIGKILL,
    )
    .unwrap();
    let done = finish(child);
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(
        done.stderr
            .contains("the process that isolates the sandbox was killed"),
        "{done:?}"
    );
}
