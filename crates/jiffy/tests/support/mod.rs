//! Helpers to run `jiffy` in tests.

pub mod build_project;
pub mod devtools;
pub mod engine;
pub mod forward;
pub mod lab;
pub mod network_probe;
pub mod remote;
pub mod requirements;
pub mod s3;
pub mod sandbox_http;
pub mod small_disk;
pub mod socks_proxy;
pub mod store;
pub mod terminal;
pub mod test_home;

pub use requirements::skip;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiffy_proto::vm::jail::MAKE_ARGUMENT;

/// Timeout of a single call. The slowest hosts need a fraction of it.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Directory with the programs `jiffy`, `jiffy-vmm` and `jiffy-agent`.
pub fn programs() -> PathBuf {
    let directory = std::env::var_os("JIFFY_BIN_DIR").map_or_else(
        || {
            let target = Path::new(env!("CARGO_BIN_EXE_jiffy")).ancestors().nth(2);
            target.unwrap().join("release")
        },
        PathBuf::from,
    );
    for name in ["jiffy", "jiffy-vmm", "jiffy-agent"] {
        assert!(
            directory.join(name).exists(),
            "{} has no {name}: run `make build` first",
            directory.display()
        );
    }
    directory
}

/// Returns a `jiffy` command that finds the other programs.
pub fn jiffy(args: &[&str]) -> Command {
    let programs = programs();
    let mut command = Command::new(programs.join("jiffy"));
    command
        .args(args)
        .env("JIFFY_VMM", programs.join("jiffy-vmm"))
        .env("JIFFY_AGENT", programs.join("jiffy-agent"))
        .env_remove("JIFFY_URL")
        .env_remove("JIFFY_API_KEY")
        .stdin(Stdio::null());
    if let Some(engine) = engine::wanted() {
        command.env("JIFFY_ENGINE", engine);
    }
    command
}

/// Result of a finished call.
#[derive(Debug)]
pub struct Done {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Runs `jiffy` with `args` until it exits.
pub fn call(args: &[&str]) -> Done {
    finish(
        jiffy(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    )
}

/// Runs `jiffy` with `args` and with `input` on standard input.
pub fn call_with(args: &[&str], input: &[u8]) -> Done {
    let mut child = jiffy(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A command that exits early closes the pipe. The test checks its result.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let done = finish(child);
    writer.join().unwrap();
    done
}

/// Waits for a child with piped outputs, for at most [`LIMIT`].
pub fn finish(mut child: Child) -> Done {
    let drain = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(mut stream) = stream {
                let _ = stream.read_to_end(&mut text);
            }
            text
        })
    };
    let stdout = drain(child.stdout.take().map(|s| Box::new(s) as _));
    let stderr = drain(child.stderr.take().map(|s| Box::new(s) as _));
    let end = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("still running after {LIMIT:?}: {:?}", stderr.join());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Output {
        status,
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
    .into()
}

/// Waits until `ready` returns a value, for at most [`LIMIT`].
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the page faults of a process so far.
pub fn page_faults(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    // `minflt` and `majflt` (proc_pid_stat(5)).
    fields[7].parse::<u64>().unwrap() + fields[9].parse::<u64>().unwrap()
}

/// Returns the ids of the direct children of `pid`.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    threads
        .flatten()
        .filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok())
        .flat_map(|text| {
            text.split_whitespace()
                .map(|p| p.parse().unwrap())
                .collect::<Vec<u32>>()
        })
        .collect()
}

/// Returns the VMM process of a running `jiffy`. After the first output of the guest, it is the
/// only process with this name.
pub fn vmm_of(jiffy: &Child) -> u32 {
    wait_for("the VMM process", || {
        children(jiffy.id()).into_iter().find(|pid| {
            let of = |file| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
            // A process of `jiffy-vmm` that creates the namespaces of VMMs does not count.
            of("comm").is_ok_and(|name| name.trim() == "jiffy-vmm")
                && of("cmdline").is_ok_and(|line| !line.contains(MAKE_ARGUMENT) && !line.is_empty())
        })
    })
}

/// Returns whether a process exists. Zombies do not count, because they hold no resources.
pub fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .trim()
            .starts_with('Z')
    })
}

/// Reads from a stream until the text contains `needle`. Returns the text, and leaves later bytes
/// in the stream.
pub fn read_until(stream: &mut impl Read, needle: &str) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&text).contains(needle) {
        assert_eq!(
            stream.read(&mut byte).unwrap(),
            1,
            "ended before {needle:?}: {}",
            String::from_utf8_lossy(&text)
        );
        text.push(byte[0]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Notifies the threads of a scope that the test has ended, also after a failure, because the scope
/// waits for its threads.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
