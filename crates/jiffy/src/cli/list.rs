//! Lists of sandboxes, narrowed.

use super::HostArgs;
use clap::Args;
use jiffy_host::SandboxState;

/// `jiffy ls`.
#[derive(Debug, Args)]
#[command(after_help = "Filters (`*` stands for anything):
  state=paused      creating, running, paused, broken or killed
  label=KEY         it has this label; label=KEY=VALUE: with this value
  name=web-*        its name
  template=base     its template, with any tag unless one is named
  engine=gvisor     what isolates it
  Several of the same kind widen the list, of different kinds and labels narrow it.

Examples:
  jiffy ls --filter state=paused --filter state=broken
  jiffy rm $(jiffy ls -q --filter label=team=a)")]
pub struct LsArgs {
    /// Also those that were killed, for an hour
    #[arg(short, long)]
    pub all: bool,
    /// Only those that fit
    #[arg(short, long = "filter", value_name = "KEY=VALUE", value_parser = Filter::parse)]
    pub filters: Vec<Filter>,
    /// Only their ids
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// A condition that sandboxes of a list meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filter {
    /// It is in this state.
    State(&'static str),
    /// It has this label, perhaps with this value.
    Label(String, Option<String>),
    /// Its name fits this pattern.
    Name(String),
    /// Its template fits this pattern.
    Template(String),
    /// This engine isolates it.
    Engine(String),
}

impl Filter {
    fn parse(text: &str) -> Result<Self, String> {
        const FILTER_KEYS: &str = "state, label, name, template and engine";
        let Some((key, value)) = text.split_once('=') else {
            return Err(format!("`{text}` is not KEY=VALUE; keys are {FILTER_KEYS}"));
        };
        let value = value.to_owned();
        match key {
            "state" | "status" => {
                let known = SandboxState::NAMES.into_iter().find(|name| *name == value);
                known.map(Self::State).ok_or_else(|| {
                    let names = SandboxState::NAMES.join(", ");
                    format!("there is no state `{value}`: there are {names}")
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
                "there is no filter `{key}`: there are {FILTER_KEYS}"
            )),
        }
    }
}
