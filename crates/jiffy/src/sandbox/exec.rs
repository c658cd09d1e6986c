//! `jiffy exec`: a command in a sandbox of a daemon's.

use super::forward::{PortOpener, opener};
use super::logs::Console;
use crate::cli::{HostArgs, SandboxExecArgs};
use crate::run::outcome::with_last_lines;
use crate::run::{CommandTarget, Signals, environment, session};
use jiffy_agent_client::AgentClient;
use jiffy_api_types::SandboxState;
use jiffy_client::{Client, Sandbox};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Interval at which the daemon is asked whether a sandbox is gone, while a lost connection is
/// explained.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Lines of a console that are shown with the end of a guest.
const CONSOLE_LINES: u16 = 20;

/// A sandbox of the daemon's.
pub struct RemoteSandbox {
    client: Client,
    agent: AgentClient,
    sandbox: Sandbox,
    leased: bool,
}

impl RemoteSandbox {
    /// One that runs, and stays.
    fn new(client: Client, sandbox: Sandbox) -> anyhow::Result<Self> {
        Ok(Self {
            agent: client.agent(&sandbox)?,
            client,
            sandbox,
            leased: false,
        })
    }

    /// One that runs, and is removed when this program ends.
    pub fn leased(client: Client, sandbox: Sandbox) -> anyhow::Result<Self> {
        Ok(Self {
            leased: true,
            ..Self::new(client, sandbox)?
        })
    }

    /// Sandbox `id`, which must run.
    pub async fn find(host: &HostArgs, id: &str) -> anyhow::Result<Self> {
        let client = jiffy_daemon::open_client(&host.server()).await?;
        let sandbox = client.sandbox(id).await?;
        let whole = &sandbox.record.id;
        match &sandbox.record.state {
            SandboxState::Running => Self::new(client, sandbox),
            SandboxState::Paused => {
                anyhow::bail!("sandbox {whole} is paused: wake it with `jiffy resume {id}`")
            }
            state @ SandboxState::Broken { cause, .. } if state.is_broken_and_resumable() => {
                anyhow::bail!(
                    "sandbox {whole} is broken ({cause}): `jiffy resume {id}` starts it again from its latest snapshot"
                )
            }
            SandboxState::Broken { cause, .. } => anyhow::bail!(
                "sandbox {whole} is broken ({cause}): `jiffy rollback` to one of its snapshots mends it"
            ),
            state => anyhow::bail!("sandbox {whole} is {}", state.name()),
        }
    }
}

impl RemoteSandbox {
    /// The cause of its end, with the last lines of its console.
    async fn last_console_lines(&self, cause: &str) -> String {
        let id = &self.sandbox.record.id;
        let console = self
            .client
            .last_lines::<Console>(id, "logs", CONSOLE_LINES)
            .await;
        let lines = console.map_or_else(|_| Vec::new(), |console| console.logs);
        // The last one tells the cause once more.
        let lines = lines.split_last().map_or(&[][..], |(_, before)| before);
        let text: String = lines.iter().map(|l| format!("{}\n", l.line)).collect();
        with_last_lines(cause, &text)
    }
}

impl CommandTarget for RemoteSandbox {
    fn agent(&self) -> AgentClient {
        self.agent.clone()
    }

    fn ports(&self) -> PortOpener {
        opener(self.client.clone(), self.sandbox.record.id.clone())
    }

    fn memory_mib(&self) -> u32 {
        self.sandbox.record.size.memory_mib
    }

    fn ends_with_client(&self) -> bool {
        self.leased
    }

    async fn end_reason(&self, limit: Duration) -> Option<String> {
        let id = &self.sandbox.record.id;
        let limit = Instant::now() + limit;
        loop {
            match self.client.sandbox(id).await {
                Ok(now) if now.record.state == SandboxState::Running => {}
                Ok(now) => {
                    return Some(match now.record.state {
                        SandboxState::Broken { cause, .. } => self.last_console_lines(&cause).await,
                        state => format!("sandbox {id} is {} now", state.name()),
                    });
                }
                Err(e) => return Some(e.to_string()),
            }
            if Instant::now() >= limit {
                return None;
            }
            tokio::time::sleep(STATE_POLL_INTERVAL).await;
        }
    }
}

/// Runs the command and returns its exit code. Errors are Jiffy's own.
pub fn run(args: &SandboxExecArgs) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let env = environment(&args.exec.env)?;
    let runtime = crate::runtime()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let remote = RemoteSandbox::find(&args.host, &args.id).await?;
        session::run(&args.exec, &remote, env, &mut signals).await
    });
    // A thread may still wait for our standard input: the runtime must not wait for it in turn.
    runtime.shutdown_background();
    outcome?.report(args.exec.json, began)
}
