//! `jiffy mcp`: serves sandboxes as tools of a coding agent.

use crate::cli::{EngineArgs, McpArgs};
use crate::run::prepare;
use crate::sandbox::template_of_image;
use jiffy_client::{Client, is_remote};
use jiffy_engines::Host;
use jiffy_mcp::{ImportFuture, Templates};
use std::process::ExitCode;
use std::sync::Arc;

/// Preparation of templates for the sandboxes of an agent.
struct LocalTemplates {
    /// True if the daemon is on another host, which has its own templates.
    is_remote: bool,
}

impl Templates for LocalTemplates {
    fn import_image(&self, client: Client, image: String) -> ImportFuture {
        Box::pin(async move { template_of_image(&client, &image, true).await })
    }

    fn prepare(&self, template: String) -> ImportFuture {
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

/// Serves one client over standard input and output.
pub fn run(args: &McpArgs) -> anyhow::Result<ExitCode> {
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
