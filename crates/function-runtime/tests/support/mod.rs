//! Fixture of most tests of this crate: [`TestTenant`], a tenant's process with functions, and
//! [`TestClient`], a client of its socket. A *tenant* is an owner of functions, all of which run in
//! one process.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use jiffy_function_manager::DeployQuota;
use jiffy_function_manager::compile_slots::CompileSlots;
use jiffy_function_manager::compiler::{self, CompilerSettings};
use jiffy_function_manager::tenant_process::{
    HTTP_SOCKET, ProcessError, ProcessSettings, TenantProcess,
};
// build.rs passes a linker argument that makes every test reference the interposed `ioctl`.
use jiffy_function_runtime as _;
use jiffy_proto::function::{
    CompileLimits, ControlRequest, ControlResponse, FunctionLimits, LogEntry, MetricsSnapshot,
    TenantLimits,
};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use wasm_encoder::{CodeSection, Function, FunctionSection, Module, TypeSection, ValType};

/// Timeout for an expected state.
const WAIT: Duration = Duration::from_secs(20);
/// Timeout of reads by the client.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Tenant of the process.
pub const OWNER: &str = "tenant-1";

/// Returns the path of the program of tenants' processes.
pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_jiffy-functions"))
}

/// Returns the settings of a process with these limits.
pub fn settings(limits: TenantLimits) -> ProcessSettings<'static> {
    ProcessSettings {
        program: program(),
        owner: OWNER,
        limits,
        // Without root, the process applies the restrictions that need no namespaces.
        jailed: true,
        grace: Duration::from_secs(5),
    }
}

/// Process of a tenant, and the files of its compiled functions.
pub struct TestTenant {
    pub process: TenantProcess,
    pub directory: tempfile::TempDir,
    files: AtomicU32,
    program: PathBuf,
}

impl TestTenant {
    /// Starts a process with the default limits.
    pub fn start() -> Self {
        Self::with_limits(&TenantLimits::default())
    }

    pub fn with_limits(limits: &TenantLimits) -> Self {
        Self::with(&settings(*limits))
    }

    /// Starts a process with another build of the program.
    pub fn with_program(program: &Path) -> Self {
        Self::with(&ProcessSettings {
            program,
            ..settings(TenantLimits::default())
        })
    }

    fn with(settings: &ProcessSettings<'_>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let process = TenantProcess::start(settings, directory.path()).unwrap();
        Self {
            process,
            directory,
            files: AtomicU32::new(0),
            program: settings.program.to_owned(),
        }
    }

    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the path of a new file in the directory of the tenant.
    pub fn path(&self) -> PathBuf {
        let number = self.files.fetch_add(1, Ordering::Relaxed);
        self.directory.path().join(number.to_string())
    }

    /// Compiles a module in text or binary form. Returns the compiled file and its digest.
    pub fn compile(&self, module: &[u8]) -> Result<(PathBuf, String), ProcessError> {
        self.compile_for(module, OWNER)
    }

    /// Compiles a module for the tenant `owner`.
    pub fn compile_for(
        &self,
        module: &[u8],
        owner: &str,
    ) -> Result<(PathBuf, String), ProcessError> {
        self.compile_within(module, owner, CompileLimits::default())
    }

    /// Compiles a module in binary or text form. Returns the compiled file and its digest.
    pub fn compile_within(
        &self,
        module: &[u8],
        owner: &str,
        limits: CompileLimits,
    ) -> Result<(PathBuf, String), ProcessError> {
        let source = self.path();
        let binary = wat::parse_bytes(module).map_or(module.to_vec(), |binary| binary.into_owned());
        std::fs::write(&source, binary).unwrap();
        let target = self.path();
        let file = File::open(&source).unwrap();
        let settings = CompilerSettings {
            program: &self.program,
            owner,
            limits,
            jailed: true,
        };
        let digest = compiler::compile(
            &settings,
            file,
            &target,
            &DeployQuota::default(),
            &CompileSlots::new(1),
        )?;
        Ok((target, digest))
    }

    /// Loads a compiled module as the function `name`.
    pub fn load(&self, name: &str, compiled: &(PathBuf, String), limits: FunctionLimits) {
        let file = File::open(&compiled.0).unwrap();
        self.process.load(name, &file, &compiled.1, limits).unwrap();
    }

    /// Compiles and loads a module as the function `name`.
    pub fn deploy(&self, name: &str, module: &[u8], limits: FunctionLimits) {
        self.load(name, &self.compile(module).unwrap(), limits);
    }

