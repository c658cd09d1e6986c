//! Tests, builds and deploys the examples in examples/functions with their own tools, and sends
//! them requests.
//!
//! Examples whose tools are not installed are skipped. Large modules require an optimised compiler,
//! in the directory JIFFY_BIN_DIR.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{OWNER, TestResponse, TestTenant};
use jiffy_proto::function::FunctionLimits;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Limits that suffice for the runtimes of all languages.
const LARGE: FunctionLimits = FunctionLimits {
    memory_mib: 256,
    cpu_ms: 10_000,
    wall_ms: 30_000,
    request_bytes: 1 << 20,
    request_body_ms: 10_000,
    response_bytes: 1 << 20,
    concurrency: 8,
    queue: 8,
    queue_ms: 1000,
};

/// If `reason` is given, reports that the test cannot run here, and returns true. Appends the
/// report to the file JIFFY_SKIP_LOG, from which scripts/rust-tests counts skipped tests.
fn skip(test: &str, reason: Option<&str>) -> bool {
    let Some(reason) = reason else { return false };
    eprintln!("skipped: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = OpenOptions::new().append(true).open(log).unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
    true
}

/// Returns whether a program exists and succeeds with these arguments.
fn found(command: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(command);
    let ran = command
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    ran.status().is_ok_and(|status| status.success())
}

fn run(script: &Path) {
    run_with(script, &[]);
}

fn run_with(script: &Path, arguments: &[&Path]) {
    let output = Command::new(script).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "{}: {text}", script.display());
}

/// Reports a test of an example that takes minutes to build, and returns true unless it is
/// requested.
fn is_too_long(test: &str) -> bool {
    let is_requested = std::env::var_os("JIFFY_EXAMPLES").is_some();
    skip(
        test,
        (!is_requested).then_some("the build takes minutes on a busy host: make soak"),
    )
}

/// Tests and builds the example in a temporary directory, and sends `body` to it.
fn ask(tenant: &TestTenant, language: &str, body: &[u8]) -> TestResponse {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/functions");
    let directory = tempfile::tempdir().unwrap();
    let from = examples.join(language).join(".");
    assert!(found(
        "cp",
        &[
            "-r",
            from.to_str().unwrap(),
            directory.path().to_str().unwrap()
        ]
    ));
    if directory.path().join("package.json").exists() {
        let script = examples.join("../../scripts/example-packages");
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("example-packages");
        run_with(&script, &[directory.path(), &cache]);
    }
    run(&directory.path().join("test"));
    run(&directory.path().join("build"));
    let compiled = compile(tenant, &directory.path().join("function.wasm"));
    tenant.load(language, &compiled, LARGE);
    let mut client = tenant.connect();
    let first = client.request("POST", language, "/", body);
    assert_eq!(client.request("POST", language, "/", body).body, first.body);
    first
}

/// Compiles without the time limit of deployments, because test machines are slow. Only one
/// compilation runs at a time.
fn compile(tenant: &TestTenant, module: &Path) -> (PathBuf, String) {
    static COMPILING: Mutex<()> = Mutex::new(());
    let _one = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
    let target = tenant.path();
    let mut compiler = Command::new(tenant.program());
    let ended = compiler
        .args(["compile", "--no-jail", "--owner", OWNER])
        .stdin(File::open(module).unwrap())
        .stdout(File::create(&target).unwrap())
        .status();
    assert!(ended.unwrap().success());
    let digest = blake3::hash(&std::fs::read(&target).unwrap());
    (target, digest.to_hex().to_string())
}

fn tenant() -> TestTenant {
    TestTenant::start()
}

/// Returns a tenant with an optimised program, if the program exists.
fn fast_tenant() -> Option<TestTenant> {
    let directory = PathBuf::from(std::env::var_os("JIFFY_BIN_DIR")?);
    let program = directory.join("jiffy-functions");
    program.exists().then(|| TestTenant::with_program(&program))
}

#[test]
fn the_example_in_c_answers() {
    let is_there = found("clang-16", &["--version"]) && found("wasm-ld-16", &["--version"]);
    let reason = (!is_there).then_some("clang-16 and lld-16 are not installed");
    if skip("the_example_in_c_answers", reason) {
        return;
    }
    let answer = ask(&tenant(), "c", b"123456789");
    // The CRC-32 of the nine digits.
    assert_eq!((answer.status, answer.text()), (200, "cbf43926\n"));
}

#[test]
fn the_example_in_go_answers() {
    let is_there = found("go", &["version"]) && found("npm", &["--version"]);
    let reason = (!is_there).then_some("Go and npm are not installed");
    if skip("the_example_in_go_answers", reason) {
        return;
    }
    let tenant = fast_tenant();
    let reason = tenant.is_none().then_some("no optimised jiffy-functions");
    if skip("the_example_in_go_answers", reason) {
        return;
    }
    // The SHA-256 digest of `abc`.
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n";
    let answer = ask(&tenant.unwrap(), "go", b"abc");
    assert_eq!((answer.status, answer.text()), (200, digest));
}

#[test]
fn the_example_in_rust_answers() {
    let name = "the_example_in_rust_answers";
    let target = ["--print", "target-libdir", "--target", "wasm32-wasip2"];
    let output = Command::new("rustc").args(target).output().unwrap();
    let library = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let is_there = !library.is_empty() && Path::new(&library).exists();
    if skip(
        name,
        (!is_there).then_some("the target wasm32-wasip2 is not installed"),
    ) {
        return;
    }
    let answer = ask(&tenant(), "rust", "one two\nthrée\n".as_bytes());
    let counts = "{\"lines\":2,\"words\":3,\"characters\":14}\n";
    assert_eq!((answer.status, answer.text()), (200, counts));
}

#[test]
fn the_example_in_javascript_answers() {
    let name = "the_example_in_javascript_answers";
    if is_too_long(name) {
        return;
    }
    let is_there = found("npm", &["--version"]);
    if skip(name, (!is_there).then_some("npm is not installed")) {
        return;
    }
    let tenant = fast_tenant();
    let reason = tenant.is_none().then_some("no optimised jiffy-functions");
    if skip(name, reason) {
        return;
    }
    let answer = ask(&tenant.unwrap(), "javascript", br#"{"b":1,"a":[]}"#);
    let text = "{\n  \"a\": [],\n  \"b\": 1\n}\n";
    assert_eq!((answer.status, answer.text()), (200, text));
}

#[test]
fn the_example_in_python_answers() {
    let name = "the_example_in_python_answers";
    if is_too_long(name) {
        return;
    }
    let is_there = found("python3", &["-c", "import ensurepip, venv"]);
    if skip(name, (!is_there).then_some("Python has no venv")) {
        return;
    }
    let tenant = fast_tenant();
    let reason = tenant.is_none().then_some("no optimised jiffy-functions");
    if skip(name, reason) {
        return;
    }
    let answer = ask(&tenant.unwrap(), "python", b"name,note\nAda,\"a, b\"\n");
    let rows = "[{\"name\": \"Ada\", \"note\": \"a, b\"}]\n";
    assert_eq!((answer.status, answer.text()), (200, rows));
}
