//! Servers of the option `mcp` of E2B's SDKs.

use crate::error::ApiError;
use jiffy_image::Reference;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Stock template with the gateway that runs the servers.
const TEMPLATE: &str = "mcp-gateway";
/// Servers that the gateway runs, by name.
const SERVERS: &str = include_str!("../../../templates/mcp-gateway/servers.json");
/// Start of the names of servers in repositories, which the gateway clones.
const REPOSITORIES: &str = "github/";
/// Maximum length of a server's name in a message, in characters.
const MAX_SHOWN: usize = 64;

/// Rejects servers that the gateway of the stock template cannot run. Otherwise only the command
/// that the SDK runs after the create would fail. Other templates may contain other gateways, so
/// their servers are not checked.
pub(crate) fn check(servers: Option<&Map<String, Value>>, template: &str) -> Result<(), ApiError> {
    let Some(servers) = servers else {
        return Ok(());
    };
    let template = Reference::parse(template);
    if !template.is_ok_and(|template| template.is_stock() && template.name() == TEMPLATE) {
        return Ok(());
    }
    let known: BTreeMap<String, Value> = serde_json::from_str(SERVERS).unwrap_or_default();
    let mut names = servers.keys();
    let unknown = names.find(|name| !known.contains_key(*name) && !name.starts_with(REPOSITORIES));
    let Some(unknown) = unknown else {
        return Ok(());
    };
    let shown: String = unknown.chars().take(MAX_SHOWN).collect();
    let known: Vec<String> = known.into_keys().collect();
    Err(ApiError::unsupported_option(format!(
        "`mcp`: the server `{shown}` is unknown: servers of the MCP catalogue that are container \
         images are not supported; use {}, or github/OWNER/REPOSITORY with `runCmd`",
        known.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn servers_that_the_gateway_cannot_run_are_rejected_for_the_stock_template_only() {
        let check = |servers: Value, template: &str| {
            let servers = servers.as_object().cloned();
            check(servers.as_ref(), template).map_err(|e| format!("{e:?}"))
        };
        let known: Value = serde_json::from_str(SERVERS).unwrap();
        assert!(known["filesystem"]["npx"].is_string());
        assert_eq!(check(known, "mcp-gateway"), Ok(()));
        assert_eq!(
            check(json!({ "github/owner/name": {} }), "mcp-gateway"),
            Ok(())
        );
        assert_eq!(check(Value::Null, "mcp-gateway"), Ok(()));
        let image = json!({ "time": {}, "dockerhub": { "username": "x" } });
        let message = check(image.clone(), "mcp-gateway").unwrap_err();
        for part in [
            "`dockerhub` is unknown",
            "container images",
            "sequentialthinking",
        ] {
            assert!(message.contains(part), "{message}");
        }
        for other in ["base", "key-1234/mcp-gateway", "mcp-gateway:mine"] {
            assert_eq!(check(image.clone(), other), Ok(()), "{other}");
        }
    }
}
