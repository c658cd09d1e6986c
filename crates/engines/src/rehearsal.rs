//! Rehearsals: a guest runs a command before its first real one, which then finds in memory what
//! both touch.
//!
//! On the way to its first command a guest touches some hundred pages, each with an exit to the
//! host: of its kernel, its agent, the C library. A template's guest rehearses before its snapshot
//! is taken, so that programs and libraries are in the page cache of all that are restored from it.
//! The guest by which a template's working set is recorded does what the template calls its first
//! use, too. A guest that waits in the warm pool rehearses once more, under an identity that it
//! does not keep: what it writes to is its own memory when it is handed out.

use crate::vm_agent::agent;
use jiffy_agent_client::{ClientError, ProcessSpec};
use jiffy_engine_api::{FirstUse, FirstUseAction, SandboxIdentity};
use jiffy_microvm_engine::MicroVm;
use jiffy_proto::agent::{SiteSettings, TCP_OK, TCP_PORT};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Time that the commands of a rehearsal have together.
const REHEARSAL_LIMIT: Duration = Duration::from_secs(10);
/// Time that a template's first use has.
const FIRST_USE_LIMIT: Duration = Duration::from_secs(30);
/// Most bytes that are read of the answer to it.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// Id of a guest while it rehearses, which is its host name, too. No sandbox has it: theirs are
/// longer.
const REHEARSAL_ID: &str = "waiting";
/// Commands that most first uses begin with, none of which leaves a trace or reads a user's files.
const COMMANDS: [(&str, &[&str]); 2] = [("true", &[]), ("/bin/bash", &["-c", "true"])];

/// Identity of a guest while it rehearses.
pub fn sandbox_identity(site: &SiteSettings) -> SandboxIdentity {
    SandboxIdentity {
        id: REHEARSAL_ID.to_owned(),
        site: site.clone(),
        ..SandboxIdentity::default()
    }
}

/// Runs the commands. One that a template does not have, or that takes too long, is left out: that
/// costs the first real one time, and nothing else.
pub async fn rehearse(vm: &MicroVm) {
    let run = async {
        for (program, arguments) in COMMANDS {
            if let Err(e) = run_command(vm, program, arguments).await {
                tracing::debug!(program, "not rehearsed: {e}");
            }
        }
    };
    if tokio::time::timeout(REHEARSAL_LIMIT, run).await.is_err() {
        tracing::debug!("a rehearsal took too long");
    }
}

/// Has the guest tell the VMM of all free memory before its snapshot is taken. Left to itself it
/// does so some seconds after its boot, in each sandbox restored from the snapshot: 1,400 exits and
/// 5 MiB each that they do not share any more, in the midst of a create if the moment is bad.
pub async fn report_free_memory(vm: &MicroVm) {
    let agent = agent(vm);
    let reported = tokio::time::timeout(REHEARSAL_LIMIT, agent.report_free_memory()).await;
    if !matches!(reported, Ok(Ok(()))) {
        tracing::warn!("a template's free memory is not reported: its sandboxes start slower");
    }
}

async fn run_command(vm: &MicroVm, program: &str, arguments: &[&str]) -> Result<(), ClientError> {
    let spec = ProcessSpec::new(program, arguments.iter().copied());
    let process = agent(vm).start(&spec).await?;
    process.output(0).await.map(drop)
}

/// Does what sandboxes of a template do first; returns a message if that fails.
pub async fn use_first(vm: &MicroVm, first_use: &FirstUse) -> Result<(), String> {
    let run = async {
        match first_use.action()? {
            FirstUseAction::Request { port, path, body } => post(vm, port, path, body).await,
            FirstUseAction::Command(command) => run_command(vm, "/bin/sh", &["-c", command])
                .await
                .map_err(|e| e.to_string()),
        }
    };
    let done = tokio::time::timeout(FIRST_USE_LIMIT, run).await;
    done.unwrap_or_else(|_| Err("it took too long".to_owned()))
}

/// Posts JSON to a port of the guest and reads the whole answer, which must be of status 2xx.
async fn post(vm: &MicroVm, port: u16, path: &str, body: &str) -> Result<(), String> {
    let connecting = vm.connector().connect(TCP_PORT).await;
    let mut stream = connecting.map_err(|e| e.to_string())?;
    let length = body.len();
    let request = format!(
        "{port}\nPOST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    let sent = stream.write_all(request.as_bytes()).await;
    sent.map_err(|e| e.to_string())?;
    let mut answer = Vec::new();
    let mut stream = stream.take(MAX_ANSWER_BYTES);
    let read = stream.read_to_end(&mut answer).await;
    read.map_err(|e| e.to_string())?;
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.strip_prefix(TCP_OK).and_then(|http| http.get(9..12));
    match status {
        Some(status) if status.starts_with('2') => Ok(()),
        _ => Err(format!(
            "port {port} answered: {}",
            answer.lines().nth(1).unwrap_or_default()
        )),
    }
}
