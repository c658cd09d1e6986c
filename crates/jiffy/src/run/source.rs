//! Choice of the source of a run's guest: the one place that decides.

use crate::cli::EngineSelection;
use crate::cli::RunArgs;
use anyhow::Context;
use jiffy_client::{Client, is_remote};
use jiffy_daemon::local_daemon;
use jiffy_image::Home;

/// Maker of a run's guest.
pub enum GuestSource {
    /// A daemon: warm pool, network and limits are its.
    Daemon {
        /// Asked for the sandbox.
        client: Client,
        /// Engine of the sandbox; none: the daemon's usual one.
        engine: Option<&'static str>,
    },
    /// This process.
    ThisProcess,
}

/// The daemon that is asked for, or this host's if one runs and has the engine that is wanted;
/// else this process. An image is imported by a daemon, which is started for it.
pub async fn choose(args: &RunArgs) -> anyhow::Result<GuestSource> {
    if args.no_daemon {
        return Ok(GuestSource::ThisProcess);
    }
    if is_remote(&args.host.server())? || args.image.is_some() {
        let client = jiffy_daemon::open_client(&args.host.server()).await?;
        let found = from_daemon(args, client).await?;
        return found.context(
            "that daemon cannot make sandboxes on this engine: `jiffy engines` shows which it can",
        );
    }
    let home = Home::locate()?;
    let Some(stream) = local_daemon::connect(&home).await else {
        return Ok(GuestSource::ThisProcess);
    };
    let client = jiffy_daemon::local_daemon::client_over(&home, stream).await?;
    Ok(from_daemon(args, client)
        .await?
        .unwrap_or(GuestSource::ThisProcess))
}

/// The daemon, if it can make sandboxes on the engine that is wanted.
async fn from_daemon(args: &RunArgs, client: Client) -> anyhow::Result<Option<GuestSource>> {
    let wanted = match args.engine.engine {
        EngineSelection::Auto => {
            let engine = None;
            return Ok(Some(GuestSource::Daemon { client, engine }));
        }
        EngineSelection::Microvm => jiffy_engine_api::MICROVM,
        EngineSelection::Gvisor => jiffy_engine_api::GVISOR,
    };
    let engines = client.engines().await?;
    let found = engines.iter().find(|e| e.name == wanted && e.usable);
    Ok(found.map(|found| GuestSource::Daemon {
        client,
        engine: (!found.default).then_some(wanted),
    }))
}
