//! The tool that creates links to ports of a sandbox.

use crate::catalog::{Effect, Reply, ToolEntry};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::session::Session;
use hyper::Method;
use jiffy_api_types::Preview;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Default validity of a link in seconds.
const DEFAULT_TTL_S: u32 = 3600;

/// Returns the tool.
pub fn tools() -> Vec<ToolEntry> {
    vec![ToolEntry::new(
        "preview_link",
        ToolGroup::Network,
        Effect::Additive,
        "Create a link to a server in a sandbox. The link needs no key: everyone who has it can use \
         the server until the link expires.",
        link,
    )]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct LinkArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Port of the server in the sandbox.
    #[schemars(range(min = 1))]
    port: u16,
    /// Validity of the link in seconds. Defaults to 3600.
    #[schemars(range(min = 1))]
    ttl_s: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
struct LinkOutput {
    /// Address.
    url: String,
    /// End of the validity.
    expires_at: String,
}

/// Returns a signed link to a port.
async fn link(session: Arc<Session>, arguments: LinkArguments) -> ToolResult<Reply<LinkOutput>> {
    let id = &arguments.sandbox;
    let failed = |e| ToolError::of_sandbox(id, &e);
    let record = session.client.sandbox(id).await.map_err(failed)?.record;
    let (port, ttl) = (arguments.port, arguments.ttl_s.unwrap_or(DEFAULT_TTL_S));
    let path = format!("/sandboxes/{}/preview?port={port}&ttl={ttl}", record.id);
    let preview: Preview = session
        .client
        .call(Method::GET, &path, &())
        .await
        .map_err(failed)?;
    let output = LinkOutput {
        url: preview.url,
        expires_at: preview.expires_at.to_string(),
    };
    Ok(output.into())
}
