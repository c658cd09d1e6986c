//! Resources: templates, and console, connections and files of sandboxes.
//!
//! | URI | Content |
//! |---|---|
//! | `jiffy://templates` | templates, as JSON |
//! | `jiffy://sandbox/ID/console` | last lines of the console |
//! | `jiffy://sandbox/ID/connections` | last connections, as JSON |
//! | `jiffy://sandbox/ID/files/PATH` | file with the absolute path `/PATH` |

use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::output::cut_text;
use crate::session::Session;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Method;
use jiffy_api_types::{Logs, SandboxState, Template};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use rmcp::model::{Resource, ResourceContents, ResourceTemplate};
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hash, Hasher};

const SCHEME: &str = "jiffy://";
/// Maximum number of sandboxes in the list of resources.
const MAX_LISTED: usize = 100;
/// Maximum number of templates.
const MAX_TEMPLATES: usize = 1000;
/// Number of lines of a console, and of connections.
const LINES: u16 = 1000;
/// Maximum size of a text in bytes.
const MAX_TEXT_BYTES: usize = 256 << 10;
/// Maximum size of a file in bytes.
const MAX_FILE_BYTES: usize = 1 << 20;
/// Characters of a path that a URI cannot contain.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'`')
    .add(b'{')
    .add(b'}');

/// Identity of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ResourceId {
    /// Templates of the host.
    Templates,
    /// Console of a sandbox.
    Console(String),
    /// Connections of a sandbox.
    Connections(String),
    /// File of a sandbox, with its absolute path.
    File(String, String),
}

impl ResourceId {
    /// Parses a URI.
    pub fn parse(uri: &str) -> ToolResult<Self> {
        let unknown = || {
            ToolError::new(format!(
                "unknown resource `{}`: use jiffy://templates, or jiffy://sandbox/ID/ with console, \
                 connections or files/PATH",
                cut_text(uri, 256)
            ))
        };
        let rest = uri.strip_prefix(SCHEME).ok_or_else(unknown)?;
        if rest == "templates" {
            return Ok(Self::Templates);
        }
        let rest = rest.strip_prefix("sandbox/").ok_or_else(unknown)?;
        let (sandbox, rest) = rest.split_once('/').ok_or_else(unknown)?;
        let sandbox = sandbox.to_owned();
        match rest.split_once('/') {
            None if rest == "console" => Ok(Self::Console(sandbox)),
            None if rest == "connections" => Ok(Self::Connections(sandbox)),
            Some(("files", path)) if !path.is_empty() => {
                let path = percent_decode_str(path).decode_utf8();
                let path = path.map_err(|_| unknown())?;
                Ok(Self::File(sandbox, format!("/{path}")))
            }
            _ => Err(unknown()),
        }
    }

    /// Returns the URI.
    pub fn uri(&self) -> String {
        match self {
            Self::Templates => format!("{SCHEME}templates"),
            Self::Console(id) => format!("{SCHEME}sandbox/{id}/console"),
            Self::Connections(id) => format!("{SCHEME}sandbox/{id}/connections"),
            Self::File(id, path) => {
                let path = path.trim_start_matches('/');
                let path = utf8_percent_encode(path, ENCODED);
                format!("{SCHEME}sandbox/{id}/files/{path}")
            }
        }
    }

    /// Returns the group of tools that has the same rights.
    fn group(&self) -> ToolGroup {
        match self {
            Self::Templates => ToolGroup::Sandboxes,
            Self::Console(_) => ToolGroup::Commands,
            Self::Connections(_) => ToolGroup::Network,
            Self::File(..) => ToolGroup::Files,
        }
    }

    fn sandbox(&self) -> Option<&str> {
        match self {
            Self::Templates => None,
            Self::Console(id) | Self::Connections(id) | Self::File(id, _) => Some(id),
        }
    }

