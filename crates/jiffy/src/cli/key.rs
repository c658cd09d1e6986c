//! `jiffy key`.

use crate::units;
use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use std::time::Duration;

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
    /// Revoke a key; its sandboxes stay unless their end is asked for
    Revoke {
        /// Id of the key, or its name
        key: String,
        /// Kill its sandboxes too, also paused ones, and cancel its builds
        #[arg(long)]
        end: bool,
        /// Print the key as JSON instead of its id
        #[arg(long)]
        json: bool,
    },
    /// Give a key another secret and print that; it is shown this once
    Rotate {
        /// Id of the key, or its name
        key: String,
        /// Time for which the old secret stays good (default: none)
        #[arg(long, value_name = "DURATION", value_parser = units::duration)]
        overlap: Option<Duration>,
        /// New end of its time: after a duration (30d), or at a date (2027-01-31) or moment
        #[arg(long, value_name = "WHEN", value_parser = expiry)]
        expires: Option<u64>,
        /// Print the key with everything about it as JSON
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
    /// Scope of the key
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
    /// End of its time: after a duration (30d), or at a date (2027-01-31) or moment
    #[arg(long, value_name = "WHEN", value_parser = expiry)]
    pub expires: Option<u64>,
    /// Client address or network it may be used from (default: any); may be repeated
    #[arg(long, value_name = "CIDR")]
    pub allow_from: Vec<String>,
    /// Most sandboxes that are paused, or will be at their timeout
    #[arg(long, value_name = "N")]
    pub max_paused: Option<u32>,
    /// Most snapshots
    #[arg(long, value_name = "N")]
    pub max_snapshots: Option<u32>,
    /// Most templates, counted by tag
    #[arg(long, value_name = "N")]
    pub max_templates: Option<u32>,
    /// Most template builds that wait or run
    #[arg(long, value_name = "N")]
    pub max_builds: Option<u32>,
    /// Most disk space of paused sandboxes, snapshots, templates, uploads and build steps together
    /// (default: what `jiffy serve --default-key-disk` says)
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub max_disk: Option<u64>,
    /// Most requests and streams to its sandboxes at once (default: half of the host's)
    #[arg(long, value_name = "N")]
    pub max_exchanges: Option<u32>,
    /// Print the key with everything about it as JSON
    #[arg(long)]
    pub json: bool,
}

/// Parses the end of a key's time into milliseconds since 1970: a duration from now with its unit,
/// a date (its beginning in UTC), or a moment as in 2027-01-31T12:00:00Z.
fn expiry(text: &str) -> Result<u64, String> {
    let date = || text.parse::<Date>().ok()?.to_zoned(TimeZone::UTC).ok();
    let moment = text.parse::<Timestamp>().ok();
    let at = match moment.or_else(|| date().map(|date| date.timestamp())) {
        Some(at) => at,
        None if text.ends_with(|c: char| c.is_ascii_lowercase()) => {
            let after = units::duration(text)?;
            let at = Timestamp::now().checked_add(after);
            at.map_err(|_| format!("`{text}` is out of range"))?
        }
        None => {
            return Err(format!(
                "`{text}` is no end: write a duration as in 30d, or a date as in 2027-01-31"
            ));
        }
    };
    u64::try_from(at.as_millisecond()).map_err(|_| format!("`{text}` is out of range"))
}

/// Scope of an API key.
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
