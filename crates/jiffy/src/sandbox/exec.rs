//! `jiffy exec`: a command in a sandbox of the daemon's.

use super::word;
use crate::cli::SandboxExecArgs;
use crate::daemon::Daemon;
use crate::run::{Place, Signals, environment, session};
use hyper::Method;
use jiffy_agent_client::AgentClient;
use jiffy_host::{SandboxRecord, State};
use jiffy_proto::agent::ENVD_PORT;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How often the daemon is asked whether a sandbox is gone, while a lost connection is explained.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// A sandbox of the daemon's.
pub struct Remote {
    daemon: Daemon,
    sandbox: SandboxRecord,
}

impl Remote {
    /// Sandbox `id`, which must run.
    pub async fn find(id: &str) -> anyhow::Result<Self> {
        let path = format!("/sandboxes/{}", word(id)?);
        let daemon = Daemon::find_or_start().await?;
        let sandbox: SandboxRecord = daemon.call(Method::GET, &path, &()).await?;
        match &sandbox.state {
            State::Running => Ok(Self { daemon, sandbox }),
            State::Paused => anyhow::bail!(
                "sandbox {} is paused: wake it with `jiffy resume {id}`",
                sandbox.id
            ),
            State::Broken { cause } => anyhow::bail!(
                "sandbox {} is broken ({cause}): `jiffy rollback` to one of its snapshots mends it",
                sandbox.id
            ),
            state => anyhow::bail!("sandbox {} is {}", sandbox.id, state.name()),
        }
    }
}

impl Place for Remote {
    fn agent(&self) -> AgentClient {
        let (daemon, id) = (self.daemon.clone(), self.sandbox.id.clone());
        AgentClient::new(move || {
            let (daemon, id) = (daemon.clone(), id.clone());
            async move { daemon.connect(&id, ENVD_PORT).await }
        })
    }

    fn memory_mib(&self) -> u32 {
        self.sandbox.size.memory_mib
    }

    async fn gone(&self, patience: Duration) -> Option<String> {
        let id = &self.sandbox.id;
        let limit = Instant::now() + patience;
        loop {
            let path = format!("/sandboxes/{id}");
            match self
                .daemon
                .call::<SandboxRecord>(Method::GET, &path, &())
                .await
            {
                Ok(record) if record.state == State::Running => {}
                Ok(record) => {
                    return Some(match record.state {
                        State::Broken { cause } => cause,
                        state => format!("sandbox {id} is {} now", state.name()),
                    });
                }
                Err(e) => return Some(e.to_string()),
            }
            if Instant::now() >= limit {
                return None;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }
}

/// Runs the command and returns its exit code. Errors are Jiffy's own.
pub fn run(args: &SandboxExecArgs) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let env = environment(&args.exec.env)?;
    let runtime = crate::runtime()?;
    let outcome = runtime.block_on(async {
        let signals = Signals::new()?;
        let remote = Remote::find(&args.id).await?;
        session::run(&args.exec, &remote, env, signals).await
    });
    // A thread may still wait for our standard input: the runtime must not wait for it in turn.
    runtime.shutdown_background();
    outcome?.report(args.exec.json, began)
}
