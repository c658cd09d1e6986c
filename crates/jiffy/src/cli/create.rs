//! Arguments of `jiffy create`.

use super::{HostArgs, SiteArgs, SizeArgs};
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_api_types::{NewVolumeMount, OnTimeout, Prefetch};
use jiffy_engine_api::EngineName;
use std::time::Duration;

/// `jiffy create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy create                                       from the template base, until killed
  jiffy create --cpu 2 --memory 4Gi --name web --label team=a
  jiffy create --timeout 1h --on-timeout pause       paused after an hour
  jiffy create --idle-timeout 10m                    paused after 10 minutes without use
  jiffy create --from before-upgrade                 from a snapshot
  jiffy create --image python:3.12 --cpu 2 --memory 4Gi --persist
  jiffy create --network off --engine gvisor
  jiffy create -v datasets:/data:ro -v results:/results

Timeouts:
  Without --timeout (or with --persist) a sandbox runs until it is killed. The timeout starts when
  the sandbox starts, and starts again when it is resumed. --on-timeout selects the action.
  Sandboxes that are created through the API have a timeout of 300 s unless the request sets
  another timeout.")]
pub struct CreateArgs {
    /// Template to start from
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Image of a registry to start from. It is imported as a template unless the image was
    /// imported before and has not changed
    #[arg(long, value_name = "REF", conflicts_with_all = ["template", "from"])]
    pub image: Option<String>,
    /// Snapshot to start from instead: id, unique prefix of the id, or name
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["template", "cpus", "memory", "disk"])]
    pub from: Option<String>,
    /// Name of the sandbox, usable in place of its id. Unique for its owner
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Label for `jiffy ls --filter label=KEY=VALUE` (`metadata` in the API)
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,
    /// Label that the host of the sandbox must have, in a fleet. Can be repeated
    #[arg(long = "host-label", value_name = "NAME=VALUE", value_parser = label)]
    pub host_labels: Vec<(String, String)>,
    /// Resources
    #[command(flatten)]
    pub size: SizeArgs,
    /// Environment variable for all commands. Without =VALUE, its current value is used
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Volume of `jiffy volume` to mount in a directory, which is created if necessary. Can be
    /// repeated
    #[arg(short, long = "volume", value_name = "VOLUME:PATH[:ro]", value_parser = volume)]
    pub volumes: Vec<NewVolumeMount>,
    /// Timeout: 90s, 30m, 12h, 2d
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub timeout: Option<Duration>,
    /// Action when the timeout expires
    #[arg(
        long,
        value_name = "ACTION",
        requires = "timeout",
        value_enum,
        default_value_t
    )]
    pub on_timeout: TimeoutAction,
    /// Pause the sandbox after this time without use: 90s, 30m, 12h. A request resumes it. 0 means
    /// never [default: the idle timeout of the template, or of the key]
    #[arg(long, value_name = "TIME", value_parser = units::idle_timeout)]
    pub idle_timeout: Option<u64>,
    /// No timeout: run until killed (default)
    #[arg(long, conflicts_with = "timeout")]
    pub persist: bool,
    /// Internet access. Incoming connections are not affected
    #[arg(long, value_name = "on|off", value_enum, default_value_t)]
    pub network: NetworkSwitch,
    /// Private network to join. Sandboxes of the same key in a network reach each other by name
    #[arg(long, value_name = "NETWORK", value_parser = network)]
    pub join: Option<String>,
    /// Isolation engine, see `jiffy engines` [default: the engine of the snapshot, otherwise of the
    /// daemon]
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<EngineName>,
    /// Memory to fetch before the start if the snapshot is only in the shared store. The remaining
    /// memory is fetched while the sandbox runs
    #[arg(long, value_name = "MEMORY", value_enum, requires = "from")]
    pub prefetch: Option<PrefetchMode>,
    /// Certificate authorities and proxy.
    #[command(flatten)]
    pub site: SiteArgs,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Memory that is fetched before a sandbox starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefetchMode {
    /// Memory that is accessed first after the restore
    WorkingSet,
    /// All memory
    All,
}