    pub fn metrics(&self, function: &str) -> MetricsSnapshot {
        let function = function.to_owned();
        match self.process.execute(&ControlRequest::Metrics { function }) {
            Ok(ControlResponse::Metrics { metrics }) => metrics,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the metrics of a function satisfy a condition.
    pub fn wait_for(&self, function: &str, reached: impl Fn(&MetricsSnapshot) -> bool) {
        let start = Instant::now();
        loop {
            let metrics = self.metrics(function);
            if reached(&metrics) {
                return;
            }
            assert!(start.elapsed() < WAIT, "{metrics:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the entries of a function's log from `sequence` on.
    pub fn logs(&self, function: &str, mut sequence: u64) -> Vec<LogEntry> {
        let mut all = Vec::new();
        loop {
            let order = ControlRequest::Logs {
                function: function.to_owned(),
                sequence,
            };
            // An answer is one packet, which holds a limited number of entries.
            match self.process.execute(&order) {
                Ok(ControlResponse::Logs { entries }) if entries.is_empty() => return all,
                Ok(ControlResponse::Logs { entries }) => all.extend(entries),
                other => panic!("{other:?}"),
            }
            sequence = all.last().map_or(0, |entry| entry.sequence + 1);
        }
    }

    pub fn connect(&self) -> TestClient {
        TestClient::connect(&self.directory.path().join(HTTP_SOCKET))
    }
}

/// Connection to the process of a tenant.
pub struct TestClient(BufReader<UnixStream>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestResponse {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl TestResponse {
    /// Returns the status and the error code of an error response.
    pub fn fault(&self) -> (u16, String) {
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap_or_default();
        assert_eq!(body["code"], self.status, "{self:?}");
        (self.status, body["error_code"].as_str().unwrap().to_owned())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

impl TestClient {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(READ_TIMEOUT)).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    /// Shuts down the sending direction, so that the client can still read.
    pub fn end_sending(&mut self) {
        self.0.get_mut().shutdown(Shutdown::Write).unwrap();
    }

    /// Reads some bytes.
    pub fn read_some(&mut self) -> usize {
        let length = self.0.fill_buf().unwrap().len();
        self.0.consume(length);
        length
    }

    /// Sends as many bytes as the server accepts.
    pub fn try_send(&mut self, bytes: &[u8]) {
        let _ = self.0.get_mut().write_all(bytes);
    }

    pub fn get(&mut self, function: &str, path: &str) -> TestResponse {
        self.request("GET", function, path, b"")
    }

    pub fn request(
        &mut self,
        method: &str,
        function: &str,
        path: &str,
        body: &[u8],
    ) -> TestResponse {
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: f\r\njiffy-function: {function}\r\n\
             content-length: {length}\r\n\r\n"
        );
        self.send(&[head.as_bytes(), body].concat());
        self.response().unwrap()
    }

    /// Reads a response without a body, and returns its status.
    pub fn status(&mut self) -> u16 {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(self.0.read_line(&mut head).unwrap() > 0, "{head}");
        }
        head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Reads a response. `None` if the connection ends early.
    pub fn response(&mut self) -> Option<TestResponse> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.0.read_line(&mut head).unwrap_or(0) == 0 {
                return None;
            }
        }
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let header = |name: &str| {
            let mut lines = head.lines().filter_map(|line| line.split_once(": "));
            lines
                .find(|(n, _)| *n == name)
                .map(|(_, value)| value.to_owned())
        };
        let mut body = Vec::new();
        if header("transfer-encoding").as_deref() == Some("chunked") {
            loop {
                let mut line = String::new();
                self.0.read_line(&mut line).ok()?;
                let length = usize::from_str_radix(line.trim(), 16).ok()?;
                let mut chunk = vec![0; length + 2];
                self.0.read_exact(&mut chunk).ok()?;
                if length == 0 {
                    break;
                }
                body.extend_from_slice(&chunk[..length]);
            }
        } else if let Some(length) = header("content-length") {
            body = vec![0; length.parse().unwrap()];
            self.0.read_exact(&mut body).ok()?;
        }
        Some(TestResponse { status, head, body })
    }
}

/// Modules and components of tests. Their comments describe how they react to a request.
pub const PROBE: &[u8] = include_bytes!("../guests/probe.wat");
pub const HTTP: &[u8] = include_bytes!("../guests/http.wat");
pub const TRACES: &[u8] = include_bytes!("../guests/traces.wat");

/// Returns a module of jiffy-core/1 that answers every request with `text`.
pub fn constant(text: &str) -> Vec<u8> {
    let message = format!("200\\n\\n{text}");
    let length = text.len() + 5;
    format!(
        r#"(module (memory (export "memory") 1) (data (i32.const 0) "{message}")
            (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
            (func (export "jiffy_handle") (param i32 i32) (result i32) (i32.const {length}))
            (func (export "jiffy_out") (result i32) (i32.const 0)))"#
    )
    .into_bytes()
}

/// Returns a module with `count` identical functions.
pub fn repeated(count: u32, function: &Function) -> Vec<u8> {
    let mut types = TypeSection::new();
    types.ty().function([], []);
    let (mut functions, mut code) = (FunctionSection::new(), CodeSection::new());
    for _ in 0..count {
        functions.function(0);
        code.function(function);
    }
    let mut module = Module::new();
    module.section(&types).section(&functions).section(&code);
    module.finish()
}

/// Returns a module of 100,000 functions, whose compilation takes tens of seconds.
pub fn many_functions() -> Vec<u8> {
    let mut function = Function::new([(1, ValType::I64)]);
    for number in 0..20 {
        let mut code = function.instructions();
        code.local_get(0).i64_const(number).i64_mul().local_set(0);
    }
    function.instructions().end();
    repeated(100_000, &function)
}

/// Notifies the threads of a scope that the test has ended, also after a failure, because the scope
/// waits for its threads.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
