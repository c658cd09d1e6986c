//! Arguments of `jiffy webhook` and its subcommands.

use super::HostArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `jiffy webhook`.
#[derive(Debug, Subcommand)]
pub enum WebhookCommand {
    /// Create a webhook: events of sandboxes are posted to a URL
    Create(WebhookCreateArgs),
    /// List webhooks
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Enable webhooks
    Enable(WebhookNames),
    /// Disable webhooks: their events are not sent
    Disable(WebhookNames),
    /// List deliveries of a webhook that are pending or have failed, newest first
    Deliveries {
        /// Webhook: its id
        webhook: String,
        /// Only deliveries that failed for 24 hours
        #[arg(long)]
        failed: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Remove webhooks and their pending deliveries
    Rm(WebhookNames),
}

/// Webhooks.
#[derive(Debug, Args)]
pub struct WebhookNames {
    /// Webhooks: their ids
    #[arg(required = true)]
    pub webhooks: Vec<String>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy webhook create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy webhook create https://example.com/events < secret.txt
  jiffy webhook create https://example.com/events --event killed --secret-file secret.txt")]
pub struct WebhookCreateArgs {
    /// URL to which each event is posted
    pub url: String,
    /// Name [default: the host of the URL]
    #[arg(long)]
    pub name: Option<String>,
    /// Type of events: created, updated, paused, resumed, checkpointed or killed [default: all].
    /// Can be repeated
    #[arg(long, value_name = "TYPE")]
    pub event: Vec<String>,
    /// File with the secret of signatures [default: standard input]. A line break at its end is
    /// removed
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Print the webhook as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
