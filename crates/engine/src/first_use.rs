//! First use of a template's sandboxes, by its description.

use crate::startup::is_path;
use serde::{Deserialize, Serialize};

/// Longest body of a request in bytes.
const MAX_BODY_BYTES: usize = 64 << 10;

/// Thing that most sandboxes of a template do first. It is done once, in a guest that is thrown
/// away, when the template's snapshot has been made: what it touches is known then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirstUse {
    /// TCP port on the guest's loopback that takes a `POST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Path of the request; with `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// JSON body of the request, at most 64 KiB; with `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Command for `/bin/sh -c`, instead of `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Action of a [`FirstUse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstUseAction<'a> {
    /// `POST` of a body to a path at a port.
    Request {
        /// Port.
        port: u16,
        /// Path.
        path: &'a str,
        /// Body.
        body: &'a str,
    },
    /// Command.
    Command(&'a str),
}

impl FirstUse {
    /// Returns the action, or a message about the invalid combination.
    pub fn action(&self) -> Result<FirstUseAction<'_>, String> {
        let body = self.body.as_deref();
        match (self.port, self.path.as_deref(), self.command.as_deref()) {
            (Some(0), ..) => Err("port 0 is no port".to_owned()),
            (Some(_), Some(path), None) if !is_path(path) => Err(format!(
                "`{path}` is not a path: start it with `/`, without spaces"
            )),
            (Some(_), Some(_), None) if body.is_some_and(|body| body.len() > MAX_BODY_BYTES) => {
                Err(format!("the body is longer than {MAX_BODY_BYTES} bytes"))
            }
            (Some(port), Some(path), None) => Ok(FirstUseAction::Request {
                port,
                path,
                body: body.unwrap_or_default(),
            }),
            (None, None, Some(command)) if !command.trim().is_empty() && body.is_none() => {
                Ok(FirstUseAction::Command(command))
            }
            _ => Err("name either `port`, `path` and `body`, or a `command`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_use(text: &str) -> FirstUse {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_first_use_is_a_request_or_a_command_and_nothing_else() {
        let request = first_use(r#"{"port":80,"path":"/run","body":"{}"}"#);
        let action = FirstUseAction::Request {
            port: 80,
            path: "/run",
            body: "{}",
        };
        assert_eq!(request.action(), Ok(action));
        let command = first_use(r#"{"command":"true"}"#);
        assert_eq!(command.action(), Ok(FirstUseAction::Command("true")));
        for bad in [
            "{}",
            r#"{"port":0,"path":"/"}"#,
            r#"{"port":80}"#,
            r#"{"port":80,"path":"/ HTTP/1.1"}"#,
            r#"{"port":80,"path":"/","command":"true"}"#,
            r#"{"command":" "}"#,
            r#"{"command":"true","body":"{}"}"#,
        ] {
            assert!(first_use(bad).action().is_err(), "{bad}");
        }
        let long = FirstUse {
            body: Some(" ".repeat(MAX_BODY_BYTES + 1)),
            ..request
        };
        assert!(long.action().is_err());
    }
}
