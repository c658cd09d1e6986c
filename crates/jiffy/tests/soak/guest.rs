//! Program in each guest that stores a number in memory and on disk, and reports the stored values.

use serde_json::Value;

/// Port of the program.
pub const PORT: u16 = 8100;

/// Starts the server in the background, and returns when it listens. Argument: the first number.
///
/// A number is stored in 2,048 pages of memory and 256 blocks of a synced file, each with the
/// number and its position. One thread serves the requests sequentially, so that no answer shows an
/// incomplete write. A number that is not newer than the last one arrived late, from before a
/// pause, and is ignored. The status 599 reports an error of the program itself.
pub const SERVER: &str = r#"
import json, mmap, os, socket, struct, sys
PORT, PAGES, BLOCKS = 8100, 2048, 256
memory = mmap.mmap(-1, PAGES * 4096)
disk = os.open('/home/user/pattern', os.O_CREAT | os.O_RDWR, 0o600)
current = 0
def page(n, i): return struct.pack('<QQ', n, i) * 256
def write(n):
    global current
    if n <= current: return
    for i in range(PAGES): memory[i * 4096:i * 4096 + 4096] = page(n, i)
    os.pwrite(disk, b''.join(page(n, i) for i in range(BLOCKS)), 0)
    os.fsync(disk)
    current = n
# Returns `[number, length]` for each run of blocks with the same number. A damaged block `i` has
# the number `-1 - i`.
def runs(data, count):
    found = []
    for i in range(count):
        block = data[i * 4096:i * 4096 + 4096]
        n = struct.unpack_from('<Q', block)[0] if len(block) == 4096 else -1
        if n < 0 or block != page(n, i): n = -1 - i
        if found and found[-1][0] == n: found[-1][1] += 1
        elif len(found) < 20: found.append([n, 1])
    return found
def verify():
    os.posix_fadvise(disk, 0, 0, os.POSIX_FADV_DONTNEED)
    return {'current': current, 'memory': runs(memory, PAGES), 'host': os.uname().nodename,
            'disk': runs(os.pread(disk, BLOCKS * 4096, 0), BLOCKS)}
def reach():
    with socket.create_connection(('11.0.0.1', 80), 15) as s, s.makefile() as f: return {'heard': f.readline()}
def serve(s):
    s.settimeout(10)
    head = b''
    while b'\r\n\r\n' not in head:
        part = s.recv(4096)
        if not part: return
        head += part
    path = head.split()[1].decode()
    status = 200
    try:
        if path.startswith('/write/'): answer = write(int(path[7:]))
        elif path == '/verify': answer = verify()
        elif path == '/reach': answer = reach()
        else: answer = {}
    except OSError as e: status, answer = 599, {'message': repr(e)}
    body = json.dumps(answer).encode()
    s.sendall(b'HTTP/1.1 %d X\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (status, len(body)) + body)
write(int(sys.argv[1]))
listener = socket.create_server(('', PORT), backlog=64)
if os.fork(): os._exit(0)
os.setsid()
null = os.open('/dev/null', os.O_RDWR)
for fd in 0, 1, 2: os.dup2(null, fd)
while True:
    try:
        with listener.accept()[0] as s: serve(s)
    except OSError: pass
"#;

/// Returns the number in an answer of `/verify` if memory, disk and program agree.
pub fn number(report: &Value, id: &str) -> Result<u64, String> {
    let whole = |place: &str, count: u64| {
        let runs = report[place].as_array()?;
        let single = runs.len() == 1 && runs[0][1] == count;
        single.then(|| runs[0][0].as_u64())?
    };
    let found = (whole("memory", 2048), whole("disk", 256));
    match (found, report["current"].as_u64()) {
        ((Some(memory), Some(disk)), Some(current)) if memory == disk && disk == current => {}
        _ => return Err(format!("memory, disk and program do not agree: {report}")),
    }
    if report["host"] != id {
        return Err(format!(
            "the guest of {id} identifies itself as {}",
            report["host"]
        ));
    }
    Ok(found.0.unwrap_or_default())
}
