//! Arguments of `jiffy skill`.

use super::CodingAgent;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Subcommands of `jiffy skill`.
#[derive(Debug, Subcommand)]
pub enum SkillCommand {
    /// Write the skill into the directory of a coding agent, and show the change
    #[command(after_help = "Examples:
  jiffy skill install claude-code
  jiffy skill install codex --project
  jiffy skill install --dir ~/.agents/skills
  jiffy skill install claude-code --remove")]
    Install(SkillInstallArgs),
    /// Print the skill
    Show,
}

/// `jiffy skill install`.
#[derive(Debug, Args)]
pub struct SkillInstallArgs {
    /// Coding agent
    #[arg(value_enum, required_unless_present = "dir")]
    pub agent: Option<CodingAgent>,
    /// Install the skill for the project in the current directory [default: for this user]
    #[arg(long, conflicts_with = "dir")]
    pub project: bool,
    /// Directory with the skills of another agent
    #[arg(long, value_name = "DIR", conflicts_with = "agent")]
    pub dir: Option<PathBuf>,
    /// Remove the skill
    #[arg(long)]
    pub remove: bool,
    /// Show the change without writing the file
    #[arg(long)]
    pub dry_run: bool,
}
