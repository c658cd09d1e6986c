//! Compilation of modules, by a process of its own each.

use crate::deploy_step::{DeployStep, reached};
use crate::tenant_process::ProcessError;
use jiffy_proto::function::CompileLimits;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Interval at which the end of a compiler is looked for.
const COMPILE_POLL: Duration = Duration::from_millis(5);
/// Longest message of a compiler that is passed on, in bytes.
const MAX_MESSAGE_BYTES: usize = 4 << 10;

/// Settings of a compilation.
#[derive(Debug, Clone, Copy)]
pub struct CompilerSettings<'a> {
    /// Program `jiffy-functions`.
    pub program: &'a Path,
    /// Owner of the module.
    pub owner: &'a str,
    /// Limits; without a jail, of its time only.
    pub limits: CompileLimits,
    /// False for tests of hosts that allow no namespaces.
    pub jailed: bool,
}

/// Compiles the module in `source` to `target` by a process of its own, and returns the digest of
/// the compiled file in hexadecimal digits.
pub fn compile(
    settings: &CompilerSettings<'_>,
    source: File,
    target: &Path,
) -> Result<String, ProcessError> {
    let file = File::options().write(true).create_new(true).open(target)?;
    let messages = tempfile::tempfile()?;
    let limits = &settings.limits;
    let mut command = Command::new(settings.program);
    command
        .env_clear()
        .args(["compile", "--owner", settings.owner])
        .args(["--cpu-s", &limits.cpu_s.to_string()])
        .args(["--memory-bytes", &limits.memory_bytes.to_string()]);
    if !settings.jailed {
        command.arg("--no-jail");
    }
    command
        .stdin(source)
        .stdout(file)
        .stderr(messages.try_clone()?);
    let mut child = command.spawn()?;
    reached(DeployStep::Compile);
    let deadline = Instant::now() + limits.time;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Err(ProcessError::Compile(
                "the module takes too long to compile".to_owned(),
            ));
        }
        std::thread::sleep(COMPILE_POLL);
    };
    if !status.success() {
        return Err(ProcessError::Compile(message(messages, status)));
    }
    let digest = blake3::Hasher::new()
        .update_reader(File::open(target)?)?
        .finalize();
    Ok(digest.to_hex().to_string())
}

fn message(mut file: File, status: std::process::ExitStatus) -> String {
    use std::io::{Read, Seek};
    let mut text = Vec::new();
    let read = file.rewind().and_then(|()| {
        let limit = u64::try_from(MAX_MESSAGE_BYTES).unwrap_or(u64::MAX);
        file.take(limit).read_to_end(&mut text)
    });
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    match (read, text.is_empty(), status.code()) {
        (Ok(_), false, Some(_)) => text,
        _ => format!("the compiler ran out of memory or time ({status})"),
    }
}
