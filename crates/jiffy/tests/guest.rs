//! Tests for the contents of a guest: kernel features that programs of coding agents need, size of
//! the guest agent (process 1), template programs.

use crate::support::call;
use jiffy_test_attributes::jiffy_test;

fn python(program: &str) -> crate::support::Done {
    call(&["run", "-u", "root", "--", "python3", "-c", program])
}

#[jiffy_test]
fn the_guest_kernel_has_what_agents_need() {
    let program = r#"
import ctypes, os, socket, subprocess, sys, tempfile
libc = ctypes.CDLL(None, use_errno=True)
missing = []
def need(what, there):
    if not there: missing.append(what)
filesystems = open('/proc/filesystems').read().split()
for fs in 'ext4 erofs overlay fuse tmpfs proc sysfs devtmpfs devpts cgroup2'.split():
    need('file system ' + fs, fs in filesystems)
controllers = open('/sys/fs/cgroup/cgroup.controllers').read().split()
for c in 'cpu memory pids io cpuset'.split():
    need('cgroup controller ' + c, c in controllers)
for ns in 'cgroup ipc mnt net pid user uts'.split():
    need('namespace ' + ns, os.path.exists('/proc/self/ns/' + ns))
need('unshare', subprocess.run(['unshare', '--user', '--map-root-user', '--net', '--pid', '--fork', '--mount', 'true']).returncode == 0)
for family, kind in [('AF_UNIX', socket.SOCK_STREAM), ('AF_INET', socket.SOCK_STREAM), ('AF_INET6', socket.SOCK_STREAM), ('AF_PACKET', socket.SOCK_RAW), ('AF_VSOCK', socket.SOCK_STREAM), ('AF_NETLINK', socket.SOCK_RAW)]:
    try: socket.socket(getattr(socket, family), kind).close()
    except OSError as e: missing.append(f'{family}: {e}')
try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close() # NETLINK_NETFILTER
except OSError as e: missing.append(f'nftables: {e}')
need('seccomp filter', open('/proc/self/status').read().find('Seccomp_filters') >= 0)
need('inotify', libc.inotify_init1(0) >= 0)
need('userfaultfd or memfd', libc.memfd_create(b'x', 0) >= 0)
# The kernel disables pages of 2 MiB in guests below 512 MiB of usable memory; pages of 64 KiB are always enabled.
need('transparent huge pages', '[always]' in open('/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled').read())
need('kvmclock', open('/sys/devices/system/clocksource/clocksource0/current_clocksource').read().strip() == 'kvm-clock')
need('hardware random generator', 'virtio' in open('/sys/class/misc/hw_random/rng_current').read())
with tempfile.NamedTemporaryFile() as f:
    try: os.setxattr(f.name, 'user.x', b'y')
    except OSError as e: missing.append(f'xattr: {e}')
print('missing:', missing)
"#;
    let done = python(program);
    assert_eq!(
        (done.code, done.stdout.trim()),
        (Some(0), "missing: []"),
        "{done:?}"
    );
}

#[jiffy_test]
fn the_agent_is_small() {
    let done =
        python("print([l.split()[1] for l in open('/proc/1/status') if l.startswith('VmRSS')][0])");
    let kib: u64 = done
        .stdout
        .trim()
        .parse()
        .unwrap_or_else(|e| panic!("{e}: {done:?}"));
    // The agent has two huge pages of code (4 MiB) and at most 1 MiB of data.
    assert!(kib < (4 + 1) * 1024, "{kib} KiB resident");
}

#[jiffy_test]
fn the_agents_code_is_in_huge_pages_and_no_others_are_given() {
    let done = python(
        "import re
text = next(m for m in re.split(r'(?m)^(?=[0-9a-f]+-)', open('/proc/1/smaps').read()) if ' r-xp ' in m)
enabled = open('/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled').read()
print(re.search(r'AnonHugePages: *(\\d+)', text)[1], '[never]' in enabled)",
    );
    // 4 MiB of the agent's code, and no huge pages for other programs.
    assert_eq!(done.stdout.trim(), "4096 True", "{done:?}");
}

#[jiffy_test]
fn the_base_template_has_its_programs() {
    let script = "set -e; bash --version | head -1; ps --version; git --version; curl --version | head -1; \
        python3 -m pip --version; python --version; test -s /etc/ssl/certs/ca-certificates.crt; sudo -n true; \
        python3 -m venv /tmp/v && /tmp/v/bin/python -c 'print(42)'; cd /tmp && git init -q r && cd r && \
        git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git log --oneline | wc -l";
    let done = call(&["run", "--", "bash", "-c", script]);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.stdout.ends_with("42\n1\n"), "{done:?}");
}

#[jiffy_test]
fn orphans_are_reaped_and_background_processes_do_not_hold_the_run() {
    let script = "for i in 1 2 3 4 5; do (true & exec true) & done; wait; sh -c 'sleep 0.2 &'; sleep 0.6; ps -e -o stat= | grep -c Z; sleep 300 & echo done";
    let began = std::time::Instant::now();
    let done = call(&["run", "--", "bash", "-c", script]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(0), "0\ndone\n"),
        "{done:?}"
    );
    // The run does not wait for `sleep 300`.
    assert!(began.elapsed().as_secs() < 100, "{:?}", began.elapsed());
}
