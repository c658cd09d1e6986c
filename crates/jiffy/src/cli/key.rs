//! `jiffy key`.

use crate::units;
use clap::{Args, Subcommand, ValueEnum};

/// `jiffy key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key and print it; it is shown this once
    Create(KeyCreateArgs),
    /// List the keys
    Ls {
        /// Also those that were revoked
        #[arg(short, long)]
        all: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key; its sandboxes stay
    Revoke {
        /// Id of the key, or its name
        key: String,
        /// Print the key as JSON instead of its id
        #[arg(long)]
        json: bool,
    },
}

/// `jiffy key create`.
#[derive(Debug, Args)]
pub struct KeyCreateArgs {
    /// Name for it
    #[arg(long, default_value = "unnamed")]
    pub name: String,
    /// What it is good for
    #[arg(long, value_enum, default_value_t = KeyScope::Create)]
    pub scope: KeyScope,
    /// Most running sandboxes
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<u32>,
    /// Most virtual CPUs of all of them
    #[arg(long, value_name = "N")]
    pub max_cpus: Option<u32>,
    /// Most memory of all of them
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub max_memory: Option<u32>,
    /// Most new sandboxes in any 60 s
    #[arg(long, value_name = "N")]
    pub creates_per_minute: Option<u32>,
    /// Print the key with everything about it as JSON
    #[arg(long)]
    pub json: bool,
}

/// What an API key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KeyScope {
    /// Everything on this host, also others' sandboxes, templates and pools
    Admin,
    /// Sandboxes of its own
    Create,
    /// Looking, without secrets
    Read,
}

impl From<KeyScope> for jiffy_api::Scope {
    fn from(scope: KeyScope) -> Self {
        match scope {
            KeyScope::Admin => Self::Admin,
            KeyScope::Create => Self::Create,
            KeyScope::Read => Self::Read,
        }
    }
}
