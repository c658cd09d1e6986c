//! First use of a template's sandboxes: an action that the template describes, so that restores can
//! prepare for it.

use crate::startup::is_path;
use serde::{Deserialize, Serialize};

/// Maximum length of the request body, in bytes.
const MAX_BODY_BYTES: usize = 64 << 10;

/// Action with which most uses of the template's sandboxes start. After the template's snapshot is
/// taken, the action runs once in a temporary guest to record which memory it touches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirstUse {
    /// TCP port on the guest's loopback interface, for a `POST` request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Path of the request. Requires `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// JSON body of the request, at most 64 KiB. Requires `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Command for `/bin/sh -c`. Must not be combined with `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Action of a [`FirstUse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstUseAction<'a> {
    /// `POST` request on the guest's loopback interface.
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
    /// Returns the action, or a message if the combination of fields is invalid.
    pub fn action(&self) -> Result<FirstUseAction<'_>, String> {
        let body = self.body.as_deref();
        match (self.port, self.path.as_deref(), self.command.as_deref()) {
            // The first matching case decides, so errors of single fields precede valid
            // combinations.
            (Some(0), ..) => Err("port 0 is not a valid port".to_owned()),
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
            // Includes an empty command, and a command with a body.
            _ => Err("specify either `port`, `path` and `body`, or `command`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(port: u16, path: &str, body: Option<&str>) -> FirstUse {
        FirstUse {
            port: Some(port),
            path: Some(path.to_owned()),
            body: body.map(str::to_owned),
            command: None,
        }
    }

    fn command(line: &str) -> FirstUse {
        FirstUse {
            port: None,
            path: None,
            body: None,
            command: Some(line.to_owned()),
        }
    }

    #[test]
    fn a_first_use_is_a_request_or_a_command_and_nothing_else() {
        let good = request(80, "/run", Some("{}"));
        let action = FirstUseAction::Request {
            port: 80,
            path: "/run",
            body: "{}",
        };
        assert_eq!(good.action(), Ok(action));
        assert_eq!(
            command("true").action(),
            Ok(FirstUseAction::Command("true"))
        );
        let without_path = FirstUse {
            path: None,
            ..request(80, "/", None)
        };
        let both = FirstUse {
            command: Some("true".to_owned()),
            ..request(80, "/", None)
        };
        let command_with_body = FirstUse {
            body: Some("{}".to_owned()),
            ..command("true")
        };
        for bad in [
            without_path,
            both,
            command_with_body,
            command(" "),
            request(0, "/", None),
            request(80, "/ HTTP/1.1", None),
            request(80, "/", Some(&" ".repeat(MAX_BODY_BYTES + 1))),
        ] {
            assert!(bad.action().is_err(), "{bad:?}");
        }
    }
}
