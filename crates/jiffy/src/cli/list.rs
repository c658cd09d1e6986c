//! Arguments and filters of `jiffy ls`.

use super::HostArgs;
use clap::Args;
use jiffy_api_types::StateName;
use jiffy_fleet_core::MemberId;

/// `jiffy ls`.
#[derive(Debug, Args)]
#[command(after_help = "Filters (`*` matches any text):
  state=paused      creating, running, paused, broken or killed
  label=KEY         sandboxes with this label; label=KEY=VALUE: with this value
  name=web-*        name
  template=base     template, with any tag unless one is given
  engine=gvisor     isolation engine
  A sandbox must match one filter of each kind, and all labels.

Examples:
  jiffy ls --filter state=paused --filter state=broken
  jiffy rm $(jiffy ls -q --filter label=team=a)")]
pub struct LsArgs {
    /// Include sandboxes that were killed in the last hour
    #[arg(short, long)]
    pub all: bool,
    /// Show only matching sandboxes. Can be repeated
    #[arg(short, long = "filter", value_name = "KEY=VALUE", value_parser = Filter::parse)]
    pub filters: Vec<Filter>,
    /// Print ids only
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Only sandboxes of this host of the fleet (for example h2)
    #[arg(long = "host", value_name = "HOST")]
    pub only_host: Option<MemberId>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Condition of `jiffy ls --filter`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filter {
    /// Name of the state.
    State(&'static str),
    /// Label, and its value unless any value matches.
    Label(String, Option<String>),
    /// Pattern of the sandbox name.
    Name(String),
    /// Pattern of the template.
    Template(String),
    /// Name of the engine.
    Engine(String),
}

impl Filter {
    /// Parses a filter `KEY=VALUE`.
    fn parse(text: &str) -> Result<Self, String> {
        const FILTER_KEYS: &str = "state, label, name, template and engine";
        let Some((key, value)) = text.split_once('=') else {
            return Err(format!("`{text}` is not KEY=VALUE; keys are {FILTER_KEYS}"));
        };
        let value = value.to_owned();
        match key {
            // `status` is Docker's name of this filter.
            "state" | "status" => {
                let names = StateName::ALL.map(StateName::name);
                let name = names.into_iter().find(|name| *name == value);
                name.map(Self::State).ok_or_else(|| {
                    let names = names.join(", ");
                    format!("unknown state `{value}`: use one of {names}")
                })
            }
            "label" => Ok(match value.split_once('=') {
                Some((key, value)) => Self::Label(key.to_owned(), Some(value.to_owned())),
                None => Self::Label(value, None),
            }),
            "name" => Ok(Self::Name(value)),
            "template" => Ok(Self::Template(value)),
            "engine" => Ok(Self::Engine(value)),
            _ => Err(format!(
                "unknown filter `{key}`: the filters are {FILTER_KEYS}"
            )),
        }
    }
}
