//! Where the guest of a run comes from: the one place that decides.

use crate::cli::RunArgs;
use crate::client::{self, Client};
use crate::daemon;
use crate::serve::engine::Wish;
use jiffy_image::Home;

/// Maker of a run's guest.
pub enum GuestSource {
    /// A daemon: warm pool, network and limits are its.
    Daemon(Client),
    /// This process.
    Own,
}

/// The daemon that is asked for, or this host's if one runs and has the engine that is wanted;
/// else this process.
pub async fn choose(args: &RunArgs) -> anyhow::Result<GuestSource> {
    if args.no_daemon {
        return Ok(GuestSource::Own);
    }
    if client::is_elsewhere(&args.host)? {
        let client = Client::open(&args.host).await?;
        anyhow::ensure!(
            has_engine(args, &client).await?,
            "the sandboxes of that daemon are on another engine: leave `--engine` out"
        );
        return Ok(GuestSource::Daemon(client));
    }
    let home = Home::locate()?;
    let Some(stream) = daemon::reach(&home).await else {
        return Ok(GuestSource::Own);
    };
    let client = Client::over(&home, stream).await?;
    Ok(match has_engine(args, &client).await? {
        true => GuestSource::Daemon(client),
        false => GuestSource::Own,
    })
}

/// Whether new sandboxes of a daemon are on the engine that is wanted.
async fn has_engine(args: &RunArgs, client: &Client) -> anyhow::Result<bool> {
    let wanted = match args.engine.engine {
        Wish::Auto => return Ok(true),
        Wish::Microvm => jiffy_host::MICROVM,
        Wish::Gvisor => jiffy_host::GVISOR,
    };
    let engines = client.engines().await?;
    Ok(engines.iter().any(|e| e.default && e.name == wanted))
}
