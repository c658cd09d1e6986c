"""Tests features of the guest kernel as root in a sandbox. Prints the missing features.

Standard input contains images of file systems. Each image starts with a line of JSON with its name,
its size and its number of blocks. The blocks of 4 KiB follow, each after its 8-byte number.
"""
import ctypes, hashlib, json, mmap, os, shutil, socket, struct, subprocess, sys, time

libc = ctypes.CDLL(None, use_errno=True)
missing, RELEASE = [], os.uname().release
# The agent (process 1) also loads modules: the kernel starts it as `modprobe`.
MODPROBE = '/proc/1/exe'


def feature(work):
    """Runs a check immediately. Records an error as a missing feature."""
    began = time.monotonic()
    try:
        work()
    except Exception as e:
        missing.append(f'{work.__name__}: {type(e).__name__}: {e}')
    print(f'{work.__name__}: {time.monotonic() - began:.2f} s', file=sys.stderr)


def sh(command):
    """Runs a shell command, which must succeed. Returns its output."""
    done = subprocess.run(['sh', '-c', command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'{command}: {done.stderr.strip() or done.returncode}')
    return done.stdout


def need(what, message='not so'):
    """Fails the feature unless the condition is true."""
    if not what:
        raise RuntimeError(message)


def loaded():
    """Returns the names of the loaded modules."""
    return {line.split()[0] for line in open('/proc/modules')}


def finit(path):
    """Loads a module. Returns 0 or the number of the error."""
    with open(path, 'rb') as file:
        if libc.syscall(313, file.fileno(), b'', 0):  # finit_module
            return ctypes.get_errno()
    return 0


def mount(source, target, kind, options=''):
    """Mounts a file system without the program `mount`."""
    os.makedirs(target, exist_ok=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), f'mount {kind}')


@feature
def an_unprivileged_user_has_no_module_loaded():
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
        except OSError:
            os._exit(0)
        os._exit(1)
    need(os.waitpid(child, 0)[1] == 0, 'AF_ALG was there')
    need('af_alg' not in loaded(), 'af_alg was loaded')


@feature
def the_image_has_no_modprobe_of_its_own():
    need(not shutil.which('modprobe'), 'it has: this test says nothing about one without')


@feature
def af_alg_hashes():
    with socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) as algorithm:
        algorithm.bind(('hash', 'sha256'))
        operation, _ = algorithm.accept()
        with operation:
            operation.sendall(b'jiffy')
            need(operation.recv(64) == hashlib.sha256(b'jiffy').digest())


@feature
def iptables_legacy_counts_packets():
    # Like iptables; the table itself is loaded on first use.
    sh(f'{MODPROBE} ip_tables')
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)

    def get(option, request, size):
        # Not with Python's socket API: the request is in the buffer for the answer.
        data, length = ctypes.create_string_buffer(request, size), ctypes.c_uint(size)
        if libc.getsockopt(raw.fileno(), 0, option, data, ctypes.byref(length)):
            raise OSError(ctypes.get_errno(), f'option {option}')
        return data.raw

    info = get(64, b'filter', 84)  # IPT_SO_GET_INFO
    hooks = struct.unpack_from('5I', info, 36)
    size = struct.unpack_from('I', info, 80)[0]

    def received():
        # IPT_SO_GET_ENTRIES: the counter of the policy of chain INPUT.
        entries = get(65, struct.pack('32sI', b'filter', size), 40 + size)
        return struct.unpack_from('Q', entries, 40 + hooks[1] + 96)[0]

    before = received()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(('127.0.0.1', 0))
        one.sendto(b'x', one.getsockname())
        one.recv(1)
    need(received() > before, 'the packet was not counted')


@feature
def links_of_every_kind_are_made():
    sh('ip link add low0 type dummy && ip link set low0 up')
    kinds = {
        'wireguard': '', 'vxlan': 'id 7 dstport 4789', 'ifb': '', 'geneve': 'id 7 remote 127.0.0.1',
        'vlan': 'id 7', 'macvlan': 'mode bridge', 'vrf': 'table 7', 'bond': '', 'bridge': '', 'nlmon': '',
    }
    for kind, words in kinds.items():
        lower = 'link low0' if kind in ('vlan', 'macvlan') else ''
        sh(f'ip link add {lower} name one0 type {kind} {words} && ip link del one0')
    sh('ip link add low1 type dummy && ip link set low1 up')
    sh('ip link add link low1 name one0 type ipvlan mode l2 && ip link del one0 && ip link del low1')


