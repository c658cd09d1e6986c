//! Start time of a tenant's process, and memory use of the process and its functions.

use jiffy_function_manager::tenant_process::{HTTP_SOCKET, ProcessSettings, TenantProcess};
use jiffy_function_runtime::engine::RESETS;
use jiffy_proto::function::{FunctionLimits, SlotReset, TenantLimits};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Number of starts. The last process is not a part of the times: its memory is measured.
const STARTS: usize = 20;
/// Number of functions loaded in addition to the first. A tenant may have 1,000.
const FUNCTIONS: u32 = 999;
/// Time without a daemon after which a process exits.
const GRACE: Duration = Duration::from_secs(5);

/// Measures starts, memory without functions, and memory per function of the examples that are
/// small enough to be loaded [`FUNCTIONS`] times.
pub fn measure(owner: &str, small: &[u8], loaded: &[(&str, &[u8])]) -> Value {
    let processes = RESETS.iter().map(|&reset| {
        let mut starts: Vec<_> = (0..STARTS).map(|_| start(owner, reset, small)).collect();
        let idle = starts.pop().unwrap();
        let median = |time: fn(&Start) -> Duration| {
            let mut times: Vec<_> = starts.iter().map(time).collect();
            times.sort();
            times[times.len() / 2].as_secs_f64() * 1e3
        };
        json!({
            "reset": reset.word(), "starts": starts.len(),
            "ready_ms": median(|s| s.ready), "first_answer_ms": median(|s| s.answered),
            "after_one_request_kib": memory(idle.process.id()),
        })
    });
    let processes: Vec<_> = processes.collect();
    let functions = loaded
        .iter()
        .map(|(name, file)| each(owner, name, file))
        .collect::<Vec<_>>();
    json!({ "processes": processes, "functions": functions })
}

/// Started process, and the times until it was ready and until it answered a request.
struct Start {
    process: TenantProcess,
    directory: tempfile::TempDir,
    ready: Duration,
    answered: Duration,
}

fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let target = own.parent().and_then(Path::parent).unwrap();
    target.join("jiffy-functions")
}

/// Starts a process, and waits for the answer of one function.
fn start(owner: &str, reset: SlotReset, file: &[u8]) -> Start {
    let directory = tempfile::tempdir().unwrap();
    let program = program();
    let settings = ProcessSettings {
        program: &program,
        owner,
        limits: TenantLimits {
            reset,
            ..TenantLimits::default()
        },
        jailed: true,
        grace: GRACE,
    };
    let compiled = directory.path().join("compiled");
    std::fs::write(&compiled, file).unwrap();
    let begin = Instant::now();
    let process = TenantProcess::start(&settings, directory.path()).unwrap();
    let ready = begin.elapsed();
    load(&process, "first", &compiled);
    request(&directory.path().join(HTTP_SOCKET), "first");
    Start {
        process,
        ready,
        answered: begin.elapsed(),
        directory,
    }
}

fn load(process: &TenantProcess, name: &str, compiled: &Path) {
    let digest = blake3::hash(&std::fs::read(compiled).unwrap()).to_hex();
    let file = File::open(compiled).unwrap();
    process
        .load(name, &file, &digest, FunctionLimits::default())
        .unwrap();
}

/// Sends a request with the body `a b a` and checks that it succeeds.
fn request(socket: &Path, function: &str) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let head = format!(
        "POST / HTTP/1.1\r\nhost: f\r\njiffy-function: {function}\r\nconnection: close\r\n\
         content-length: 5\r\n\r\na b a"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Measures the memory of a process before and after it has loaded many functions.
fn each(owner: &str, name: &str, file: &[u8]) -> Value {
    let started = start(owner, SlotReset::Strict, file);
    let compiled = started.directory.path().join("compiled");
    let before = memory(started.process.id());
    let begin = Instant::now();
    for number in 0..FUNCTIONS {
        load(&started.process, &format!("f{number}"), &compiled);
    }
    let elapsed = begin.elapsed();
    let loaded = memory(started.process.id());
    let socket = started.directory.path().join(HTTP_SOCKET);
    for number in 0..FUNCTIONS {
        request(&socket, &format!("f{number}"));
    }
    let used = memory(started.process.id());
    let each = |after: &Value| {
        let kib = |memory: &Value| memory["pss"].as_u64().unwrap();
        (kib(after).saturating_sub(kib(&before))) as f64 / f64::from(FUNCTIONS)
    };
    json!({
        "name": name, "functions": FUNCTIONS, "compiled_bytes": file.len(),
        "load_us_each": elapsed.as_secs_f64() * 1e6 / f64::from(FUNCTIONS),
        "loaded_kib_each": each(&loaded), "after_a_request_kib_each": each(&used),
        "before_kib": before, "loaded_kib": loaded, "after_a_request_kib": used,
    })
}

/// Returns the memory of a process in KiB.
fn memory(process: u32) -> Value {
    let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap();
    let field = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.and_then(|n| n.parse::<u64>().ok()).unwrap()
    };
    json!({ "rss": field("Rss:"), "pss": field("Pss:"), "anonymous": field("Anonymous:") })
}
