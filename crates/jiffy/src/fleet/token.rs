//! `jiffy fleet token`: creates a token, with which other hosts can join the fleet.

use crate::cli::{FleetTokenArgs, StoreTargetArgs};
use crate::template::shared;
use jiffy_fleet::settings::Settings;
use jiffy_fleet::tokens::Token;
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

/// Returns the command that uses a token, with the limits of the token.
pub fn join_command(url: &str, token: &Token, valid: Duration, uses: u32) -> String {
    let valid = duration(valid);
    format!("jiffy fleet join {url} {token}   ({valid}, {uses} hosts)")
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
        let remote = shared::open(&target, &home)?;
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
        outln!("{}", join_command(&url, &token, args.valid, args.uses));
    }
    Ok(())
}
