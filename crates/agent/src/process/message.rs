//! Messages of `process.GuestProcess` as JSON.

use super::limits::ProcessLimits;
use crate::rpc::json;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Program to run, and its surroundings.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
pub struct ProcessConfig {
    /// Program: a path, or a name looked up in `PATH`.
    #[serde(default, deserialize_with = "json::or_default")]
    pub cmd: String,
    /// Arguments after the name.
    #[serde(default, deserialize_with = "json::or_default")]
    pub args: Vec<String>,
    /// Environment on top of the sandbox's.
    #[serde(default, deserialize_with = "json::or_default")]
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Extension: resource limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ProcessLimits>,
}

/// Columns and rows.
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
    /// Size; 80 x 24 if absent.
    #[serde(default)]
    pub size: Option<PtySize>,
}

/// `Start`.
#[derive(Debug, Deserialize)]
pub struct StartRequest {
    /// Program to run.
    #[serde(default)]
    pub process: ProcessConfig,
    /// In a terminal.
    #[serde(default)]
    pub pty: Option<PtyRequest>,
    /// Name to select it by.
    #[serde(default)]
    pub tag: Option<String>,
    /// Connects stdin; older clients leave it out and expect one.
    #[serde(default)]
    pub stdin: Option<bool>,
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

/// `Connect`, `CloseStdin`.
#[derive(Debug, Default, Deserialize)]
pub struct SelectRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
}

/// `SendSignal`.
#[derive(Debug, Deserialize)]
pub struct SignalRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
    /// `SIGNAL_SIGTERM` or a number.
    #[serde(default)]
    pub signal: serde_json::Value,
}

/// Bytes for a process.
#[derive(Debug, Default, Deserialize)]
pub struct InputData {
    /// For a pipe.
    #[serde(default, deserialize_with = "json::bytes")]
    pub stdin: Option<Vec<u8>>,
    /// For a terminal.
    #[serde(default, deserialize_with = "json::bytes")]
    pub pty: Option<Vec<u8>>,
}

/// `SendInput`.
#[derive(Debug, Deserialize)]
pub struct InputRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
    /// Bytes to write.
    #[serde(default)]
    pub input: InputData,
}

/// `Update`.
#[derive(Debug, Deserialize)]
pub struct UpdateRequest {
    /// The selected process.
    #[serde(default)]
    pub process: ProcessSelector,
    /// New size of its terminal.
    #[serde(default)]
    pub pty: Option<PtyRequest>,
}

/// One message of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamInputRequest {
    /// First message: which process.
    #[serde(default)]
    pub start: Option<SelectRequest>,
    /// Later messages: bytes to write.
    #[serde(default)]
    pub data: Option<StreamInputData>,
}

/// Data of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamInputData {
    /// Bytes to write.
    #[serde(default)]
    pub input: InputData,
}

/// An entry of `List`.
#[derive(Debug, Serialize)]
pub struct ProcessInfo<'a> {
    /// Configuration at start.
    pub config: &'a ProcessConfig,
    /// Process id.
    pub pid: u32,
    /// Tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<&'a str>,
}
