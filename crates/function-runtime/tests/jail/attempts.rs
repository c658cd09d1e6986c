//! Attack attempts of code that controls a process, and their targets on the host.

use super::taken_process::{CallEnd, TakenThread};
use nix::sys::signal::Signal;
use std::ffi::CStr;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Child, Command};

/// Marker of a corrected page scan, and the request `PAGEMAP_SCAN`. The filter requires both.
const SCAN_MARKER: u64 = 0x4a69_6666;
const PAGEMAP_SCAN: u64 = 0xC060_6610;
/// Bit of system calls of the x32 ABI.
const X32: libc::c_long = 0x4000_0000;
/// `open` of 32-bit programs.
const OPEN_32: u64 = 5;

/// Targets on the host.
pub struct Host {
    victim: Child,
    tcp: TcpListener,
    unix: UnixListener,
    unix_name: String,
    directory: tempfile::TempDir,
}

type Attempt = (&'static str, libc::c_long, [u64; 6]);

impl Host {
    /// Starts a process and listeners that a jailed process must not reach.
    pub fn new(test: &str) -> Self {
        let unix_name = format!("jiffy-{test}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&unix_name).unwrap();
        let host = Self {
            victim: Command::new("sleep").arg("600").spawn().unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            unix: UnixListener::bind_addr(&address).unwrap(),
            unix_name,
            directory: tempfile::tempdir().unwrap(),
        };
        host.tcp.set_nonblocking(true).unwrap();
        host.unix.set_nonblocking(true).unwrap();
        host
    }

    /// Fails if an attack affected the host.
    pub fn assert_untouched(&mut self) {
        assert!(self.victim.try_wait().unwrap().is_none(), "killed");
        let tcp = self.tcp.accept().map(drop).map_err(|e| e.kind());
        let unix = self.unix.accept().map(drop).map_err(|e| e.kind());
        assert_eq!(
            (tcp, unix),
            (Err(ErrorKind::WouldBlock), Err(ErrorKind::WouldBlock))
        );
        assert_eq!(self.directory.path().read_dir().unwrap().count(), 0);
    }

    /// Makes all attempts that the filter denies, in a thread with the open descriptor `open`.
    /// Returns the names of the attempts that were not denied.
    pub fn attack(&self, thread: &mut TakenThread, open: i32) -> Vec<String> {
        let targets = self.targets(thread, open);
        let mut reached = Vec::new();
        for (name, number, arguments) in filter_attempts(&targets) {
            // The filter denies a call with one of these errors. Another error comes from the
            // kernel, which the call has reached.
            let errors = [libc::EPERM, libc::ENOSYS].map(|error| -i64::from(error));
            if !errors.contains(&result_of_call(thread, number, arguments)) {
                reached.push(name.to_owned());
            }
        }
        reached
    }

    /// Makes the attempts that require files, processes or a network, in a thread without a filter.
    /// Returns the names of the attempts that were not denied.
    pub fn attack_jail(&self, thread: &mut TakenThread) -> Vec<String> {
        let [inet, unix] = [libc::AF_INET, libc::AF_UNIX].map(|family| {
            let stream = libc::SOCK_STREAM as u64;
            result_of_call(
                thread,
                libc::SYS_socket,
                [family as u64, stream, 0, 0, 0, 0],
            )
        });
        // The filter is suspended.
        assert!(inet >= 0 && unix >= 0, "{inet} {unix}");
        let on_inet = self.targets(thread, inet.try_into().unwrap());
        let on_unix = self.targets(thread, unix.try_into().unwrap());
        let mut reached = Vec::new();
        for (name, number, arguments) in jail_attempts(&on_inet, &on_unix) {
            if result_of_call(thread, number, arguments) >= 0 {
                reached.push(name.to_owned());
            }
        }
        reached
    }

    /// Writes the arguments of attempts to the memory of the thread.
    fn targets(&self, thread: &mut TakenThread, open: i32) -> Targets {
        let mut put = |bytes: &[u8]| thread.put(bytes).unwrap();
        let mut text = |text: &CStr| put(text.to_bytes_with_nul());
        let [passwd, maps, shell, proc] =
            [c"/etc/passwd", c"/proc/self/maps", c"/bin/sh", c"proc"].map(&mut text);
        let (root, in_root) = (text(c"/"), text(c"/new"));
        let new = self.directory.path().join("new");
        let new = put(format!("{}\0", new.to_str().unwrap()).as_bytes());
        // A list of one argument, ended by a null pointer. `none` points to its end.
        let arguments = put(&[shell.to_ne_bytes(), [0; 8]].concat());
        let buffer = put(&[0; 256]);
        // This is `struct iovec`: an address and a length of eight bytes.
        let range = put(&[buffer.to_ne_bytes(), 8u64.to_ne_bytes()].concat());
        let port = self.tcp.local_addr().unwrap().port().to_be_bytes();
        let family = |family: i32| u16::try_from(family).unwrap().to_ne_bytes();
        // These are `sockaddr_in` and `sockaddr_un`. An abstract name starts with a zero byte.
        let inet = [&family(libc::AF_INET)[..], &port, &[127, 0, 0, 1], &[0; 8]];
        let name = self.unix_name.as_bytes();
        let unix = [&family(libc::AF_UNIX)[..], &[0], name].concat();
        Targets {
            open: u64::try_from(open).unwrap(),
            victim: self.victim.id().into(),
            passwd,
            maps,
            shell,
            proc,
            root,
            in_root,
            new,
            arguments,
            none: arguments + 8,
            buffer,
            range,
            inet: put(&inet.concat()),
            unix: put(&unix),
            unix_length: u64::try_from(unix.len()).unwrap(),
        }
    }
}

/// Arguments of attempts.
struct Targets {
    /// Open descriptor.
    open: u64,
    /// Process of the host.
    victim: u64,
    /// Addresses of strings.
    passwd: u64,
    maps: u64,
    shell: u64,
    proc: u64,
    root: u64,
    in_root: u64,
    /// Path on the host without a file.
    new: u64,
    /// Addresses of a program's arguments, and of an empty list.
    arguments: u64,
    none: u64,
    /// Address of zeros, and of a range that contains them.
    buffer: u64,
    range: u64,
    /// Addresses of socket addresses.
    inet: u64,
    unix: u64,
    unix_length: u64,
}

/// Makes a system call on a thread of the confined process. Returns its result.
fn result_of_call(thread: &mut TakenThread, number: libc::c_long, arguments: [u64; 6]) -> i64 {
    match thread.call(number, arguments).unwrap() {
        CallEnd::Returned(value) => value,
        CallEnd::Killed(signal) => {
            panic!("system call {number} killed the thread with signal {signal}")
        }
    }
}

/// List of names, system calls, and their first arguments. The other arguments are zero.
macro_rules! attempts {
    ($($name:literal: $call:ident($($argument:expr),*);)*) => {
        vec![$(($name, libc::$call, arguments(&[$($argument),*]))),*]
    };
}

fn arguments(first: &[u64]) -> [u64; 6] {
    let mut all = [0; 6];
    all[..first.len()].copy_from_slice(first);
    all
}

const HERE: u64 = libc::AT_FDCWD as i64 as u64;
const KILL: u64 = libc::SIGKILL as u64;
const SEIZE: u64 = libc::PTRACE_SEIZE as u64;
const WRITE: u64 = (libc::O_CREAT | libc::O_WRONLY) as u64;
const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;

/// Attempts that the filter denies. Omitted arguments are zero, for example signal 0, which has no
/// effect, and user 0 (root).
fn filter_attempts(t: &Targets) -> Vec<Attempt> {
    let stream = libc::SOCK_STREAM as u64;
    let raw = libc::SOCK_RAW as u64;
    let fork = libc::SIGCHLD as u64;
    let dumpable = libc::PR_SET_DUMPABLE as u64;
    let [inet, unix, netlink, packet, vsock] = [
        libc::AF_INET,
        libc::AF_UNIX,
        libc::AF_NETLINK,
        libc::AF_PACKET,
        libc::AF_VSOCK,
    ]
    .map(|family| family as u64);
    let mut all = attempts! {
        "open a file": SYS_open(t.passwd);
        "openat a file": SYS_openat(HERE, t.passwd);
        "openat2 a file": SYS_openat2(HERE, t.passwd, t.buffer, 24);
        "open its maps": SYS_openat(HERE, t.maps);
        "create a file": SYS_openat(HERE, t.new, WRITE, 0o600);
        "create a directory": SYS_mkdir(t.new, 0o700);
        "create a device": SYS_mknod(t.new, 0o600);
        "stat a file": SYS_stat(t.passwd, t.buffer);
        "read a link": SYS_readlink(t.passwd, t.buffer, 64);
        "link a file": SYS_link(t.passwd, t.new);
        "open by handle": SYS_open_by_handle_at(HERE, t.buffer);
        "an internet socket": SYS_socket(inet, stream);
        "a raw socket": SYS_socket(inet, raw, 1);
        "a Unix socket": SYS_socket(unix, stream);
        "a netlink socket": SYS_socket(netlink, raw);
        "a packet socket": SYS_socket(packet, raw);
        "a virtual socket": SYS_socket(vsock, stream);
        "a pair of sockets": SYS_socketpair(unix, stream, 0, t.buffer);
        "connect to a port": SYS_connect(t.open, t.inet, 16);
        "connect to a name": SYS_connect(t.open, t.unix, t.unix_length);
        "bind a port": SYS_bind(t.open, t.inet, 16);
        "listen": SYS_listen(t.open, 8);
        "fork": SYS_fork();
        "vfork": SYS_vfork();
        "clone a process": SYS_clone(fork);
        "clone into namespaces": SYS_clone(fork | NEW_USER);
        "clone3 a process": SYS_clone3(t.buffer, 88);
        "run a program": SYS_execve(t.shell, t.arguments, t.none);
        "run a descriptor": SYS_execveat(HERE, t.shell, t.arguments, t.none);
        "signal process 1": SYS_kill(1);
        "kill a process": SYS_kill(t.victim, KILL);
        "kill a thread": SYS_tgkill(t.victim, t.victim, KILL);
        "queue a signal": SYS_rt_sigqueueinfo(t.victim, KILL, t.buffer);
        "open a pidfd": SYS_pidfd_open(t.victim);
        "signal a pidfd": SYS_pidfd_send_signal(t.open, KILL);
        "take a descriptor": SYS_pidfd_getfd(t.open);
        "trace a process": SYS_ptrace(SEIZE, t.victim);
        "read a process": SYS_process_vm_readv(t.victim, t.range, 1, t.range, 1);
        "write a process": SYS_process_vm_writev(t.victim, t.range, 1, t.range, 1);
        "an ioctl": SYS_ioctl(t.open, libc::FIONREAD, t.buffer);
        "a marked ioctl": SYS_ioctl(t.open, libc::FIONREAD, t.buffer, SCAN_MARKER);
        "an unmarked scan": SYS_ioctl(t.open, PAGEMAP_SCAN, t.buffer);
        "mount": SYS_mount(t.proc, t.shell, t.proc);
        "unmount": SYS_umount2(t.shell);
        "a new mount": SYS_fsopen(t.proc);
        "change the root": SYS_chroot(t.shell);
        "new namespaces": SYS_unshare(NEW_USER);
        "enter a namespace": SYS_setns(t.open);
        "load BPF": SYS_bpf(0, t.buffer, 64);
        "perf events": SYS_perf_event_open(t.buffer, 0, u64::MAX, u64::MAX);
        "io_uring": SYS_io_uring_setup(1, t.buffer);
        "userfaultfd": SYS_userfaultfd(1);
        "add a key": SYS_add_key(t.proc, t.proc, t.proc, 4, u64::MAX - 2);
        "load a module": SYS_init_module(t.buffer, 8, t.none);
        "be root": SYS_setresuid();
        "take capabilities": SYS_capset(t.buffer, t.buffer);
        "dump core": SYS_prctl(dumpable, 1);
        "raise a limit": SYS_prlimit64(0, 7, t.buffer);
        "another filter": SYS_seccomp(1, 0, t.buffer);
        "shared memory": SYS_shmget(0, 4096, 0o1600);
    };
    all.push((
        "open a file by x32",
        X32 | libc::SYS_open,
        arguments(&[t.passwd]),
    ));
    all
}

/// Attempts that are denied without a filter, on sockets of both kinds.
fn jail_attempts(t: &Targets, unix: &Targets) -> Vec<Attempt> {
    attempts! {
        "open a file": SYS_open(t.passwd);
        "open its maps": SYS_open(t.maps);
        "create a file": SYS_open(t.new, WRITE, 0o600);
        "create a file in its root": SYS_open(t.in_root, WRITE, 0o600);
        "open by handle": SYS_open_by_handle_at(HERE, t.buffer);
        "run a program": SYS_execve(t.shell, t.arguments, t.none);
        "connect to a port": SYS_connect(t.open, t.inet, 16);
        "connect to a name": SYS_connect(unix.open, unix.unix, unix.unix_length);
        "signal process 1": SYS_kill(1);
        "kill a process": SYS_kill(t.victim, KILL);
        "trace a process": SYS_ptrace(SEIZE, t.victim);
        "read a process": SYS_process_vm_readv(t.victim, t.range, 1, t.range, 1);
        "write a process": SYS_process_vm_writev(t.victim, t.range, 1, t.range, 1);
        "mount": SYS_mount(t.proc, t.root, t.proc);
        "unmount": SYS_umount2(t.root);
        "change the root": SYS_chroot(t.root);
        "be root": SYS_setresuid();
        "load a module": SYS_init_module(t.buffer, 8, t.none);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
    }
}

/// Tries to open a file like a 32-bit program. Returns whether the process was killed, by its
/// filter or by a kernel without support for 32-bit programs.
pub fn is_killed_for_a_32_bit_call(thread: &mut TakenThread) -> bool {
    let ended = thread.call_32(OPEN_32, [0; 3]).unwrap();
    matches!(ended, CallEnd::Killed(Signal::SIGSYS | Signal::SIGSEGV))
}
