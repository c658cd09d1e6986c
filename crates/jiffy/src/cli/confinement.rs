//! Options for the resource limits of VMMs.

use super::FeatureSwitch;
use clap::Args;
use jiffy_daemon::ConfinementOptions;

/// Options of `jiffy serve` for the resource limits of VMMs.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfinementArgs {
    /// Limit memory and tasks of each VMM with control groups
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "JIFFY_CGROUPS",
        value_name = "WHEN"
    )]
    pub cgroups: FeatureSwitch,
    /// Disk throughput limit of a sandbox in MB/s (10^6 bytes). 0: no limit
    #[arg(long, default_value_t = 400, value_name = "N")]
    pub disk_mbps: u32,
    /// Disk request limit of a sandbox per second. 0: no limit
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    pub disk_iops: u32,
}

impl ConfinementArgs {
    /// Returns the options of the daemon.
    pub fn options(&self) -> ConfinementOptions {
        ConfinementOptions {
            cgroups: self.cgroups.into(),
            disk_mbps: self.disk_mbps,
            disk_iops: self.disk_iops,
        }
    }
}
