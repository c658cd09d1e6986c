//! `jiffy webhook`: creates, lists and removes webhooks.
//!
//! A *webhook* is a URL to which the daemon sends events. A *delivery* is one event that must be
//! sent to one webhook.

use crate::cli::{WebhookCommand, WebhookCreateArgs, WebhookNames};
use crate::columns::{Align, Table};
use crate::runtime;
use crate::secret_input;
use anyhow::bail;
use hyper::{Method, Uri};
use jiffy_api_types::{
    LifecycleEventType, MAX_WEBHOOK_SECRET, NewWebhook, Webhook, WebhookDelivery,
    WebhookDeliveryState, WebhookUpdate,
};
use jiffy_client::{Client, terminal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::process::ExitCode;

/// Path of calls for webhooks.
const CALL: &str = "/events/webhooks";

/// Runs a subcommand.
pub fn run(command: &WebhookCommand) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        match command {
            WebhookCommand::Create(args) => create(args).await,
            WebhookCommand::Ls { json, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                list(&client, *json).await
            }
            WebhookCommand::Enable(names) => enable(names, true).await,
            WebhookCommand::Disable(names) => enable(names, false).await,
            WebhookCommand::Deliveries {
                webhook,
                failed,
                json,
                host,
            } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                deliveries(&client, webhook, *failed, *json).await
            }
            WebhookCommand::Rm(names) => {
                let client = jiffy_daemon::open_client(&names.host.server()).await?;
                for webhook in &names.webhooks {
                    let () = client.call(Method::DELETE, &path(webhook), &()).await?;
                    outln!("{}", terminal::line(webhook));
                }
                Ok(())
            }
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn path(id: &str) -> String {
    format!("{CALL}/{}", utf8_percent_encode(id, NON_ALPHANUMERIC))
}

/// Creates a webhook. Its name defaults to the host of its URL.
async fn create(args: &WebhookCreateArgs) -> anyhow::Result<()> {
    let mut events = Vec::new();
    for name in &args.event {
        events.push(event_type(name)?);
    }
    if events.is_empty() {
        events.extend(LifecycleEventType::NAMES.map(|(_, kind)| kind));
    }
    let secret = secret_input::read(
        args.secret_file.as_deref(),
        "secret of signatures",
        "--secret-file",
        MAX_WEBHOOK_SECRET,
    )?;
    let host = args.url.parse::<Uri>().ok();
    let host = host.and_then(|url| Some(url.host()?.to_owned()));
    let new = NewWebhook {
        name: args
            .name
            .clone()
            .or(host)
            .unwrap_or_else(|| args.url.clone()),
        url: args.url.clone(),
        enabled: true,
        events,
        signature_secret: secret.to_string(),
    };
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let created: Webhook = client.call(Method::POST, CALL, &new).await?;
    if args.json {
        outln!("{}", terminal::json(&created)?);
    } else {
        outln!("{}", created.id);
    }
    Ok(())
}

/// Parses the last part of a type's name, or the whole name.
fn event_type(name: &str) -> anyhow::Result<LifecycleEventType> {
    let mut all = LifecycleEventType::NAMES.into_iter();
    let is_named = |full: &str| full == name || full.rsplit('.').next() == Some(name);
    match all.find(|(full, _)| is_named(full)) {
        Some((_, kind)) => Ok(kind),
        None => bail!(
            "`{name}` is not a type of events: use created, updated, paused, resumed, checkpointed \
             or killed"
        ),
    }
}

/// Enables the webhooks if `enabled` is true, or disables them. Prints their ids.
async fn enable(names: &WebhookNames, enabled: bool) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&names.host.server()).await?;
    let update = WebhookUpdate {
        enabled: Some(enabled),
        ..WebhookUpdate::default()
    };
    for webhook in &names.webhooks {
        let changed: Webhook = client.call(Method::PATCH, &path(webhook), &update).await?;
        outln!("{}", changed.id);
    }
    Ok(())
}

/// Prints all webhooks.
async fn list(client: &Client, json: bool) -> anyhow::Result<()> {
    let webhooks: Vec<Webhook> = client.call(Method::GET, CALL, &()).await?;
    if json {
        outln!("{}", terminal::json(&webhooks)?);
        return Ok(());
    }
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("ENABLED", Align::Left),
        ("DROPPED", Align::Right),
        ("EVENTS", Align::Left),
        ("URL", Align::Left),
    ]);
    for webhook in &webhooks {
        let short = |kind: &LifecycleEventType| kind.name().rsplit('.').next();
        let events: Vec<&str> = webhook.events.iter().filter_map(short).collect();
        table.row([
            webhook.id.clone(),
            terminal::line(&webhook.name).to_string(),
            if webhook.enabled { "yes" } else { "no" }.to_owned(),
            webhook.dropped.to_string(),
            events.join(","),
            terminal::line(&webhook.url).to_string(),
        ]);
    }
    out!("{}", table.text());
    Ok(())
}

/// Prints the pending and failed deliveries of a webhook, or only the failed ones.
async fn deliveries(client: &Client, id: &str, failed: bool, json: bool) -> anyhow::Result<()> {
    let state = if failed { "&state=failed" } else { "" };
    let path = format!("{}/deliveries?limit=100{state}", path(id));
    let deliveries: Vec<WebhookDelivery> = client.all_pages(&path).await?;
    if json {
        outln!("{}", terminal::json(&deliveries)?);
        return Ok(());
    }
    let mut table = Table::new([
        ("ID", Align::Right),
        ("EVENT", Align::Left),
        ("SANDBOX", Align::Left),
        ("STATE", Align::Left),
        ("ATTEMPTS", Align::Right),
        ("NEXT", Align::Left),
        ("ERROR", Align::Left),
    ]);
    for delivery in &deliveries {
        let state = match delivery.state {
            WebhookDeliveryState::Pending => "pending",
            WebhookDeliveryState::Failed => "failed",
        };
        let next = delivery.next_attempt_at.as_ref();
        table.row([
            delivery.id.to_string(),
            delivery.event_type.name().to_owned(),
            delivery.sandbox_id.clone(),
            state.to_owned(),
            delivery.attempts.to_string(),
            next.map_or_else(String::new, ToString::to_string),
            terminal::line(delivery.error.as_deref().unwrap_or_default()).to_string(),
        ]);
    }
    out!("{}", table.text());
    Ok(())
}
