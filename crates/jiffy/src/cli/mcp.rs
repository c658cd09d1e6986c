//! Arguments of `jiffy mcp`.

use super::HostArgs;
use clap::{Args, Subcommand, ValueEnum};
use jiffy_mcp::{McpClient, McpOptions, ToolGroup};
use std::path::PathBuf;

/// `jiffy mcp`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  jiffy mcp install claude                           add the server to Claude Code
  jiffy mcp --allow-dir ~/project                    also copy files of a directory
  jiffy mcp --sandbox k3x9 --read-only               look at one sandbox

Groups of tools:
  sandboxes   sandbox_run, sandbox_create, sandbox_list, sandbox_end
  commands    sandbox_exec, sandbox_process
  code        run_code
  files       file_read, file_write, file_edit, file_list, file_search
  transfer    upload, download (only with --allow-dir)
  snapshots   snapshot, rollback, fork, promote, diff
  network     preview_link

Sandboxes that the agent creates are removed when the client closes standard input or exits.")]
pub struct McpArgs {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Option<McpCommand>,
    /// Groups of tools, separated by commas [default: all]
    #[arg(long, value_name = "GROUPS", value_delimiter = ',')]
    pub tools: Vec<ToolGroup>,
    /// Offer only tools that change neither a sandbox nor the host
    #[arg(long)]
    pub read_only: bool,
    /// Use one sandbox for all calls: id, unique prefix of the id, or name
    #[arg(long, value_name = "ID")]
    pub sandbox: Option<String>,
    /// Directory of this host whose files may be copied to and from sandboxes. Can be repeated
    #[arg(long = "allow-dir", value_name = "DIR")]
    pub allow_dir: Vec<PathBuf>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Subcommands of `jiffy mcp`.
#[derive(Debug, Subcommand)]
pub enum McpCommand {
    /// Add the server to the configuration file of a client, and show the change
    #[command(after_help = "Examples:
  jiffy mcp install claude
  jiffy mcp install cursor --dry-run
  jiffy mcp install codex -- --read-only
  jiffy mcp install claude --remove")]
    Install(McpInstallArgs),
}

/// `jiffy mcp install`.
#[derive(Debug, Args)]
pub struct McpInstallArgs {
    /// Client
    #[arg(value_enum)]
    pub client: McpClientName,
    /// Remove the server from the file instead
    #[arg(long, conflicts_with = "options")]
    pub remove: bool,
    /// Show the change without writing the file
    #[arg(long)]
    pub dry_run: bool,
    /// Options of `jiffy mcp`
    #[arg(last = true, value_name = "OPTION")]
    pub options: Vec<String>,
}

/// Clients with a known configuration file.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum McpClientName {
    /// Claude Code
    Claude,
    /// Codex
    Codex,
    /// Cursor
    Cursor,
    /// Visual Studio Code
    Vscode,
    /// Zed
    Zed,
}

impl From<McpClientName> for McpClient {
    fn from(name: McpClientName) -> Self {
        match name {
            McpClientName::Claude => Self::Claude,
            McpClientName::Codex => Self::Codex,
            McpClientName::Cursor => Self::Cursor,
            McpClientName::Vscode => Self::Vscode,
            McpClientName::Zed => Self::Zed,
        }
    }
}

impl McpArgs {
    /// Returns the options of the server.
    pub fn options(&self) -> McpOptions {
        McpOptions {
            groups: self.tools.clone(),
            read_only: self.read_only,
            sandbox: self.sandbox.clone(),
            allowed_directories: self.allow_dir.clone(),
            without_session: false,
        }
    }
}
