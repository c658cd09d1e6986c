//! Rehearsals: a guest runs a command before its first real one, which then finds in memory what
//! both touch.
//!
//! On the way to its first command a guest touches some hundred pages, each with an exit to the
//! host: of its kernel, its agent, the C library. A template's guest rehearses before its snapshot
//! is taken, so that programs and libraries are in the page cache of all that are restored from it.
//! A guest that waits in the warm pool rehearses once more, under an identity that it does not
//! keep: what it writes to is its own memory when it is handed out.

use crate::vm_agent::agent;
use jiffy_agent_client::{ClientError, ProcessSpec};
use jiffy_engine::SandboxIdentity;
use jiffy_microvm::MicroVm;
use jiffy_proto::agent::SiteSettings;
use std::time::Duration;

/// Time that the commands of a rehearsal have together.
const REHEARSAL_LIMIT: Duration = Duration::from_secs(10);
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

async fn run_command(vm: &MicroVm, program: &str, arguments: &[&str]) -> Result<(), ClientError> {
    let spec = ProcessSpec::new(program, arguments.iter().copied());
    let process = agent(vm).start(&spec).await?;
    process.output(0).await.map(drop)
}
