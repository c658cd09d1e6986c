//! Options of the MCP server: groups of tools, and directories of the host that may be copied.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Group of tools that `--tools` selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolGroup {
    /// Creating, listing and ending sandboxes.
    Sandboxes,
    /// Commands.
    Commands,
    /// Code interpreter.
    Code,
    /// Files in a sandbox.
    Files,
    /// Files that are copied between host and sandbox.
    Transfer,
    /// Snapshots, forks and comparison.
    Snapshots,
    /// Links to ports.
    Network,
}

impl ToolGroup {
    /// All groups.
    pub const ALL: [Self; 7] = [
        Self::Sandboxes,
        Self::Commands,
        Self::Code,
        Self::Files,
        Self::Transfer,
        Self::Snapshots,
        Self::Network,
    ];

    /// Returns the name of the group.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sandboxes => "sandboxes",
            Self::Commands => "commands",
            Self::Code => "code",
            Self::Files => "files",
            Self::Transfer => "transfer",
            Self::Snapshots => "snapshots",
            Self::Network => "network",
        }
    }
}

impl fmt::Display for ToolGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ToolGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        all.find(|group| group.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("`{text}` is not a group of tools: use {names}")
        })
    }
}

/// Options of the server.
#[derive(Debug, Clone, Default)]
pub struct McpOptions {
    /// Groups of tools. Empty for all groups.
    pub groups: Vec<ToolGroup>,
    /// Offer only tools that change neither a sandbox nor the host.
    pub read_only: bool,
    /// Sandbox of all calls. `None` if the calls name their sandboxes.
    pub sandbox: Option<String>,
    /// Directories of the host whose files may be copied. Without any, the tools for copying are
    /// not offered.
    pub allowed_directories: Vec<PathBuf>,
    /// Calls belong to no session: sandboxes run until their timeout.
    pub without_session: bool,
}

impl McpOptions {
    /// Returns whether the tools of `group` are selected.
    pub fn has_group(&self, group: ToolGroup) -> bool {
        self.groups.is_empty() || self.groups.contains(&group)
    }
}