    /// Checks that the options of the server permit access.
    fn check(&self, session: &Session) -> ToolResult<()> {
        let options = &session.options;
        if !options.has_group(self.group()) {
            return Err(ToolError::new(format!(
                "this server has no tools of the group {}, and not their resources",
                self.group()
            )));
        }
        match (&options.sandbox, self.sandbox()) {
            (Some(bound), Some(sandbox)) if bound != sandbox => Err(ToolError::new(format!(
                "this server uses only the sandbox {bound}"
            ))),
            _ => Ok(()),
        }
    }
}

/// Returns the resources of the caller's sandboxes, newest first.
pub async fn list(session: &Session) -> ToolResult<Vec<Resource>> {
    let options = &session.options;
    let mut resources = Vec::new();
    if options.has_group(ToolGroup::Sandboxes) && options.sandbox.is_none() {
        let uri = ResourceId::Templates.uri();
        let resource = Resource::new(uri, "templates").with_mime_type("application/json");
        resources.push(resource.with_description("Templates of sandboxes"));
    }
    let with_killed = false;
    let mut sandboxes = session.client.sandboxes(with_killed).await?;
    sandboxes.retain(|info| options.sandbox.as_ref().is_none_or(|id| *id == info.id));
    sandboxes.sort_by_key(|info| std::cmp::Reverse(info.created_ms));
    for info in sandboxes.into_iter().take(MAX_LISTED) {
        let name = info.name.unwrap_or_else(|| info.id.clone());
        let console = ResourceId::Console(info.id.clone());
        if options.has_group(console.group()) {
            let resource = Resource::new(console.uri(), format!("console of {name}"));
            resources.push(resource.with_mime_type("text/plain"));
        }
        let connections = ResourceId::Connections(info.id);
        if options.has_group(connections.group()) {
            let resource = Resource::new(connections.uri(), format!("connections of {name}"));
            resources.push(resource.with_mime_type("application/json"));
        }
    }
    Ok(resources)
}

/// Returns the URI templates of resources that are not listed individually.
pub fn templates(session: &Session) -> Vec<ResourceTemplate> {
    if !session.options.has_group(ToolGroup::Files) {
        return Vec::new();
    }
    let id = session.options.sandbox.as_deref().unwrap_or("{sandbox}");
    let uri = format!("{SCHEME}sandbox/{id}/files/{{+path}}");
    let about = "File of a sandbox, at most 1 MiB; `path` is absolute, without the first slash";
    vec![ResourceTemplate::new(uri, "file").with_description(about)]
}

/// Reads a resource.
pub async fn read(session: &Session, uri: &str) -> ToolResult<ResourceContents> {
    let id = ResourceId::parse(uri)?;
    id.check(session)?;
    match &id {
        ResourceId::File(sandbox, path) => {
            let agent = session.agent(sandbox).await?;
            let content = agent.read(path, None, MAX_FILE_BYTES).await;
            let content = content.map_err(|e| ToolError::of_path("read", path, &e))?;
            Ok(match std::str::from_utf8(&content) {
                Ok(text) => ResourceContents::text(text, uri),
                Err(_) => ResourceContents::blob(STANDARD.encode(&content), uri)
                    .with_mime_type("application/octet-stream"),
            })
        }
        ResourceId::Console(_) => Ok(ResourceContents::text(text(session, &id).await?, uri)),
        ResourceId::Templates | ResourceId::Connections(_) => {
            let contents = ResourceContents::text(text(session, &id).await?, uri);
            Ok(contents.with_mime_type("application/json"))
        }
    }
}

/// Returns the text of a resource that is not a file.
async fn text(session: &Session, id: &ResourceId) -> ToolResult<String> {
    let client = &session.client;
    match id {
        ResourceId::Templates => {
            let templates: Vec<Template> = client.call(Method::GET, "/templates", &()).await?;
            let rows = templates.into_iter().take(MAX_TEMPLATES).map(|template| {
                json!({
                    "names": template.names, "cpus": template.cpu_count,
                    "memory_mb": template.memory_mb, "disk_mb": template.disk_size_mb,
                })
            });
            Ok(Value::Array(rows.collect()).to_string())
        }
        ResourceId::Console(sandbox) => {
            let logs = client.last_lines::<Logs>(sandbox, "logs", LINES).await;
            let logs = logs.map_err(|e| ToolError::of_sandbox(sandbox, &e))?;
            let lines = logs.log_entries.into_iter().map(|entry| entry.message);
            Ok(last_lines(lines.collect()))
        }
        ResourceId::Connections(sandbox) => {
            let record = client
                .last_lines::<Value>(sandbox, "connections", LINES)
                .await;
            let record = record.map_err(|e| ToolError::of_sandbox(sandbox, &e))?;
            Ok(record.to_string())
        }
        ResourceId::File(..) => Err(ToolError::new("a file has no text of this kind")),
    }
}

