//! Messages of `process.Process` as JSON.

use super::limits::Limits;
use crate::rpc::json;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What to run.
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
    pub limits: Option<Limits>,
}

/// Columns and rows.
#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize)]
pub struct Size {
    /// Columns.
    #[serde(default)]
    pub cols: u16,
    /// Rows.
    #[serde(default)]
    pub rows: u16,
}

/// A terminal.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct Pty {
    /// Its size; 80 x 24 if absent.
    #[serde(default)]
    pub size: Option<Size>,
}

/// `Start`.
#[derive(Debug, Deserialize)]
pub struct StartRequest {
    /// What to run.
    #[serde(default)]
    pub process: ProcessConfig,
    /// In a terminal.
    #[serde(default)]
    pub pty: Option<Pty>,
    /// Name to select it by.
    #[serde(default)]
    pub tag: Option<String>,
    /// Whether it gets a stdin; older clients leave it out and expect one.
    #[serde(default)]
    pub stdin: Option<bool>,
}

/// Which process.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Selector {
    /// By pid.
    #[serde(default, deserialize_with = "json::number")]
    pub pid: Option<u32>,
    /// By tag.
    #[serde(default)]
    pub tag: Option<String>,
}

/// `Connect`, `CloseStdin`.
#[derive(Debug, Default, Deserialize)]
pub struct SelectRequest {
    /// Which process.
    #[serde(default)]
    pub process: Selector,
}

/// `SendSignal`.
#[derive(Debug, Deserialize)]
pub struct SignalRequest {
    /// Which process.
    #[serde(default)]
    pub process: Selector,
    /// `SIGNAL_SIGTERM` or a number.
    #[serde(default)]
    pub signal: serde_json::Value,
}

/// Bytes for a process.
#[derive(Debug, Default, Deserialize)]
pub struct Input {
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
    /// Which process.
    #[serde(default)]
    pub process: Selector,
    /// What to write.
    #[serde(default)]
    pub input: Input,
}

/// `Update`.
#[derive(Debug, Deserialize)]
pub struct UpdateRequest {
    /// Which process.
    #[serde(default)]
    pub process: Selector,
    /// New size of its terminal.
    #[serde(default)]
    pub pty: Option<Pty>,
}

/// One message of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamInputRequest {
    /// First message: which process.
    #[serde(default)]
    pub start: Option<SelectRequest>,
    /// Later messages: what to write.
    #[serde(default)]
    pub data: Option<StreamInputData>,
}

/// Data of `StreamInput`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamInputData {
    /// What to write.
    #[serde(default)]
    pub input: Input,
}

/// An entry of `List`.
#[derive(Debug, Serialize)]
pub struct ProcessInfo<'a> {
    /// As it was started.
    pub config: &'a ProcessConfig,
    /// Process id.
    pub pid: u32,
    /// Its tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<&'a str>,
}
