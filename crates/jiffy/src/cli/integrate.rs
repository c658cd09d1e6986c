//! Arguments of `jiffy integrate`.

use clap::{Args, ValueEnum};

/// `jiffy integrate`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy integrate claude-code
  jiffy integrate codex --dry-run
  jiffy integrate opencode --remove")]
pub struct IntegrateArgs {
    /// Coding agent
    #[arg(value_enum)]
    pub agent: CodingAgent,
    /// Let the agent run commands in the sandbox without requesting permission
    #[arg(long, conflicts_with = "remove")]
    pub allow: bool,
    /// Remove the integration
    #[arg(long)]
    pub remove: bool,
    /// Show the change without writing the file
    #[arg(long)]
    pub dry_run: bool,
}

/// Coding agents with an integration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CodingAgent {
    /// Claude Code
    ClaudeCode,
    /// Codex
    Codex,
    /// OpenCode
    Opencode,
}

impl CodingAgent {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::Opencode => "opencode",
        }
    }
}

/// `jiffy agent-shell hook`.
#[derive(Debug, Args)]
pub struct HookArgs {
    /// Coding agent
    #[arg(value_enum)]
    pub agent: CodingAgent,
    /// Let the agent run the command without requesting permission
    #[arg(long)]
    pub allow: bool,
}
