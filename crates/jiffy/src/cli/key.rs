//! Arguments of `jiffy key` and its subcommands.

use super::sandbox::AckMode;
use crate::units;
use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use std::time::Duration;

/// `jiffy key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Create a key and print its secret, which is not shown again
    Create(KeyCreateArgs),
    /// List keys
    Ls {
        /// Include revoked keys
        #[arg(short, long)]
        all: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Change the limits of a key. Other limits of the key remain
    Limits {
        /// Key: id or name
        key: String,
        /// New limits
        #[command(flatten)]
        limits: KeyLimitArgs,
        /// Remove a limit of the key, so that none or the default applies. Can be repeated
        #[arg(long, value_enum, value_name = "LIMIT")]
        remove: Vec<KeyLimitName>,
        /// Print the key as JSON
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key. Its sandboxes continue to run unless --end is given
    Revoke {
        /// Key: id or name
        key: String,
        /// Also kill its sandboxes, including paused ones, and cancel its builds
        #[arg(long)]
        end: bool,
        /// Print the key as JSON instead of its id
        #[arg(long)]
        json: bool,
    },
    /// Replace the secret of a key and print the new secret, which is not shown again
    Rotate {
        /// Key: id or name
        key: String,
        /// Time for which the previous secret remains valid [default: 0]
        #[arg(long, value_name = "DURATION", value_parser = units::duration)]
        overlap: Option<Duration>,
        /// New expiry: a duration (30d), a date (2027-01-31) or a time
        #[arg(long, value_name = "WHEN", value_parser = expiry)]
        expires: Option<u64>,
        /// Print the key and its settings as JSON
        #[arg(long)]
        json: bool,
    },
}

/// `jiffy key create`.
#[derive(Debug, Args)]
pub struct KeyCreateArgs {
    /// Name
    #[arg(long, default_value = "unnamed")]
    pub name: String,
    /// Scope of the key
    #[arg(long, value_enum, default_value_t = KeyScope::Create)]
    pub scope: KeyScope,
    /// Expiry: a duration (30d), a date (2027-01-31) or a time
    #[arg(long, value_name = "WHEN", value_parser = expiry)]
    pub expires: Option<u64>,
    /// Client address or network that may use the key [default: any]. Can be repeated
    #[arg(long, value_name = "CIDR")]
    pub allow_from: Vec<String>,
    /// Limits
    #[command(flatten)]
    pub limits: KeyLimitArgs,
    /// Print the key and its settings as JSON
    #[arg(long)]
    pub json: bool,
}

/// Limits of a key.
#[derive(Debug, Args)]
pub struct KeyLimitArgs {
    /// Maximum number of running sandboxes
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<u32>,
    /// Maximum number of virtual CPUs of running sandboxes
    #[arg(long, value_name = "N")]
    pub max_cpus: Option<u32>,
    /// Maximum memory of running sandboxes
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub max_memory: Option<u32>,
    /// Maximum number of sandboxes created within 60 s
    #[arg(long, value_name = "N")]
    pub creates_per_minute: Option<u32>,
    /// Maximum number of sandboxes that are paused, or will be paused at their timeout or when idle
    #[arg(long, value_name = "N")]
    pub max_paused: Option<u32>,
    /// Maximum number of snapshots
    #[arg(long, value_name = "N")]
    pub max_snapshots: Option<u32>,
    /// Maximum number of templates, counted by tag
    #[arg(long, value_name = "N")]
    pub max_templates: Option<u32>,
    /// Maximum number of queued and running template builds
    #[arg(long, value_name = "N")]
    pub max_builds: Option<u32>,
    /// Disk quota for paused sandboxes, snapshots, templates, uploads, build steps, functions and
    /// the sizes of volumes [default: value of `jiffy serve --default-key-disk`]
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub max_disk: Option<u64>,
    /// Maximum number of concurrent requests and streams to its sandboxes [default: half of the
    /// limit of the host]
    #[arg(long, value_name = "N")]
    pub max_exchanges: Option<u32>,
    /// Idle timeout of its new sandboxes, unless the create request or the template sets one: 90s,
    /// 30m, 12h
    #[arg(long, value_name = "TIME", value_parser = units::idle_timeout)]
    pub idle_timeout: Option<u64>,
    /// Time at which its snapshot requests are answered, unless a request sets the time. captured:
    /// the memory is captured but not yet written. stored: the files are complete [default: value
    /// of `jiffy serve --snapshot-ack`]
    #[arg(long, value_name = "WHEN")]
    pub snapshot_ack: Option<AckMode>,
}

/// Parses the expiry of a key into milliseconds since 1970. Accepts a duration from now with a
/// unit, a date (midnight UTC), or a time such as 2027-01-31T12:00:00Z.
fn expiry(text: &str) -> Result<u64, String> {
    let date = || text.parse::<Date>().ok()?.to_zoned(TimeZone::UTC).ok();
    let timestamp = text.parse::<Timestamp>().ok();
    let at = match timestamp.or_else(|| date().map(|date| date.timestamp())) {
        Some(at) => at,
        // A unit is required: a plain number could be meant as seconds or as a time since 1970.
        None if text.starts_with(|c: char| c.is_ascii_digit() || c == '.')
            && text.ends_with(|c: char| c.is_ascii_lowercase()) =>
        {
            let after = units::duration(text)?;
            let at = Timestamp::now().checked_add(after);
            at.map_err(|_| format!("`{text}` is out of range"))?
        }
        None => {
            return Err(format!(
                "`{text}` is not an expiry: use a duration such as 30d or a date such as 2027-01-31"
            ));
        }
    };
    u64::try_from(at.as_millisecond()).map_err(|_| format!("`{text}` is out of range"))
}

/// Limit that `jiffy key limits` removes. Named like its option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)] // The options have descriptions.
pub enum KeyLimitName {
    MaxSandboxes,
    MaxCpus,
    MaxMemory,
    CreatesPerMinute,
    MaxPaused,
    MaxSnapshots,
    MaxTemplates,
    MaxBuilds,
    MaxExchanges,
    MaxDisk,
    IdleTimeout,
    SnapshotAck,
}

impl From<KeyLimitName> for jiffy_api_types::KeyLimit {
    fn from(name: KeyLimitName) -> Self {
        match name {
            KeyLimitName::MaxSandboxes => Self::Sandboxes,
            KeyLimitName::MaxCpus => Self::Vcpus,
            KeyLimitName::MaxMemory => Self::MemoryMb,
            KeyLimitName::CreatesPerMinute => Self::CreatesPerMinute,
            KeyLimitName::MaxPaused => Self::Paused,
            KeyLimitName::MaxSnapshots => Self::Snapshots,
            KeyLimitName::MaxTemplates => Self::Templates,
            KeyLimitName::MaxBuilds => Self::Builds,
            KeyLimitName::MaxExchanges => Self::Exchanges,
            KeyLimitName::MaxDisk => Self::DiskMb,
            KeyLimitName::IdleTimeout => Self::IdleTimeout,
            KeyLimitName::SnapshotAck => Self::SnapshotAck,
        }
    }
}

/// Scope of an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KeyScope {
    /// All operations on this host, including sandboxes, templates and pools of other keys
    Admin,
    /// Own sandboxes, snapshots, templates, volumes and functions
    Create,
    /// Read-only, without secrets
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_expiry_is_a_duration_a_date_or_a_time() {
        assert_eq!(expiry("1970-01-02"), Ok(86_400_000));
        assert_eq!(expiry("1970-01-01T00:00:01.5Z"), Ok(1_500));
        assert_eq!(expiry("1970-01-01T01:00:00+01:00"), Ok(0));
        let now = Timestamp::now().as_millisecond() as u64;
        let month = expiry("30d").unwrap() - now;
        assert!((2_592_000_000..2_592_060_000).contains(&month), "{month}");
        for bad in [
            "",
            "30",
            "soon",
            "-1d",
            "2027-13-01",
            "1960-01-01",
            "99999999999d",
        ] {
            assert!(expiry(bad).is_err(), "{bad}");
        }
    }
}
