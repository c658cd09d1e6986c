//! Tests of the confinement of the unpacker process.

use super::*;
use crate::skipped;
use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

type Attempt = fn() -> bool;

/// Returns whether the file can be opened with these flags.
fn opens(path: &std::ffi::CStr, flags: libc::c_int) -> bool {
    // SAFETY: `path` is zero-terminated, and the flags need no argument except the mode.
    unsafe { libc::open(path.as_ptr(), flags, 0o600) >= 0 }
}

/// Returns whether a system call succeeds.
fn call(number: libc::c_long, arguments: [libc::c_long; 4]) -> bool {
    let [a, b, c, d] = arguments;
    // SAFETY: each attempt passes the arguments that the system call expects.
    unsafe { libc::syscall(number, a, b, c, d) >= 0 }
}

/// Operations that the unpacker needs: name and function. Each function returns whether the
/// operation succeeded.
const WORK: &[(&str, Attempt)] = &[
    ("make a file", || {
        opens(c"/file", libc::O_CREAT | libc::O_WRONLY)
    }),
    ("give it away", || {
        // SAFETY: the path is zero-terminated.
        unsafe { libc::fchownat(libc::AT_FDCWD, c"/file".as_ptr(), 1234, 1234, 0) == 0 }
    }),
    ("mark as deleted", || {
        // SAFETY: the path is zero-terminated.
        unsafe { libc::mknodat(libc::AT_FDCWD, c"/deleted".as_ptr(), libc::S_IFCHR, 0) == 0 }
    }),
];

/// Operations that the privileges or the filter of the process deny. 0x103 is the device number of
/// `/dev/null`, and 16 is `PTRACE_ATTACH`.
const ATTACKS: &[(&str, Attempt)] = &[
    ("read a file of the host", || {
        opens(c"/etc/passwd", libc::O_RDONLY)
    }),
    ("leave by ..", || {
        opens(c"../../../../../../etc/passwd", libc::O_RDONLY)
    }),
    ("find the data directory", || opens(c"/var", libc::O_PATH)),
    ("make a device", || {
        // SAFETY: the path is zero-terminated.
        unsafe { libc::mknodat(libc::AT_FDCWD, c"/null".as_ptr(), libc::S_IFCHR, 0x103) == 0 }
    }),
    ("run a program", || {
        // SAFETY: the path is zero-terminated, and there are no arguments.
        unsafe { libc::execve(c"/file".as_ptr(), std::ptr::null(), std::ptr::null()) == 0 }
    }),
    ("reach a network", || {
        let (family, kind) = (libc::AF_INET.into(), libc::SOCK_STREAM.into());
        call(libc::SYS_socket, [family, kind, 0, 0])
    }),
    ("be root", || call(libc::SYS_setresuid, [0, 0, 0, 0])),
    ("mount", || call(libc::SYS_mount, [0; 4])),
    ("make a namespace", || {
        call(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0, 0])
    }),
    ("signal", || call(libc::SYS_kill, [1, 0, 0, 0])),
    ("trace", || call(libc::SYS_ptrace, [16, 1, 0, 0])),
    ("open by handle", || {
        call(
            libc::SYS_open_by_handle_at,
            [libc::AT_FDCWD.into(), 0, 0, 0],
        )
    }),
    ("load BPF", || call(libc::SYS_bpf, [0; 4])),
];

// Exit codes of the child process. No operation exits with these codes by itself.
const SUCCEEDED: i32 = 7;
const DENIED: i32 = 8;
const NOT_CONFINED: i32 = 9;

/// Returns whether `attempt` succeeds in a process confined to `place`.
fn succeeds(place: &Path, attempt: Attempt) -> bool {
    // SAFETY: the child confines itself, makes one attempt, and exits.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let confined = confine(place, &UnpackLimits::default());
            let code = match confined {
                Ok(_) if attempt() => SUCCEEDED,
                Ok(_) => DENIED,
                Err(_) => NOT_CONFINED,
            };
            // SAFETY: terminates the child immediately.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, SUCCEEDED) => true,
            // A denied system call kills the process.
            WaitStatus::Exited(_, DENIED) | WaitStatus::Signaled(..) => false,
            other => panic!("{other:?}"),
        },
    }
}

