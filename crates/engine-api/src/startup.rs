//! Startup of a template: the command that runs in a guest before its snapshot is taken or before
//! the guest is handed out, and the check that it is ready.

use crate::FirstUse;
use serde::{Deserialize, Serialize};

/// Start command of every sandbox of a template, with a readiness check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Startup {
    /// Command to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartCommand>,
    /// Readiness check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Readiness>,
    /// First action of most sandboxes, if the template defines one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_use: Option<FirstUse>,
}

impl Startup {
    /// Returns whether the template has neither a start command nor a readiness check.
    pub fn is_empty(&self) -> bool {
        self.start.is_none() && self.ready.is_none()
    }
}

/// Long-running command that is started once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartCommand {
    /// Command for `/bin/sh -c`, or the program to execute if `args` is set.
    pub command: String,
    /// Arguments. If set, the program is executed without a shell, which an image may lack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub args: Option<Vec<String>>,
    /// User. Defaults to the template's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Working directory. Defaults to the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
}

/// Readiness check: a port that accepts connections, a page that answers with status 2xx, or a
/// command that succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Readiness {
    /// TCP port on the guest's loopback interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Path of the page. Requires `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Command for `/bin/sh -c`. Must not be combined with `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Timeout in seconds.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u32,
}

/// Probe of a [`Readiness`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadinessProbe<'a> {
    /// The port accepts a connection.
    Port(u16),
    /// `GET` of the path at the port answers with status 2xx.
    Page(u16, &'a str),
    /// The command exits with status 0.
    Command(&'a str),
}

/// Maximum timeout, in seconds.
const MAX_TIMEOUT_S: u32 = 3600;

/// Default of [`Readiness::timeout_s`].
fn default_timeout_s() -> u32 {
    60
}

impl Readiness {
    /// Returns the probe, or a message if the combination of fields is invalid.
    pub fn probe(&self) -> Result<ReadinessProbe<'_>, String> {
        if !(1..=MAX_TIMEOUT_S).contains(&self.timeout_s) {
            return Err(format!(
                "timeout_s is {}: choose 1 to {MAX_TIMEOUT_S}",
                self.timeout_s
            ));
        }
        match (self.port, self.path.as_deref(), self.command.as_deref()) {
            (Some(0), ..) => Err("port 0 is not a valid port".to_owned()),
            (Some(_), Some(path), None) if !is_path(path) => Err(format!(
                "`{path}` is not a path: start it with `/`, without spaces"
            )),
            (Some(port), Some(path), None) => Ok(ReadinessProbe::Page(port, path)),
            (Some(port), None, None) => Ok(ReadinessProbe::Port(port)),
            (None, None, Some(command)) if !command.trim().is_empty() => {
                Ok(ReadinessProbe::Command(command))
            }
            // Includes an empty command, and a path without a port.
            _ => Err("specify either `port`, with or without `path`, or `command`".to_owned()),
        }
    }
}

/// Returns whether `path` can be part of a request line.
pub(crate) fn is_path(path: &str) -> bool {
    // Control characters and spaces would end the request line.
    path.starts_with('/') && path.len() <= 1024 && path.bytes().all(|b| b.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(port: Option<u16>, path: Option<&str>, command: Option<&str>) -> Readiness {
        Readiness {
            port,
            path: path.map(str::to_owned),
            command: command.map(str::to_owned),
            timeout_s: 5,
        }
    }

    #[test]
    fn a_readiness_is_a_port_a_page_or_a_command_and_nothing_else() {
        assert_eq!(
            ready(Some(80), None, None).probe(),
            Ok(ReadinessProbe::Port(80))
        );
        let page = ready(Some(80), Some("/health"), None);
        assert_eq!(page.probe(), Ok(ReadinessProbe::Page(80, "/health")));
        let command = ready(None, None, Some("true"));
        assert_eq!(command.probe(), Ok(ReadinessProbe::Command("true")));
        for bad in [
            ready(None, None, None),
            ready(Some(0), None, None),
            ready(None, Some("/health"), None),
            ready(Some(80), None, Some("true")),
            ready(None, None, Some(" ")),
            ready(Some(80), Some("health"), None),
            ready(Some(80), Some("/ HTTP/1.1\r\nX: y"), None),
        ] {
            assert!(bad.probe().is_err(), "{bad:?}");
        }
        for timeout_s in [0, MAX_TIMEOUT_S + 1] {
            let bad = Readiness {
                timeout_s,
                ..ready(Some(80), None, None)
            };
            assert!(bad.probe().is_err(), "{timeout_s}");
        }
    }
}