@feature
def packets_are_queued_in_every_way():
    for qdisc in 'fq', 'fq_codel', 'htb', 'clsact', 'cake', 'tbf rate 1mbit burst 32k latency 9ms', 'sfq':
        parent = '' if qdisc == 'clsact' else 'root'
        sh(f'tc qdisc add dev low0 {parent} {qdisc} && tc qdisc del dev low0 {parent or qdisc}')
    sh('ip link set lo up && tc qdisc add dev lo root netem delay 60ms')
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.bind(('127.0.0.1', 0))
            began = time.monotonic()
            one.sendto(b'x', one.getsockname())
            one.recv(1)
            need(time.monotonic() - began >= 0.055, 'netem did not delay')
    finally:
        sh('tc qdisc del dev lo root')


@feature
def tcp_has_bbr_tls_and_several_paths():
    def pair(protocol):
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
        server.bind(('127.0.0.1', 0))
        server.listen()
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
        client.connect(server.getsockname())
        return client, server.accept()[0]

    client, peer = pair(0)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b'bbr')
    client.setsockopt(socket.IPPROTO_TCP, 31, b'tls')  # TCP_ULP
    client, peer = pair(262)  # IPPROTO_MPTCP
    client.sendall(b'paths')
    need(peer.recv(9) == b'paths')


@feature
def file_systems_are_mounted_from_images():
    kinds = set()
    while line := sys.stdin.buffer.readline():
        image = json.loads(line)
        path = '/var/tmp/' + image['kind']
        with open(path, 'wb') as file:
            file.truncate(image['size'])
            for _ in range(image['blocks']):
                block = sys.stdin.buffer.read(8 + 4096)
                file.seek(struct.unpack_from('<Q', block)[0] * 4096)
                file.write(block[8:])
            file.truncate(image['size'])
        sh(f"mkdir -p /mnt/one && mount -o loop,{image['options']} -t {image['kind']} {path} /mnt/one")
        try:
            need(open('/mnt/one/file').read() == 'jiffy\n', image['kind'])
            if image['options'].startswith('rw'):
                open('/mnt/one/new', 'w').write('x')
        finally:
            sh('umount /mnt/one')
        os.unlink(path)
        kinds.add(image['kind'])
    need(kinds, 'there were no images')


@feature
def ext4_counts_quota():
    sh('truncate -s 16M /var/tmp/quota && mkfs.ext4 -q -O quota /var/tmp/quota')
    sh('mkdir -p /mnt/two && mount -o loop,usrquota /var/tmp/quota /mnt/two && umount /mnt/two')


@feature
def network_file_systems_are_known():
    for kind in 'nfs', 'nfs4', '9p':
        sh(f'{MODPROBE} {kind}')
    known = open('/proc/filesystems').read().split()
    need({'nfs', 'nfs4', '9p'} <= set(known))


@feature
def block_devices_are_made():
    sh(f'{MODPROBE} dm_mod && test -c /dev/mapper/control')
    import fcntl
    with open('/dev/mapper/control', 'rb+', buffering=0) as control:
        # `struct dm_ioctl` has 312 bytes. Its first number is the major version.
        version = bytearray(struct.pack('3I', 4, 0, 0) + struct.pack('I', 312) + bytes(296))
        fcntl.ioctl(control, 0xC138FD00, version)  # DM_VERSION
        need(struct.unpack_from('I', version)[0] == 4)
    sh(f'{MODPROBE} nbd && test -b /dev/nbd0')
    sh(f'{MODPROBE} zram && echo 8M > /sys/block/zram0/disksize')
    with open('/dev/zram0', 'r+b', buffering=0) as zram:
        zram.write(b'z' * 65536)
        zram.seek(0)
        need(zram.read(65536) == b'z' * 65536)
    sh('echo 1 > /sys/block/zram0/reset')


