//! Arguments of `jiffy top`.

use super::HostArgs;
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_fleet_core::MemberId;
use std::time::Duration;

/// `jiffy top`.
#[derive(Debug, Args)]
#[command(after_help = "Keys:
  Up, Down, PgUp, PgDn, Home, End    select a sandbox (also j, k, g, G)
  Enter  details      s  shell       l  console log
  p  pause            r  resume      K  kill, after a confirmation
  f  fork             S  snapshot    b  roll back to a snapshot from a list
  y  copy a command   e  messages    /  filter (Esc removes it)
  <, >  sort column   o  order       ?  help        q  quit

Keys in a text:
  Up, Down, Left, Right, PgUp, PgDn, Home, End    scroll
  /  search           n, N  next, previous match    Esc  end the search, then back
  y  copy: then y for the text, or the key of a command, for example l for jiffy logs

Columns:
  CPU      usage of all processors of the sandbox. 100 %: all processors are busy
  MEMORY   used memory including the page cache, of the memory of the sandbox
  DISK     bytes written since the last snapshot

Examples:
  jiffy top --sort cpu
  jiffy top --filter 'running team=a'
  jiffy top --once | head")]
pub struct TopArgs {
    /// Show only sandboxes that match all words: parts of the name, template, state, host, engine
    /// or a label KEY=VALUE, or the start of the id
    #[arg(
        short,
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    pub filter: String,
    /// Column that the table is sorted by
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t)]
    pub sort: SortColumn,
    /// Reverse the order
    #[arg(long)]
    pub reverse: bool,
    /// Refresh interval of usage, at least 500ms. Changes of sandboxes are shown at once
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::duration)]
    pub interval: Duration,
    /// Print the table once instead of opening it on the terminal
    #[arg(long)]
    pub once: bool,
    /// Only sandboxes of this host of the fleet (for example h2)
    #[arg(long = "host", value_name = "HOST")]
    pub only_host: Option<MemberId>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Column by which the table of `jiffy top` can be sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum SortColumn {
    /// Name. Sandboxes without a name are last
    Name,
    /// State
    State,
    /// Host of the fleet
    Host,
    /// Template
    Template,
    /// Usage of the processors, highest first
    Cpu,
    /// Used memory, highest first
    Memory,
    /// Written disk, highest first
    Disk,
    /// Age, newest first
    #[default]
    Age,
    /// Timeout, earliest first
    Expires,
}

impl SortColumn {
    /// All columns, in the order of the table.
    pub const ALL: [Self; 9] = [
        Self::Name,
        Self::State,
        Self::Host,
        Self::Template,
        Self::Cpu,
        Self::Memory,
        Self::Disk,
        Self::Age,
        Self::Expires,
    ];
}
