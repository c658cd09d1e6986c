//! Selects where the sandbox of `jiffy run` runs: in a daemon or in this process.

use crate::cli::EngineSelection;
use crate::cli::RunArgs;
use anyhow::Context;
use jiffy_client::{Client, is_remote};
use jiffy_daemon::local_daemon;
use jiffy_image::Home;

/// Source of the sandbox.
pub enum GuestSource {
    /// A daemon, with its warm pool, network and limits.
    Daemon {
        /// Client of the daemon.
        client: Client,
        /// Engine of the sandbox. `None` for the default engine of the daemon.
        engine: Option<&'static str>,
    },
    /// This process.
    ThisProcess,
}

/// Returns the source for the arguments: the remote daemon that they specify, or the daemon of this
/// host if it runs and has the requested engine, and otherwise this process. An image is always
/// imported by a daemon, which is started if necessary.
pub async fn choose(args: &RunArgs) -> anyhow::Result<GuestSource> {
    if args.no_daemon {
        return Ok(GuestSource::ThisProcess);
    }
    if is_remote(&args.host.server())? || args.image.is_some() {
        let client = jiffy_daemon::open_client(&args.host.server()).await?;
        let source = from_daemon(args, client).await?;
        return source.context(
            "the daemon does not support this engine: run `jiffy engines` for a list of its engines",
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

/// Returns the daemon as source if it has the requested engine.
async fn from_daemon(args: &RunArgs, client: Client) -> anyhow::Result<Option<GuestSource>> {
    let name = match args.engine.engine {
        EngineSelection::Auto => {
            let engine = None;
            return Ok(Some(GuestSource::Daemon { client, engine }));
        }
        EngineSelection::Microvm => jiffy_engine_api::MICROVM,
        EngineSelection::Gvisor => jiffy_engine_api::GVISOR,
    };
    let engines = client.engines().await?;
    let engine = engines.iter().find(|e| e.name == name && e.usable);
    Ok(engine.map(|engine| GuestSource::Daemon {
        client,
        // The request names the engine only if it is not the daemon's default engine.
        engine: (!engine.default).then_some(name),
    }))
}