@feature
def the_root_takes_a_swap_file():
    sh('dd if=/dev/zero of=/swapfile bs=1M count=8 status=none && chmod 600 /swapfile')
    sh('mkswap /swapfile && swapon /swapfile')
    need(any(line.startswith('/swapfile ') for line in open('/proc/swaps')), open('/proc/swaps').read())
    sh('swapoff /swapfile && rm /swapfile')


@feature
def huge_pages_are_reserved():
    sh('echo 1 > /proc/sys/vm/nr_hugepages')
    # 0x40000 is MAP_HUGETLB.
    page = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
    page[0] = 1
    page.close()
    sh('echo 0 > /proc/sys/vm/nr_hugepages')


@feature
def overlayfs_has_its_upper_directory_where_containers_are_kept():
    for place in '/var/lib/docker', '/var/lib/containerd', '/var/lib/containers':
        sh(f'mkdir -p {place}/t/low {place}/t/up {place}/t/work {place}/t/m && echo a > {place}/t/low/a')
        options = f'lowerdir={place}/t/low,upperdir={place}/t/up,workdir={place}/t/work'
        mount('overlay', f'{place}/t/m', 'overlay', options)
        os.unlink(f'{place}/t/m/a')
        need(os.stat(f'{place}/t/up/a').st_rdev == 0, 'no whiteout')
        sh(f'umount {place}/t/m && rm -r {place}/t')


@feature
def the_kernel_is_traced_by_root():
    tracing = '/sys/kernel/tracing/'
    put = lambda name, text: open(tracing + name, 'w').write(text)
    put('kprobe_events', 'p:seen do_sys_openat2')
    put('events/kprobes/seen/enable', '1')
    open('/etc/hostname', 'a').close()
    put('events/kprobes/seen/enable', '0')
    need('seen: (do_sys_openat2' in open(tracing + 'trace').read(), 'no kprobe')
    put('kprobe_events', '')
    put('trace', '')
    put('set_ftrace_filter', 'vfs_open')
    put('current_tracer', 'function')
    open('/etc/hostname', 'a').close()
    need('vfs_open' in open(tracing + 'trace').read(), 'no function tracer')
    put('current_tracer', 'nop')
    put('set_ftrace_filter', '')
    need(os.path.exists(tracing + 'uprobe_events'), 'no uprobes')
    need(os.path.isdir('/sys/kernel/debug/bdi'), 'no debugfs')


@feature
def types_of_the_kernel_are_readable():
    # BTF data starts with the number 0xeb9f.
    need(open('/sys/kernel/btf/vmlinux', 'rb').read(2) == b'\x9f\xeb')


@feature
def programs_are_told_what_they_ask():
    for path in '/proc/self/io', '/proc/config.gz', '/proc/schedstat', '/proc/self/schedstat':
        open(path, 'rb').read(1)
    watches = int(open('/proc/sys/fs/inotify/max_user_watches').read())
    need(watches >= 524288, f'{watches} watches')
    need(int(open('/proc/sys/fs/inotify/max_user_instances').read()) >= 1024)


@feature
def every_module_of_the_image_loads():
    top, failed, count = f'/lib/modules/{RELEASE}', {}, 0
    needed = dict(line.rstrip().split(':') for line in open(top + '/modules.dep'))
    tried = set()
    for path, others in needed.items():
        for one in [*reversed(others.split()), path]:
            if one in tried:
                continue
            tried.add(one)
            count += 1
            error = finit(f'{top}/{one}')
            # EEXIST: the module is loaded. ENODEV: the processor lacks the feature.
            if error not in (0, 17, 19):
                failed[one] = os.strerror(error)
    need(not failed, failed)
    need(count > 300, f'{count} modules')


@feature
def the_kernel_log_is_clean():
    log = sh('dmesg')
    bad = [line for line in log.splitlines() if any(w in line for w in ('BUG:', 'WARNING: CPU', 'Oops', 'Call Trace'))]
    need(not bad, bad[:5])


print('missing:', missing)
