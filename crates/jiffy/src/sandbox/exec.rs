//! `jiffy exec`: a command in a sandbox of a daemon's.

use crate::cli::{HostArgs, SandboxExecArgs};
use crate::client::{Client, Sandbox};
use crate::run::{Place, Signals, environment, session};
use jiffy_agent_client::AgentClient;
use jiffy_host::State;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How often the daemon is asked whether a sandbox is gone, while a lost connection is explained.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// A sandbox of the daemon's.
pub struct Remote {
    client: Client,
    agent: AgentClient,
    sandbox: Sandbox,
}

impl Remote {
    /// Sandbox `id`, which must run.
    pub async fn find(host: &HostArgs, id: &str) -> anyhow::Result<Self> {
        let client = Client::open(host).await?;
        let sandbox = client.sandbox(id).await?;
        let whole = &sandbox.record.id;
        match &sandbox.record.state {
            State::Running => Ok(Self {
                agent: client.agent(&sandbox)?,
                client,
                sandbox,
            }),
            State::Paused => {
                anyhow::bail!("sandbox {whole} is paused: wake it with `jiffy resume {id}`")
            }
            State::Broken { cause } => anyhow::bail!(
                "sandbox {whole} is broken ({cause}): `jiffy rollback` to one of its snapshots mends it"
            ),
            state => anyhow::bail!("sandbox {whole} is {}", state.name()),
        }
    }
}

impl Place for Remote {
    fn agent(&self) -> AgentClient {
        self.agent.clone()
    }

    fn memory_mib(&self) -> u32 {
        self.sandbox.record.size.memory_mib
    }

    async fn gone(&self, patience: Duration) -> Option<String> {
        let id = &self.sandbox.record.id;
        let limit = Instant::now() + patience;
        loop {
            match self.client.sandbox(id).await {
                Ok(now) if now.record.state == State::Running => {}
                Ok(now) => {
                    return Some(match now.record.state {
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
        let remote = Remote::find(&args.host, &args.id).await?;
        session::run(&args.exec, &remote, env, signals).await
    });
    // A thread may still wait for our standard input: the runtime must not wait for it in turn.
    runtime.shutdown_background();
    outcome?.report(args.exec.json, began)
}
