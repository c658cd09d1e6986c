//! Simulates a compromised VMM: test code runs in a VMM's jail and attacks the host.
#![allow(clippy::unwrap_used, clippy::panic)]

use jiffy_microvm_engine::Vmm;
use jiffy_proto::vm::CONTROL_FD;
use jiffy_proto::vm::jail::{ENTER_ARGUMENT, FIRST_UID};
use jiffy_vmm::{jail, seccomp};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, Uid, fork};
use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Child, Command};

/// Targets of the attacks on the host.
struct Host {
    /// Process to attack.
    victim: Child,
    tcp: TcpListener,
    _unix: UnixListener,
    unix_name: String,
}

impl Host {
    fn new(test: &str) -> Self {
        let unix_name = format!("jiffy-{test}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&unix_name).unwrap();
        Self {
            victim: Command::new("sleep").arg("600").spawn().unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            _unix: UnixListener::bind_addr(&address).unwrap(),
            unix_name,
        }
    }

    fn victim(&self) -> Pid {
        Pid::from_raw(self.victim.id().try_into().unwrap())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
    }
}

/// Returns whether this process is root. If not, records `test` as skipped.
fn is_root_or_skipped(test: &str) -> bool {
    if Uid::effective().is_root() {
        return true;
    }
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = File::options().append(true).open(log).unwrap();
        writeln!(log, "{test}: only root can create the jail").unwrap();
    }
    false
}

/// Runs `work` in a process that is jailed like a VMM, as process 1 of a PID namespace. Returns its
/// output.
fn run_in_jail(work: impl FnOnce(&mut File)) -> String {
    let vmm = Vmm::new(env!("CARGO_BIN_EXE_jiffy-vmm").into(), true);
    let namespaces = vmm.namespaces().unwrap().unwrap();
    let (mut read, write) = std::io::pipe().unwrap();
    // SAFETY: the child shares no state with this process and exits with _exit.
    if let ForkResult::Child = unsafe { fork() }.unwrap() {
        unshare(CloneFlags::CLONE_NEWPID).unwrap();
        // SAFETY: as above.
        if let ForkResult::Parent { child } = unsafe { fork() }.unwrap() {
            waitpid(child, None).unwrap();
            exit_now();
        }
        // Move the descriptors above 100 first, then to their final numbers: the control socket,
        // followed by the namespaces.
        let high = |fd: i32| {
            // SAFETY: the call has no pointer arguments.
            let fd = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 100) };
            assert!(fd >= 100);
            fd
        };
        let control = high(write.as_raw_fd());
        let namespaces: Vec<i32> = namespaces.iter().map(|n| high(n.as_raw_fd())).collect();
        for (to, from) in (CONTROL_FD..).zip(std::iter::once(control).chain(namespaces)) {
            // SAFETY: the descriptors belong to this process, which no longer uses the former ones.
            assert_eq!(unsafe { libc::dup2(from, to) }, to);
        }
        // SAFETY: the descriptor was duplicated to this number above.
        let mut report = unsafe { File::from(OwnedFd::from_raw_fd(CONTROL_FD)) };
        match jail::confine(Some(ENTER_ARGUMENT)) {
            Ok(()) => work(&mut report),
            Err(e) => drop(write!(report, "no jail: {e}")),
        }
        exit_now();
    }
    drop(write);
    let mut output = String::new();
    read.read_to_string(&mut output).unwrap();
    output
}

fn exit_now() -> ! {
    // SAFETY: exits the child immediately.
    unsafe { libc::_exit(0) }
}

type JailAttempt<'a> = (&'a str, Box<dyn Fn() -> nix::Result<()> + 'a>);

/// Makes a system call.
fn call(number: libc::c_long, arguments: [libc::c_long; 5]) -> nix::Result<()> {
    let [a, b, c, d, e] = arguments;
    // SAFETY: each caller passes valid arguments of the system call.
    Errno::result(unsafe { libc::syscall(number, a, b, c, d, e) }).map(drop)
}

/// Opens a file.
fn open(path: &CStr, flags: libc::c_int) -> nix::Result<()> {
    // SAFETY: a valid path, and flags that need no other mode.
    Errno::result(unsafe { libc::open(path.as_ptr(), flags, 0o600) }).map(drop)
}

fn new_socket(family: AddressFamily, kind: SockType) -> nix::Result<OwnedFd> {
    socket(family, kind, SockFlag::empty(), None)
}