impl From<PrefetchMode> for Prefetch {
    fn from(mode: PrefetchMode) -> Self {
        match mode {
            PrefetchMode::WorkingSet => Self::WorkingSet,
            PrefetchMode::All => Self::All,
        }
    }
}

/// Action when the timeout of a sandbox expires.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum TimeoutAction {
    /// Kill the sandbox
    #[default]
    Kill,
    /// Pause the sandbox
    Pause,
    /// Pause the sandbox without its memory: it boots from its disk at the next resume
    PauseDiskOnly,
}

impl From<TimeoutAction> for OnTimeout {
    fn from(at: TimeoutAction) -> Self {
        match at {
            TimeoutAction::Kill => Self::Kill,
            TimeoutAction::Pause | TimeoutAction::PauseDiskOnly => Self::Pause,
        }
    }
}

/// Internet access of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum NetworkSwitch {
    /// Internet access
    #[default]
    On,
    /// No internet access
    Off,
}

/// Parses `KEY=VALUE`.
fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not KEY=VALUE")),
    }
}

/// Parses the name of a private network, which the API requires to have this form.
fn network(text: &str) -> Result<String, String> {
    let is_valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if (1..=63).contains(&text.len())
        && text.bytes().all(is_valid)
        && !text.starts_with('-')
        && !text.ends_with('-')
    {
        return Ok(text.to_owned());
    }
    Err(
        "use 1 to 63 lower-case letters, digits and `-`, not starting or ending with `-`"
            .to_owned(),
    )
}

/// Parses `VOLUME:PATH[:ro]`.
fn volume(text: &str) -> Result<NewVolumeMount, String> {
    // `:rw` is the default, and accepted because Docker has it.
    let (rest, read_only) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, Some(true)),
        None => (text.strip_suffix(":rw").unwrap_or(text), None),
    };
    match rest.split_once(':') {
        Some((name, _)) if name.contains('/') || name == "." => Err(format!(
            "`{name}` is not the name of a volume (see `jiffy volume`). `jiffy cp` and `jiffy run \
             -v` copy directories of this host"
        )),
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => Ok(NewVolumeMount {
            name: name.to_owned(),
            path: path.to_owned(),
            read_only,
        }),
        _ => Err(format!(
            "`{text}` is not VOLUME:PATH or VOLUME:PATH:ro, for example datasets:/data"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    #[test]
    fn an_invalid_name_of_a_network_is_reported_with_its_option() {
        let longest = "a".repeat(63);
        for name in ["a", "team-1", longest.as_str()] {
            assert_eq!(network(name), Ok(name.to_owned()));
        }
        let too_long = "a".repeat(64);
        for name in ["", "Bad Name", "-a", "a-", "a_b", "é", too_long.as_str()] {
            let join = format!("--join={name}");
            let error = Cli::try_parse_from(["jiffy", "create", join.as_str()]).unwrap_err();
            assert!(error.to_string().contains("--join"), "{error}");
        }
    }

    #[test]
    fn volumes_have_a_name_and_an_absolute_path() {
        let mount = |read_only| NewVolumeMount {
            name: "datasets".to_owned(),
            path: "/data".to_owned(),
            read_only,
        };
        assert_eq!(volume("datasets:/data"), Ok(mount(None)));
        assert_eq!(volume("datasets:/data:rw"), Ok(mount(None)));
        assert_eq!(volume("datasets:/data:ro"), Ok(mount(Some(true))));
        for bad in ["datasets", "datasets:data", ":/data", "datasets:"] {
            let error = volume(bad).unwrap_err();
            assert!(error.contains("is not VOLUME:PATH"), "{error}");
        }
        for path in ["./src:/work", "/srv:/work", ".:/work"] {
            let error = volume(path).unwrap_err();
            assert!(error.contains("is not the name of a volume"), "{error}");
        }
    }
}
