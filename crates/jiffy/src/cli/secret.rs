//! Arguments of `jiffy secret` and its subcommands.

use super::HostArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `jiffy secret`.
#[derive(Debug, Subcommand)]
pub enum SecretCommand {
    /// Store a secret. Its value is read from standard input or a file, and no command prints it
    Create(SecretCreateArgs),
    /// List secrets without their values
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Remove secrets
    Rm {
        /// Secrets: ids or names
        #[arg(required = true)]
        secrets: Vec<String>,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
}

/// `jiffy secret create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy secret create github-token < token.txt
  jiffy secret create github-token --file token.txt --replace")]
pub struct SecretCreateArgs {
    /// Name: letters, digits, `-`, `_` and `.`
    pub name: String,
    /// File with the value [default: standard input]. A line break at its end is removed
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Replace the value if the secret exists
    #[arg(long)]
    pub replace: bool,
    /// Metadata. Can be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    /// Print the secret without its value as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| format!("`{text}` is not NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}
