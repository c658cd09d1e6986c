//! `jiffy mcp`: serves sandboxes as tools of a coding agent.

use crate::cli::{EngineArgs, McpArgs, McpCommand, McpInstallArgs};
use crate::run::prepare;
use anyhow::Context;
use jiffy_client::is_remote;
use jiffy_engines::Host;
use jiffy_mcp::{ConfigurationChange, PrepareFuture, Templates};
use std::process::ExitCode;
use std::sync::Arc;

/// Preparation of templates for the sandboxes of an agent.
struct LocalTemplates {
    /// True if the daemon is on another host, which has its own templates.
    is_remote: bool,
}

impl Templates for LocalTemplates {
    fn prepare(&self, template: String) -> PrepareFuture {
        let is_remote = self.is_remote;
        Box::pin(async move {
            if is_remote {
                return Ok(template);
            }
            // A build takes minutes and blocks.
            let build = move || {
                prepare(&Host::open()?, EngineArgs::default(), &template)?;
                Ok(template)
            };
            tokio::task::spawn_blocking(build).await?
        })
    }
}

/// Adds the server to the configuration file of a client, or removes it.
fn install(args: &McpInstallArgs) -> anyhow::Result<ExitCode> {
    // Clients may have another PATH than this process.
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let program = program
        .to_str()
        .context("the path of this program is not UTF-8")?;
    let mut command = vec![program.to_owned(), "mcp".to_owned()];
    command.extend(args.options.iter().cloned());
    let command = (!args.remove).then_some(&command[..]);
    let change = ConfigurationChange::new(args.client.into(), command)?;
    let path = change.path.display();
    if change.is_empty() {
        outln!("{path} needs no change");
        return Ok(ExitCode::SUCCESS);
    }
    out!("{path}:\n{}", change.lines());
    if !args.dry_run {
        change.apply()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves one client over standard input and output, or runs a subcommand.
pub fn run(args: &McpArgs) -> anyhow::Result<ExitCode> {
    if let Some(McpCommand::Install(args)) = &args.command {
        return install(args);
    }
    let server = args.host.server();
    let is_remote = is_remote(&server)?;
    let runtime = crate::runtime()?;
    let result = runtime.block_on(async {
        let client = jiffy_daemon::open_client(&server).await?;
        let mut options = args.options();
        if let Some(id) = &options.sandbox {
            // An unknown sandbox is reported before the first call.
            options.sandbox = Some(client.sandbox(id).await?.record.id);
        }
        let templates = Arc::new(LocalTemplates { is_remote });
        jiffy_mcp::serve_stdio(client, options, templates).await
    });
    // A thread may be blocked in reading standard input: the shutdown must not wait for it.
    runtime.shutdown_background();
    result?;
    Ok(ExitCode::SUCCESS)
}
