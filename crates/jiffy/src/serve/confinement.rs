//! What the daemon's VMMs may use of the host, as it was asked for.

use super::network::Wanted;
use anyhow::Context;
use clap::Args;
use jiffy_host::Host;
use jiffy_microvm::Cgroups;

/// Options of `jiffy serve` about the limits of VMMs.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfinementArgs {
    /// Whether memory and tasks of each VMM are limited by control groups
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "JIFFY_CGROUPS",
        value_name = "WHEN"
    )]
    pub cgroups: Wanted,
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
    Ok(())
}
