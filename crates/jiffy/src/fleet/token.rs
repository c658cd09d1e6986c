//! `jiffy fleet token`.

use super::init::open;
use crate::cli::{FleetTokenArgs, StoreTargetArgs};
use jiffy_fleet::settings::Settings;
use jiffy_fleet::{FleetAccess, SetupError};
use jiffy_image::Home;
use serde_json::json;
use std::time::Duration;

/// Returns a duration in the largest unit that divides it.
fn duration(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds % 3600 == 0 => format!("{} h", seconds / 3600),
        seconds if seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

/// Creates a token and prints the command that uses it.
pub fn run(args: &FleetTokenArgs) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let settings = Settings::load(home.path())?.ok_or(SetupError::NoMember)?;
    let target = StoreTargetArgs {
        store: settings.store_url()?,
        store_keys: None,
    };
    let token = crate::runtime()?.block_on(async {
        let (remote, _) = open(&home, &target)?;
        let access = FleetAccess::open(&settings, home.path(), &remote).await?;
        anyhow::Ok(access.create_token(args.uses, args.valid).await?)
    })?;
    let url = format!("https://{}", settings.address);
    if args.output.json {
        let value = json!({
            "fleet": settings.fleet, "joinUrl": url, "token": token.to_string(),
            "uses": args.uses, "validSeconds": args.valid.as_secs(),
        });
        outln!("{}", jiffy_client::terminal::json(&value)?);
    } else {
        outln!(
            "jiffy fleet join {url} {token}   ({}, {} hosts)",
            duration(args.valid),
            args.uses
        );
    }
    Ok(())
}
