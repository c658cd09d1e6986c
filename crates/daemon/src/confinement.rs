//! Confinement of VMMs (the processes that run microVMs): jail, control groups and disk limits. The
//! daemon prepares them once at its start.

use crate::{ConfinementOptions, FeatureMode};
use anyhow::Context;
use jiffy_engines::Host;
use jiffy_microvm_engine::Cgroups;

/// Prepares the jail, control groups and disk limits for the VMMs of `host`. Returns the control
/// groups.
pub fn confine(host: &mut Host, options: &ConfinementOptions) -> anyhow::Result<Option<Cgroups>> {
    let vmm = &host.programs().vmm;
    vmm.prepare()?;
    if vmm.is_jailed() {
        tracing::info!("jail enabled: each VMM runs as a separate user");
    } else {
        tracing::warn!("jail disabled: VMMs run as this user, with a system call filter only");
    }
    let cgroups = match options.cgroups {
        // Do not open the groups: closing them waits for the groups of other daemons.
        FeatureMode::Off => None,
        FeatureMode::Auto => match Cgroups::find() {
            Ok(Some(cgroups)) => Some(cgroups),
            Ok(None) => {
                tracing::info!(
                    "control groups disabled: the host has no memory or pids controller"
                );
                None
            }
            Err(e) => {
                tracing::warn!(error = %e, "control groups disabled: VMM processes are not limited");
                None
            }
        },
        FeatureMode::On => {
            let cgroups = Cgroups::find().context("cannot limit VMMs on this host")?;
            Some(cgroups.context("this host has no memory or pids controller")?)
        }
    };
    host.limit_vmms(cgroups.clone());
    let (mbps, iops) = (options.disk_mbps, options.disk_iops);
    tracing::info!(mbps, iops, "disk limits per sandbox (0: no limit)");
    host.limit_disks(options.disk_limits());
    Ok(cgroups)
}
