//! Rehearsals: a guest runs a command before its first real command, so that the pages which both
//! touch are already in memory.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. A *warm pool* contains guests that were started in advance.
//!
//! Until its first command ends, a guest touches some hundred pages of its kernel, its agent and
//! the C library, each with an exit to the host. There are three rehearsals:
//! - A template's guest rehearses before its snapshot is taken. Programs and libraries are then in
//!   the page cache of all guests restored from the snapshot.
//! - The guest that records a template's working set also performs the template's first use.
//! - A guest in the warm pool rehearses once more, under a temporary identity. The pages that it
//!   writes are then already private when the sandbox is handed out.

use crate::vm_agent::agent;
use jiffy_agent_client::{ClientError, ProcessSpec};
use jiffy_engine_api::{FirstUse, FirstUseAction, SandboxIdentity};
use jiffy_microvm_engine::MicroVm;
use jiffy_proto::agent::{SiteSettings, TCP_OK, TCP_PORT};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Timeout of all commands of a rehearsal together.
const REHEARSAL_LIMIT: Duration = Duration::from_secs(10);
/// Timeout of a template's first use.
const FIRST_USE_LIMIT: Duration = Duration::from_secs(30);
/// Maximum number of bytes that are read of the answer to a first use.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// Id and host name of a guest during a rehearsal. Ids of sandboxes are longer, so no sandbox has
/// this id.
const REHEARSAL_ID: &str = "waiting";
/// Commands with which most first uses start. They change no state and read no files of users.
const COMMANDS: [(&str, &[&str]); 2] = [("true", &[]), ("/bin/bash", &["-c", "true"])];

/// Returns the identity of a guest during a rehearsal.
pub fn sandbox_identity(site: &SiteSettings) -> SandboxIdentity {
    SandboxIdentity {
        id: REHEARSAL_ID.to_owned(),
        site: site.clone(),
        ..SandboxIdentity::default()
    }
}

/// Runs the commands. A command that does not exist in the template is skipped. After the timeout,
/// the remaining commands are skipped. The only consequence is a slower first real command.
pub async fn rehearse(vm: &MicroVm) {
    let run = async {
        for (program, arguments) in COMMANDS {
            if let Err(e) = run_command(vm, program, arguments).await {
                tracing::debug!(program, error = %e, "cannot rehearse a command");
            }
        }
    };
    if tokio::time::timeout(REHEARSAL_LIMIT, run).await.is_err() {
        tracing::debug!("rehearsal timed out");
    }
}

/// Requests the guest to report all free memory to the VMM before its snapshot is taken. Otherwise
/// every sandbox restored from the snapshot reports the same memory some seconds later, possibly
/// during a create. Each such report costs 1,400 exits and makes 5 MiB private to the sandbox.
pub async fn report_free_memory(vm: &MicroVm) {
    let agent = agent(vm);
    let reported = tokio::time::timeout(REHEARSAL_LIMIT, agent.report_free_memory()).await;
    if !matches!(reported, Ok(Ok(()))) {
        tracing::warn!("cannot report the free memory of a template: its sandboxes start slower");
    }
}

async fn run_command(vm: &MicroVm, program: &str, arguments: &[&str]) -> Result<(), ClientError> {
    let spec = ProcessSpec::new(program, arguments.iter().copied());
    let process = agent(vm).start(&spec).await?;
    // The exit status does not matter. With the limit of 0 bytes, any output is an error.
    process.output(0).await.map(drop)
}

/// Performs the first use of a template. Returns a message if it fails.
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
    done.unwrap_or_else(|_| Err("timed out".to_owned()))
}

/// Posts JSON to a port of the guest and reads the whole answer. The status must be 2xx.
async fn post(vm: &MicroVm, port: u16, path: &str, body: &str) -> Result<(), String> {
    let connecting = vm.connector().connect(TCP_PORT).await;
    let mut stream = connecting.map_err(|e| e.to_string())?;
    let length = body.len();
    // The agent expects the number of the guest's TCP port in a line before the data.
    let request = format!(
        "{port}\nPOST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    let sent = stream.write_all(request.as_bytes()).await;
    sent.map_err(|e| e.to_string())?;
    let mut answer = Vec::new();
    // The server of a template may send an endless answer.
    let mut stream = stream.take(MAX_ANSWER_BYTES);
    let read = stream.read_to_end(&mut answer).await;
    read.map_err(|e| e.to_string())?;
    let answer = String::from_utf8_lossy(&answer);
    // `HTTP/1.1 200`: the status follows the version and a space.
    let status = answer.strip_prefix(TCP_OK).and_then(|http| http.get(9..12));
    match status {
        Some(status) if status.starts_with('2') => Ok(()),
        _ => Err(format!(
            "port {port} answered: {}",
            // The first line is the agent's, the second the status line of the server.
            answer.lines().nth(1).unwrap_or_default()
        )),
    }
}