/// Attempts that the jail prevents even without the seccomp filter.
fn jail_attempts(host: &Host) -> Vec<JailAttempt<'_>> {
    let port = host.tcp.local_addr().unwrap().port();
    let victim = host.victim();
    let at = |path: &'static CStr| move || open(path, libc::O_RDONLY);
    let namespace = |flag: CloneFlags| move || unshare(flag);
    vec![
        ("open /etc/passwd", Box::new(at(c"/etc/passwd"))),
        ("open /proc/self/maps", Box::new(at(c"/proc/self/maps"))),
        ("open /dev/kvm", Box::new(at(c"/dev/kvm"))),
        ("open ../../etc/passwd", Box::new(at(c"../../etc/passwd"))),
        (
            "create a file",
            Box::new(|| open(c"/file", libc::O_CREAT | libc::O_WRONLY)),
        ),
        (
            "create an unnamed file",
            Box::new(|| open(c"/", libc::O_TMPFILE | libc::O_WRONLY)),
        ),
        (
            "run a program",
            Box::new(|| nix::unistd::execv(c"/bin/sh", &[c"sh"]).map(|_| ())),
        ),
        (
            "signal a process of the host",
            Box::new(move || kill(victim, Signal::SIGKILL)),
        ),
        (
            "signal all processes",
            Box::new(|| kill(Pid::from_raw(-1), Signal::SIGKILL)),
        ),
        (
            "trace a process of the host",
            Box::new(move || {
                let request = libc::c_long::from(libc::PTRACE_SEIZE);
                call(libc::SYS_ptrace, [request, victim.as_raw().into(), 0, 0, 0])
            }),
        ),
        (
            "read a process of the host",
            Box::new(move || call(libc::SYS_pidfd_open, [victim.as_raw().into(), 0, 0, 0, 0])),
        ),
        (
            "reach a TCP port of the host",
            Box::new(move || {
                let socket = new_socket(AddressFamily::Inet, SockType::Stream)?;
                let address = nix::sys::socket::SockaddrIn::new(127, 0, 0, 1, port);
                connect(socket.as_raw_fd(), &address)
            }),
        ),
        (
            "reach a socket without a path",
            Box::new(|| {
                let socket = new_socket(AddressFamily::Unix, SockType::Stream)?;
                let address = UnixAddr::new_abstract(host.unix_name.as_bytes())?;
                connect(socket.as_raw_fd(), &address)
            }),
        ),
        (
            "send raw frames",
            Box::new(|| new_socket(AddressFamily::Packet, SockType::Raw).map(drop)),
        ),
        (
            "send raw packets",
            Box::new(|| new_socket(AddressFamily::Inet, SockType::Raw).map(drop)),
        ),
        (
            "mount",
            Box::new(|| {
                let none = None::<&str>;
                let flags = nix::mount::MsFlags::empty();
                nix::mount::mount(Some("tmpfs"), "/", Some("tmpfs"), flags, none)
            }),
        ),
        ("change the root", Box::new(|| nix::unistd::chroot("/"))),
        (
            "a user namespace",
            Box::new(namespace(CloneFlags::CLONE_NEWUSER)),
        ),
        (
            "a mount namespace",
            Box::new(namespace(CloneFlags::CLONE_NEWNS)),
        ),
        (
            "a network namespace",
            Box::new(namespace(CloneFlags::CLONE_NEWNET)),
        ),
        (
            "become root",
            Box::new(|| nix::unistd::setuid(Uid::from_raw(0))),
        ),
        (
            "become another VMM's user",
            Box::new(|| nix::unistd::setuid(Uid::from_raw(1))),
        ),
        (
            "change the host's name",
            Box::new(|| nix::unistd::sethostname("mine")),
        ),
        (
            "raise a limit",
            Box::new(|| {
                let all = nix::sys::resource::RLIM_INFINITY;
                nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NPROC, all, all)
            }),
        ),
        (
            "load a module",
            Box::new(|| call(libc::SYS_init_module, [0; 5])),
        ),
        (
            "read kernel messages",
            // 3 is `SYSLOG_ACTION_READ_ALL`.
            Box::new(|| call(libc::SYS_syslog, [3, 0, 0, 0, 0])),
        ),
        ("reboot", Box::new(|| call(libc::SYS_reboot, [0; 5]))),
        (
            "open by handle",
            Box::new(|| {
                call(
                    libc::SYS_open_by_handle_at,
                    [libc::AT_FDCWD.into(), 0, 0, 0, 0],
                )
            }),
        ),
    ]
}

/// Attempts that only the seccomp filter prevents.
fn filter_attempts() -> Vec<JailAttempt<'static>> {
    let key = || {
        let (kind, name) = (c"user".as_ptr(), c"mine".as_ptr());
        let ring = libc::c_long::from(libc::KEY_SPEC_SESSION_KEYRING);
        call(
            libc::SYS_add_key,
            [
                kind as libc::c_long,
                name as libc::c_long,
                name as libc::c_long,
                4,
                ring,
            ],
        )
    };
    vec![
        ("add a key", Box::new(key)),
        (
            "create a vsock socket",
            Box::new(|| new_socket(AddressFamily::Vsock, SockType::Stream).map(drop)),
        ),
        (
            "create a netlink socket",
            Box::new(|| new_socket(AddressFamily::Netlink, SockType::Raw).map(drop)),
        ),
        ("list the root", Box::new(|| open(c"/", libc::O_RDONLY))),
        ("load BPF", Box::new(|| call(libc::SYS_bpf, [0; 5]))),
        (
            "io_uring",
            Box::new(|| call(libc::SYS_io_uring_setup, [1, 0, 0, 0, 0])),
        ),
        (
            "userfaultfd",
            Box::new(|| call(libc::SYS_userfaultfd, [1, 0, 0, 0, 0])),
        ),
        (
            "perf events",
            Box::new(|| call(libc::SYS_perf_event_open, [0; 5])),
        ),
    ]
}

