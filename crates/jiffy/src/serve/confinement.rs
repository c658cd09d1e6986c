//! Confinement of the daemon's VMMs, from the command line.

use super::network::Wanted;
use anyhow::Context;
use clap::Args;
use jiffy_host::Host;
use jiffy_microvm::Cgroups;
use jiffy_proto::vm::DiskLimits;
use std::num::NonZeroU64;

/// Options of `jiffy serve` about the limits of VMMs.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfinementArgs {
    /// Limit memory and tasks of each VMM by control groups
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "JIFFY_CGROUPS",
        value_name = "WHEN"
    )]
    pub cgroups: Wanted,
    /// MB per second (10^6 bytes) that a sandbox reads from and writes to its disks; 0: as many as
    /// it can
    #[arg(long, default_value_t = 400, value_name = "N")]
    pub disk_mbps: u32,
    /// Requests per second that a sandbox makes of its disks; 0: as many as it can
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    pub disk_iops: u32,
}

impl ConfinementArgs {
    fn disk_limits(&self) -> DiskLimits {
        DiskLimits {
            bytes_per_s: NonZeroU64::new(u64::from(self.disk_mbps) * 1_000_000),
            requests_per_s: NonZeroU64::new(self.disk_iops.into()),
        }
    }
}

/// Prepares what the VMMs of `host` live in.
pub fn confine(host: &mut Host, args: &ConfinementArgs) -> anyhow::Result<()> {
    let vmm = &host.programs().vmm;
    vmm.prepare()?;
    match vmm.is_jailed() {
        true => tracing::info!("jail: on; each VMM is a user of its own"),
        false => tracing::warn!("jail: off; VMMs run as this user, with a system call filter only"),
    }
    let cgroups = match (args.cgroups, Cgroups::find()) {
        (Wanted::Off, _) => None,
        (_, Ok(Some(cgroups))) => Some(cgroups),
        (Wanted::Auto, Ok(None)) => {
            tracing::info!("cgroups: off; the host has no controller that limits anything");
            None
        }
        (Wanted::Auto, Err(e)) => {
            tracing::warn!("cgroups: off; memory of VMMs is not limited: {e}");
            None
        }
        (Wanted::On, found) => {
            let found = found.context("VMMs cannot be limited on this host")?;
            Some(found.context("this host has no control groups that limit anything")?)
        }
    };
    host.limit_vmms(cgroups);
    let (mbps, iops) = (args.disk_mbps, args.disk_iops);
    tracing::info!("disks: {mbps} MB/s and {iops} requests/s for each sandbox (0: no limit)");
    host.limit_disks(args.disk_limits());
    Ok(())
}
