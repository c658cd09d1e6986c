//! A run in a sandbox of a daemon's, which lives as long as this process holds its lease.

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

/// Seconds that a sandbox has until its lease begins; the lease extends them.
const UNLEASED_TIMEOUT_S: u32 = 60;
/// Time a create that is given up has to say which sandbox it made.
const ABANDONED_CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command and says what came of it. The sandbox is removed behind the answer.
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
    let wanted = NewSandbox::of(template, BTreeMap::new())
        .with_partial_size(size.cpus, size.memory, size.disk)
        .with_timeout_s(UNLEASED_TIMEOUT_S)
        .with_settings(settings)
        .with_site(args.site.read()?);
    let mut creating = pin!(client.create(&wanted));
    let sandbox = tokio::select! {
        made = &mut creating => made?,
        number = signals.next() => {
            // The daemon makes it whether we listen or not.
            if let Ok(Ok(made)) = tokio::time::timeout(ABANDONED_CREATE_TIMEOUT, creating).await {
                client.delete(&made.record.id, true).await?;
            }
            return Ok(Outcome::interrupted(number));
        }
    };
    let id = sandbox.record.id.clone();
    let boot = GuestBoot::from(&sandbox.record);
    let mut leased = false;
    let outcome = {
        // It comes up beside the command, and ends with this block.
        let lease = async {
            match client.lease(&id).await {
                Ok(lease) => {
                    leased = true;
                    let _lease = lease;
                    std::future::pending().await
                }
                Err(e) => e,
            }
        };
        let place = RemoteSandbox::leased(client.clone(), sandbox)?;
        tokio::select! {
            outcome = prepared.run_in(&place, &mut signals) => outcome,
            failed = lease => Err(failed.context("the sandbox cannot be held")),
        }
    };
    if !leased {
        // One that is gone already is as it should be.
        let _ = client.delete(&id, true).await;
    }
    let mut outcome = outcome?;
    outcome.boot = Some(boot);
    Ok(outcome)
}

/// Makes a template of this host that is missing here, where progress can be shown, rather than in
/// the daemon.
fn prepare_template(args: &RunArgs) -> anyhow::Result<()> {
    let home = Home::locate()?;
    if home.path().join("templates").join(&args.template).exists() {
        return Ok(());
    }
    prepare(&Host::open()?, args.engine, &args.template).map(drop)
}