#[test]
fn a_compromised_vmm_cannot_attack_the_host() {
    if !is_root_or_skipped("a_compromised_vmm_cannot_attack_the_host") {
        return;
    }
    let mut host = Host::new("jail");
    let jail_attempts = jail_attempts(&host);
    let output = run_in_jail(|report| {
        for (name, attempt) in &jail_attempts {
            if attempt().is_ok() {
                let _ = writeln!(report, "{name}");
            }
        }
        let _ = writeln!(report, "tried all");
    });
    assert_eq!(output, "tried all\n", "these attempts succeeded");
    drop(jail_attempts);
    assert!(host.victim.try_wait().unwrap().is_none());
}

#[test]
fn an_unlisted_system_call_kills_the_vmm() {
    if !is_root_or_skipped("an_unlisted_system_call_kills_the_vmm") {
        return;
    }
    let host = Host::new("filter");
    let mut jail_attempts = jail_attempts(&host);
    jail_attempts.extend(filter_attempts());
    let output = run_in_jail(|report| {
        for (name, attempt) in &jail_attempts {
            // SAFETY: the child makes one attempt and exits with _exit.
            let end = match unsafe { fork() } {
                Ok(ForkResult::Child) => {
                    if seccomp::confine_main(true).is_ok() {
                        let _ = attempt();
                    }
                    exit_now()
                }
                Ok(ForkResult::Parent { child }) => waitpid(child, None),
                Err(e) => Err(e),
            };
            if !matches!(end, Ok(WaitStatus::Signaled(_, Signal::SIGSYS, _))) {
                let _ = writeln!(report, "{name}: {end:?}");
            }
        }
        let _ = writeln!(report, "tried all");
    });
    assert_eq!(
        output, "tried all\n",
        "these attempts did not kill the process"
    );
}

#[test]
fn each_vmm_is_a_user_of_its_own_without_capabilities_in_an_empty_root() {
    if !is_root_or_skipped("each_vmm_is_a_user_of_its_own_without_capabilities_in_an_empty_root") {
        return;
    }
    let inspect = || {
        run_in_jail(|report| {
            let files = std::fs::read_dir("/").map(Iterator::count);
            let rights = [
                caps::CapSet::Bounding,
                caps::CapSet::Effective,
                caps::CapSet::Inheritable,
                caps::CapSet::Permitted,
                caps::CapSet::Ambient,
            ];
            let rights = rights.map(|set| caps::read(None, set).map(|c| c.len()).ok());
            let groups = nix::unistd::getgroups().map(|g| g.len());
            let tasks = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NPROC);
            let _ = write!(
                report,
                "files {files:?} rights {rights:?} groups {groups:?} pid {} tasks {tasks:?} user {}",
                std::process::id(),
                Uid::current(),
            );
        })
    };
    let (one, other) = (inspect(), inspect());
    let (place, user) = one.rsplit_once(' ').unwrap();
    let (other_place, other_user) = other.rsplit_once(' ').unwrap();
    // With Landlock, even listing the empty root fails.
    let files = place.split(" rights").next().unwrap();
    assert!(
        files == "files Ok(0)" || files.starts_with("files Err"),
        "{files}"
    );
    let rest = place.split_once(" rights ").unwrap().1;
    // No capability in each of the five sets. The jail limits the tasks of a VMM to 64.
    let none = "Some(0), Some(0), Some(0), Some(0), Some(0)";
    assert_eq!(
        rest,
        format!("[{none}] groups Ok(0) pid 1 tasks Ok((64, 64)) user")
    );
    assert_eq!(place, other_place);
    assert_ne!(user, other_user);
    // The process sees its id inside of its user namespace. On the host, the id is higher by
    // `FIRST_UID`.
    assert!(user.parse::<u32>().unwrap() < FIRST_UID);
}

#[test]
fn files_of_a_vmm_are_limited_in_size() {
    if !is_root_or_skipped("files_of_a_vmm_are_limited_in_size") {
        return;
    }
    let output = run_in_jail(|report| {
        let limited = jail::limit_file_size(1 << 20);
        // SAFETY: a valid name, and no flags.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"overlay".as_ptr(), 0)) };
        let within = file.write_all_at(&[1; 4096], (1 << 20) - 4096);
        let beyond = file.write_at(&[1], 1 << 20);
        let beyond = beyond.map_err(|e| e.raw_os_error() == Some(libc::EFBIG));
        let raised = nix::sys::resource::setrlimit(
            nix::sys::resource::Resource::RLIMIT_FSIZE,
            nix::sys::resource::RLIM_INFINITY,
            nix::sys::resource::RLIM_INFINITY,
        );
        let results = (limited.is_ok(), within.is_ok(), beyond, raised.is_err());
        let _ = writeln!(report, "{results:?}");
    });
    assert_eq!(output, "(true, true, Err(true), true)\n");
}