#[test]
fn the_unpacker_fills_its_directory_and_does_nothing_else() {
    if !jail::is_on() {
        return skipped(
            "layer::confined::tests::the_unpacker_fills_its_directory_and_does_nothing_else",
            "needs root",
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("in");
    fs::create_dir(&place).unwrap();
    for (name, attempt) in WORK {
        assert!(succeeds(&place, *attempt), "it cannot {name}");
    }
    let file = fs::metadata(place.join("file")).unwrap();
    // The owner proves that the process had CAP_CHOWN.
    assert_eq!((file.uid(), file.gid()), (1234, 1234));
    for (name, attempt) in ATTACKS {
        assert!(!succeeds(&place, *attempt), "it can {name}");
    }
    let mut entries: Vec<_> = fs::read_dir(&place).unwrap().flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    let names: Vec<_> = entries.iter().map(fs::DirEntry::file_name).collect();
    assert_eq!(names, ["deleted", "file"]);
}

#[test]
fn marks_reported_by_the_unpacker_stay_in_its_directory() {
    if !jail::is_on() {
        return skipped(
            "layer::confined::tests::marks_reported_by_the_unpacker_stay_in_its_directory",
            "needs root",
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let (inside, outside) = (dir.path().join("in"), dir.path().join("outside"));
    fs::create_dir_all(inside.join("a/b")).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink("../outside", inside.join("link")).unwrap();
    let limits = UnpackLimits::default();
    for hostile in ["../outside", "a/../../outside", "link", "link/x", "missing"] {
        assert!(
            set_opaque_marks(&inside, hostile.as_bytes(), &limits).is_err(),
            "{hostile}"
        );
    }
    set_opaque_marks(&inside, b"a\0a/b", &limits).unwrap();
    let marked = |path: &Path| {
        let mut value = [0; 8];
        let file = File::open(path).unwrap();
        // SAFETY: the name is zero-terminated, and the buffer has the given length.
        let length = unsafe {
            let name = c"trusted.overlay.opaque".as_ptr();
            libc::fgetxattr(
                file.as_raw_fd(),
                name,
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        Errno::result(length).map(|_| value[0])
    };
    assert_eq!(marked(&inside.join("a")), Ok(b'y'));
    assert_eq!(marked(&inside.join("a/b")), Ok(b'y'));
    assert_eq!(marked(&outside), Err(Errno::ENODATA));
}

#[test]
fn a_process_that_unpacks_beyond_the_budget_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("unpacker");
    fs::write(
        &program,
        // A shell script takes the place of the unpacker and reports more bytes than the budget
        // allows.
        "#!/bin/sh\necho +9000000; echo +99000000; exec cat >/dev/null\n",
    )
    .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    let limits = UnpackLimits::default();
    let process = UnpackerProcess::start(&program, dir.path(), limits, None).unwrap();
    let meter = |bytes| match bytes {
        9_000_000 => Ok(()),
        bytes => Err(format!("no room for {bytes}")),
    };
    // The archive is endless, so the thread that sends it stops only when the process has exited.
    let run = process.run(io::repeat(0), dir.path(), limits, &meter, &mut |_| ());
    let message = run.unwrap_err();
    assert!(matches!(message, LayerError::Budget { .. }), "{message:?}");
    assert_eq!(message.to_string(), "no room for 99000000");
}

#[test]
fn reports_of_the_process_are_bounded() {
    let limits = UnpackLimits::default();
    let read = |output: &str| read_output(output.as_bytes(), &limits, &|_| Ok(()));
    let (line, marks) = read("+8388608\n+16777216\n{}\na\0b").unwrap();
    assert_eq!((&line[..], &marks[..]), (&b"{}\n"[..], &b"a\0b"[..]));
    // Too few bytes since the last report (`REPORT_BYTES` is 8388608), invalid numbers, more than
    // the limit, and no line end.
    for bad in [
        "+1\n",
        "+8388608\n+8388609\n",
        "+-8388608\n",
        "+99999999999999999999\n",
        "+9999999999999999\n",
        "+",
    ] {
        assert!(matches!(read(bad), Err(LayerError::Process(_))), "{bad}");
    }
}

#[test]
fn a_diff_id_of_the_unpacker_cannot_name_another_path() {
    let place = tempfile::tempdir().unwrap();
    let unpack = |diff_id: &str| {
        let outcome = UnpackOutcome::Done(UnpackedLayer {
            diff_id: diff_id.to_owned(),
            ..UnpackedLayer::default()
        });
        let outcome = serde_json::to_string(&outcome).unwrap();
        let program = place.path().join("unpacker");
        fs::write(
            &program,
            format!("#!/bin/sh\ncat >/dev/null\necho '{outcome}'\n"),
        )
        .unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let limits = UnpackLimits::default();
        let process = UnpackerProcess::start(&program, place.path(), limits, None).unwrap();
        process.unpack(io::empty(), place.path(), limits, &|_| Ok(()), &mut |_| ())
    };
    let valid = "0123456789abcdef".repeat(4);
    assert_eq!(unpack(&valid).unwrap().diff_id, valid);
    let traversal = format!("{}/../../..", &valid[..55]);
    for invalid in ["", "../..", &traversal, &valid[1..], &valid.to_uppercase()] {
        let refused = unpack(invalid).unwrap_err().to_string();
        assert!(refused.contains("invalid diff id"), "{invalid}: {refused}");
    }
}
