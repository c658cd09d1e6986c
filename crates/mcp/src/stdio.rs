//! Serves one MCP client over standard input and output.

use crate::images::Templates;
use crate::options::McpOptions;
use crate::server::Server;
use crate::session::Session;
use anyhow::Context;
use jiffy_client::Client;
use rmcp::ServiceExt;
use rmcp::transport::io::stdio_pipes;
use std::sync::Arc;

/// Serves one client over standard input and output until the client closes the input. Removes the
/// sandboxes of the session at the end.
pub async fn serve_stdio(
    client: Client,
    options: McpOptions,
    templates: Arc<dyn Templates>,
) -> anyhow::Result<()> {
    let session = Arc::new(Session::new(client, options, templates)?);
    let server = Server::new(Arc::clone(&session));
    let running = server
        .serve(stdio_pipes())
        .await
        .context("the client sent no valid `initialize` request")?;
    let result = running.waiting().await;
    session.end().await;
    result.context("the server was aborted")?;
    Ok(())
}
