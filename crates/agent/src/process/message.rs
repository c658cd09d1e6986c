//! Messages of the service `process.Process` as JSON, compatible with E2B's envd protocol.

use super::limits::ProcessLimits;
use crate::rpc::json;
use jiffy_proto::process_mounts::ProcessMounts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Configuration of a process: program, arguments and environment.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
pub struct ProcessConfig {
    /// Program: a path, or a name looked up in `PATH`.
    #[serde(default, deserialize_with = "json::or_default")]
    pub cmd: String,
    /// Arguments after the name.
    #[serde(default, deserialize_with = "json::or_default")]
    pub args: Vec<String>,
    /// Variables that are added to the sandbox's environment.
    #[serde(default, deserialize_with = "json::or_default")]
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Extension: resource limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ProcessLimits>,
}

/// Size of a terminal.
#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize)]
pub struct PtySize {
    /// Columns.
    #[serde(default)]
    pub cols: u16,
    /// Rows.
    #[serde(default)]
    pub rows: u16,
}

/// A terminal.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct PtyRequest {
    /// Size. Defaults to 80 x 24.
    #[serde(default)]
    pub size: Option<PtySize>,
}

/// Request of `Start`.
#[derive(Debug, Deserialize)]
pub struct StartRequest {
    /// Program to run.
    #[serde(default)]
    pub process: ProcessConfig,
    /// Terminal. If absent, the process has pipes.
    #[serde(default)]
    pub pty: Option<PtyRequest>,
    /// Tag with which requests can select the process.
    #[serde(default)]
    pub tag: Option<String>,
    /// Connects stdin. Defaults to true, since older clients omit the field and expect an input.
    #[serde(default)]
    pub stdin: Option<bool>,
    /// Extension: the process is a service of the sandbox, not a command of a client.
    #[serde(default)]
    pub service: bool,
    /// Extension: mounts that only the process and its children see.
    #[serde(default)]
    pub mounts: Option<ProcessMounts>,
}

/// Selection of a process.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ProcessSelector {
    /// Process id.
    #[serde(default, deserialize_with = "json::number")]
    pub pid: Option<u32>,
    /// Tag.
    #[serde(default)]
    pub tag: Option<String>,
}

/// Request of `Connect` and `CloseStdin`.
#[derive(Debug, Default, Deserialize)]
pub struct SelectRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
}

/// Request of `SendSignal`.
#[derive(Debug, Deserialize)]
pub struct SignalRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
    /// Signal as a name such as `SIGNAL_SIGTERM`, or as a number.
    #[serde(default)]
    pub signal: serde_json::Value,
}

/// Input of a process.
#[derive(Debug, Default, Deserialize)]
pub struct InputData {
    /// Bytes for a pipe.
    #[serde(default, deserialize_with = "json::bytes")]
    pub stdin: Option<Vec<u8>>,
    /// Bytes for a terminal.
    #[serde(default, deserialize_with = "json::bytes")]
    pub pty: Option<Vec<u8>>,
}

/// Request of `SendInput`.
#[derive(Debug, Deserialize)]
pub struct InputRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
    /// Bytes to write.
    #[serde(default)]
    pub input: InputData,
}

/// Request of `Update`.
#[derive(Debug, Deserialize)]
pub struct UpdateRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
    /// New size of the terminal.
    #[serde(default)]
    pub pty: Option<PtyRequest>,
}

/// One message of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamInputRequest {
    /// Selection of the process. Only in the first message.
    #[serde(default)]
    pub start: Option<SelectRequest>,
    /// Bytes to write. Only in later messages.
    #[serde(default)]
    pub data: Option<StreamInputData>,
}

/// Data in a message of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamInputData {
    /// Bytes to write.
    #[serde(default)]
    pub input: InputData,
}

/// Entry in the response of `List`.
#[derive(Debug, Serialize)]
pub struct ProcessInfo<'a> {
    /// Configuration with which the process was started.
    pub config: &'a ProcessConfig,
    /// Process id.
    pub pid: u32,
    /// Tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<&'a str>,
}
