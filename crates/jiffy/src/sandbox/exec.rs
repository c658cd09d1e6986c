//! `jiffy exec`: runs a command in a sandbox of a daemon.

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

/// Interval of requests for the state of a sandbox while the reason of a lost connection is
/// determined.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Number of console lines that are shown when a guest terminates.
const CONSOLE_LINES: u16 = 20;

/// Sandbox of a daemon.
pub struct RemoteSandbox {
    client: Client,
    agent: AgentClient,
    sandbox: Sandbox,
    /// True if the sandbox is removed when this process exits.
    leased: bool,
}

impl RemoteSandbox {
    /// Creates the handle of a running sandbox.
    pub fn new(client: Client, sandbox: Sandbox) -> anyhow::Result<Self> {
        Ok(Self {
            agent: client.agent(&sandbox)?,
            client,
            sandbox,
            leased: false,
        })
    }

    /// Creates the handle of a running sandbox that is removed when this process exits.
    pub fn leased(client: Client, sandbox: Sandbox) -> anyhow::Result<Self> {
        Ok(Self {
            leased: true,
            ..Self::new(client, sandbox)?
        })
    }

    /// Returns the handle of sandbox `id`. Resumes a paused sandbox that traffic resumes. Fails
    /// unless the sandbox is running.
    pub async fn find(host: &HostArgs, id: &str) -> anyhow::Result<Self> {
        let client = jiffy_daemon::open_client(&host.server()).await?;
        let mut sandbox = client.sandbox(id).await?;
        let is_paused = matches!(sandbox.record.state, SandboxState::Paused);
        if is_paused && sandbox.record.settings.auto_resume {
            client.resume(&sandbox.record.id).await?;
            sandbox = client.sandbox(&sandbox.record.id).await?;
        }
        let full_id = &sandbox.record.id;
        match &sandbox.record.state {
            SandboxState::Running => Self::new(client, sandbox),
            SandboxState::Paused => {
                anyhow::bail!("sandbox {full_id} is paused: resume it with `jiffy resume {id}`")
            }
            state @ SandboxState::Broken { cause, .. } if state.is_broken_and_resumable() => {
                anyhow::bail!(
                    "sandbox {full_id} is broken ({cause}): restore its latest snapshot with `jiffy resume {id}`"
                )
            }
            SandboxState::Broken { cause, .. } => anyhow::bail!(
                "sandbox {full_id} is broken ({cause}): restore one of its snapshots with `jiffy rollback`, \
                 or its newest stored state, if its host was lost, with `jiffy resume --from stored {id}`"
            ),
            state => anyhow::bail!(
                "sandbox {full_id} is not running: its state is `{}`",
                state.name()
            ),
        }
    }
}

impl RemoteSandbox {
    /// Returns the exit reason with the last lines of the console.
    async fn last_console_lines(&self, cause: &str) -> String {
        let id = &self.sandbox.record.id;
        let console = self
            .client
            .last_lines::<Console>(id, "logs", CONSOLE_LINES)
            .await;
        // Without the console, the cause alone is reported.
        let lines = console.map_or_else(|_| Vec::new(), |console| console.logs);
        // The last line repeats the exit reason.
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

    async fn exit_reason(&self, limit: Duration) -> Option<String> {
        let id = &self.sandbox.record.id;
        let deadline = Instant::now() + limit;
        loop {
            match self.client.sandbox(id).await {
                Ok(sandbox) if sandbox.record.state == SandboxState::Running => {}
                Ok(sandbox) => {
                    return Some(match sandbox.record.state {
                        SandboxState::Broken { cause, .. } => self.last_console_lines(&cause).await,
                        state => format!("sandbox {id} is {}", state.name()),
                    });
                }
                // For example, the record of a killed sandbox was removed.
                Err(e) => return Some(e.to_string()),
            }
            if Instant::now() >= deadline {
                return None;
            }
            tokio::time::sleep(STATE_POLL_INTERVAL).await;
        }
    }
}

/// Runs the command and returns its exit code. Returns an error only if Jiffy itself failed.
pub fn run(args: &SandboxExecArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let env = environment(&args.exec.env)?;
    let runtime = crate::runtime()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let remote = RemoteSandbox::find(&args.host, &args.id).await?;
        session::run(&args.exec, &remote, env, &mut signals).await
    });
    // Dropping the runtime would wait for its blocking tasks, for example for the resolution of a
    // host name. The thread that reads standard input is not such a task, and ends with the
    // process.
    runtime.shutdown_background();
    outcome?.report(args.exec.json, start)
}
