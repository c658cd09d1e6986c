//! Confinement of VMMs.

use crate::{ConfinementOptions, FeatureMode};
use anyhow::Context;
use jiffy_engines::Host;
use jiffy_microvm_engine::Cgroups;

/// Prepares jail, control groups and disk limits for the VMMs of `host`.
/// Returns the control groups.
pub fn confine(host: &mut Host, options: &ConfinementOptions) -> anyhow::Result<Option<Cgroups>> {
    let vmm = &host.programs().vmm;
    vmm.prepare()?;
    match vmm.is_jailed() {
        true => tracing::info!("jail: on; each VMM is a user of its own"),
        false => tracing::warn!("jail: off; VMMs run as this user, with a system call filter only"),
    }
    let cgroups = match (options.cgroups, Cgroups::find()) {
        (FeatureMode::Off, _) => None,
        (_, Ok(Some(cgroups))) => Some(cgroups),
        (FeatureMode::Auto, Ok(None)) => {
            tracing::info!("cgroups: off; the host has no controller that limits anything");
            None
        }
        (FeatureMode::Auto, Err(e)) => {
            tracing::warn!("cgroups: off; memory of VMMs is not limited: {e}");
            None
        }
        (FeatureMode::On, found) => {
            let found = found.context("VMMs cannot be limited on this host")?;
            Some(found.context("this host has no control groups that limit anything")?)
        }
    };
    host.limit_vmms(cgroups.clone());
    let (mbps, iops) = (options.disk_mbps, options.disk_iops);
    tracing::info!("disks: {mbps} MB/s and {iops} requests/s for each sandbox (0: no limit)");
    host.limit_disks(options.disk_limits());
    Ok(cgroups)
}
