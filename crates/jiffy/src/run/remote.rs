//! `jiffy run` in a sandbox of a daemon. A *lease* is a connection to the daemon. The daemon
//! removes the sandbox when this process releases its lease or exits.

use super::outcome::{GuestBoot, Outcome};
use super::{PreparedCommand, Signals, prepare};
use crate::cli::FeatureSwitch;
use crate::cli::RunArgs;
use crate::sandbox::exec::RemoteSandbox;
use crate::sandbox::template_of_image;
use jiffy_client::{Client, NewSandbox, SandboxSettings};
use jiffy_engines::Host;
use jiffy_image::Home;
use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

/// Timeout of the sandbox in seconds until its lease starts. The lease extends the timeout.
const UNLEASED_TIMEOUT_S: u32 = 60;
/// Timeout for the response to an abandoned create, which has the id of the sandbox to remove.
const ABANDONED_CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command in a new sandbox and returns its outcome. The daemon removes the sandbox in the
/// background.
pub async fn run(
    prepared: PreparedCommand<'_>,
    client: &Client,
    engine: Option<&str>,
) -> anyhow::Result<Outcome> {
    let args = prepared.args;
    let template = match &args.image {
        Some(image) => template_of_image(client, image, args.exec.json).await?,
        None => args.template.clone(),
    };
    // A template of another host, or of an image, is built by the daemon.
    if !client.is_remote() && args.image.is_none() {
        prepare_template(args)?;
    }
    let mut signals = Signals::new()?;
    let size = &args.size;
    let settings = SandboxSettings {
        name: args.name.clone(),
        internet: (args.network == FeatureSwitch::Off).then_some(false),
        engine: engine.map(str::to_owned),
        ..SandboxSettings::default()
    };
    let new_sandbox = NewSandbox::of(template, BTreeMap::new())
        .with_partial_size(size.cpus, size.memory, size.disk)
        .with_timeout_s(UNLEASED_TIMEOUT_S)
        .with_settings(settings)
        .with_site(args.site.read()?);
    // The future is pinned, so that the response can still be awaited after a signal.
    let mut create = pin!(client.create(&new_sandbox));
    let sandbox = tokio::select! {
        sandbox = &mut create => sandbox?,
        number = signals.next() => {
            // The daemon creates the sandbox even if this process disconnects. Without a response
            // in time, the sandbox is removed after its timeout.
            let response = tokio::time::timeout(ABANDONED_CREATE_TIMEOUT, create).await;
            if let Ok(Ok(sandbox)) = response {
                client.delete(&sandbox.record.id, true).await?;
            }
            return Ok(Outcome::interrupted(number));
        }
    };
    let id = sandbox.record.id.clone();
    let boot = GuestBoot::from(&sandbox.record);
    let mut has_lease = false;
    let outcome = {
        // The lease is established while the command starts, and is released at the end of this
        // block.
        let lease = async {
            match client.lease(&id).await {
                Ok(lease) => {
                    has_lease = true;
                    // The lease is held until this future is dropped.
                    let _lease = lease;
                    std::future::pending().await
                }
                Err(e) => e,
            }
        };
        let target = RemoteSandbox::leased(client.clone(), sandbox)?;
        tokio::select! {
            outcome = prepared.run_in(&target, &mut signals) => outcome,
            error = lease => Err(error.context("cannot obtain a lease for the sandbox")),
        }
    };
    // If the lease was granted, its release above makes the daemon remove the sandbox.
    if !has_lease {
        // The error is ignored: the sandbox may have been removed already.
        let _ = client.delete(&id, true).await;
    }
    let mut outcome = outcome?;
    outcome.boot = Some(boot);
    Ok(outcome)
}

/// Builds a missing template of this host in this process, which can show progress, and not in the
/// daemon.
fn prepare_template(args: &RunArgs) -> anyhow::Result<()> {
    let home = Home::locate()?;
    if home.path().join("templates").join(&args.template).exists() {
        return Ok(());
    }
    prepare(&Host::open()?, args.engine, &args.template).map(drop)
}