/// Returns the last of `lines` that fit in the maximum size.
fn last_lines(lines: Vec<String>) -> String {
    let mut bytes = 0;
    let mut texts: Vec<String> = Vec::new();
    for line in lines.into_iter().rev() {
        let line = cut_text(&line, MAX_TEXT_BYTES / 16);
        bytes += line.len() + 1;
        if bytes > MAX_TEXT_BYTES {
            break;
        }
        texts.push(line);
    }
    texts.reverse();
    texts.join("\n")
}

/// Returns a number that differs if the resource has changed. `None` if it cannot be read at this
/// time. A paused sandbox is not resumed.
pub async fn version(session: &Session, id: &ResourceId) -> Option<u64> {
    id.check(session).ok()?;
    let mut hasher = DefaultHasher::new();
    match id {
        ResourceId::File(sandbox, path) => {
            let sandbox = session.client.sandbox(sandbox).await.ok()?;
            if sandbox.record.state != SandboxState::Running {
                return None;
            }
            let agent = session.client.agent(&sandbox).ok()?;
            match agent.stat(path, None).await {
                Ok(entry) => (entry.size, entry.modified_time).hash(&mut hasher),
                // A file that does not exist has a version of its own.
                Err(e) if e.is_not_found() => 0.hash(&mut hasher),
                Err(_) => return None,
            }
        }
        _ => text(session, id).await.ok()?.hash(&mut hasher),
    }
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_have_one_form_and_contain_any_path() {
        let id = || "abc".to_owned();
        for resource in [
            ResourceId::Templates,
            ResourceId::Console(id()),
            ResourceId::Connections(id()),
            ResourceId::File(id(), "/home/user/a b#c?d%41é.txt".to_owned()),
            ResourceId::File(id(), "/../etc/passwd".to_owned()),
        ] {
            let uri = resource.uri();
            assert!(uri.is_ascii() && !uri.contains([' ', '#', '?']), "{uri}");
            assert_eq!(ResourceId::parse(&uri).unwrap(), resource);
        }
    }

    #[test]
    fn other_uris_are_rejected_with_the_known_forms() {
        for uri in [
            "",
            "jiffy://",
            "jiffy://sandbox",
            "jiffy://sandbox/a",
            "jiffy://sandbox/a/",
            "jiffy://sandbox/a/files",
            "jiffy://sandbox/a/files/",
            "jiffy://sandbox/a/files/%ff",
            "jiffy://sandbox/a/console/x",
            "file:///etc/passwd",
            "jiffy://templates/x",
        ] {
            let error = ResourceId::parse(uri).unwrap_err();
            assert!(error.message().contains("jiffy://templates"), "{uri}");
        }
        let long = format!("jiffy://{}", "x".repeat(1 << 20));
        assert!(ResourceId::parse(&long).unwrap_err().message().len() < 1000);
    }

    #[test]
    fn a_console_is_cut_at_its_beginning() {
        let lines = (0..100_000).map(|n| format!("line {n}")).collect();
        let text = last_lines(lines);
        assert!(text.len() <= MAX_TEXT_BYTES && text.ends_with("line 99999"));
        assert!(text.starts_with("line "));
        let long = last_lines(vec!["x".repeat(MAX_TEXT_BYTES * 2), "end".to_owned()]);
        assert!(long.len() <= MAX_TEXT_BYTES && long.ends_with("\nend"));
    }
}
