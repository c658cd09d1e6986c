//! `jiffy front`: runs a front of a fleet, a process without sandboxes that passes connections of
//! clients to the hosts.

use super::join::member_of;
use super::local::host_name;
use crate::cli::FrontArgs;
use anyhow::Context;
use jiffy_daemon::{FrontOptions, LogOptions};
use jiffy_fleet::HostFacts;
use jiffy_fleet::join::{JoinOptions, join_fleet};
use jiffy_fleet::settings::{Role, Settings};
use jiffy_image::Home;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;

/// Joins the fleet if necessary, and runs the front until it is stopped.
pub fn run(args: &FrontArgs) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    match (Settings::load(home.path())?, &args.join) {
        (Some(settings), _) if settings.role == Role::Front => {}
        (Some(settings), _) => anyhow::bail!(
            "this data directory is host {} of fleet {}: run `jiffy serve`, or use another data \
             directory (JIFFY_HOME) for a front",
            settings.member,
            settings.fleet
        ),
        (None, Some(join)) => join_as_front(&home, join, args.name.as_deref())?,
        (None, None) => anyhow::bail!(
            "this data directory does not belong to a front: join a fleet with `jiffy front --join URL \
             TOKEN`; `jiffy fleet token` on a host prints address and token"
        ),
    }
    jiffy_daemon::run_front(&FrontOptions {
        listen: args.listen,
        tls: args.tls(),
        log: LogOptions {
            format: args.log_format.into(),
            file: None,
        },
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Makes this data directory a front of a fleet: a process that passes connections to the hosts.
fn join_as_front(home: &Home, join: &[String], name: Option<&str>) -> anyhow::Result<()> {
    let [url, token] = join else {
        anyhow::bail!("--join needs the address of a member and a token");
    };
    let options = JoinOptions {
        member: member_of(url)?,
        token: token.parse().context("cannot join the fleet")?,
        name: name.map_or_else(host_name, str::to_owned),
        // Members do not connect to fronts.
        listen: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        address: String::new(),
        role: Role::Front,
        import: false,
    };
    let facts = HostFacts::new(env!("CARGO_PKG_VERSION"));
    let joined = crate::runtime()?.block_on(join_fleet(home.path(), &options, facts))?;
    outln!(
        "joined fleet {} as front {} ({}), admitted by {}",
        joined.settings.fleet,
        joined.settings.member,
        joined.settings.name,
        joined.admitted_by
    );
    Ok(())
}
