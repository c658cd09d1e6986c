//! `jiffy usage`: prints the usage of API keys by day.

use crate::cli::UsageArgs;
use crate::columns::{Align, Table};
use crate::runtime;
use hyper::Method;
use jiffy_api_types::{DailyUsage, UsagePage};
use jiffy_client::{Client, terminal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use std::process::ExitCode;

/// Number of rows of a page.
const PAGE: usize = 1000;
const SECONDS_PER_HOUR: f64 = 3600.0;

/// Prints the usage.
pub fn run(args: &UsageArgs) -> anyhow::Result<ExitCode> {
    let rows = runtime()?.block_on(async {
        let client = jiffy_daemon::open_client(&args.host.server()).await?;
        read(&client, args).await
    })?;
    if args.json {
        for row in &rows {
            outln!("{}", terminal::json_line(row)?);
        }
    } else {
        out!("{}", table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads all pages.
async fn read(client: &Client, args: &UsageArgs) -> anyhow::Result<Vec<DailyUsage>> {
    let mut first = format!("/usage?limit={PAGE}");
    for (name, value) in [("key", &args.key), ("from", &args.from), ("to", &args.to)] {
        if let Some(value) = value {
            first += &format!("&{name}={}", utf8_percent_encode(value, NON_ALPHANUMERIC));
        }
    }
    let mut rows = Vec::new();
    let mut call = first.clone();
    loop {
        let page: UsagePage = client.call(Method::GET, &call, &Value::Null).await?;
        if !page.missing_hosts.is_empty() {
            let hosts = page.missing_hosts.join(", ");
            errln!(
                "jiffy: hosts without an answer, whose usage is missing: {}",
                terminal::line(&hosts)
            );
        }
        rows.extend(page.usage);
        let Some(next) = page.next else {
            return Ok(rows);
        };
        call = format!(
            "{first}&after={}",
            utf8_percent_encode(&next, NON_ALPHANUMERIC)
        );
    }
}

/// Formats rows and their sum. Names come from clients and are escaped by the table.
fn table(rows: &[DailyUsage]) -> String {
    let mut table = Table::new([
        ("DAY", Align::Left),
        ("KEY", Align::Left),
        ("SANDBOX H", Align::Right),
        ("CPU H", Align::Right),
        ("MEMORY GiB*H", Align::Right),
        ("STORED GiB*H", Align::Right),
        ("SENT MiB", Align::Right),
        ("REQUESTS", Align::Right),
    ]);
    let mut row = |day: &str, key: &str, row: &DailyUsage| {
        let hours = |seconds: f64| match seconds / SECONDS_PER_HOUR {
            0.0 => "0".to_owned(),
            hours if hours < 1.0 => format!("{hours:.4}"),
            hours => format!("{hours:.2}"),
        };
        table.row([
            day.to_owned(),
            key.to_owned(),
            hours(row.sandbox_seconds),
            hours(row.cpu_seconds),
            hours(row.memory_gib_seconds),
            hours(row.stored_gib_seconds),
            format!("{:.1}", row.sent_bytes as f64 / f64::from(1 << 20)),
            row.function_requests.to_string(),
        ]);
    };
    let mut total: Option<DailyUsage> = None;
    for usage in rows {
        row(&usage.date, key(usage), usage);
        match &mut total {
            None => total = Some(usage.clone()),
            Some(total) => {
                total.sandbox_seconds += usage.sandbox_seconds;
                total.cpu_seconds += usage.cpu_seconds;
                total.memory_gib_seconds += usage.memory_gib_seconds;
                total.stored_gib_seconds += usage.stored_gib_seconds;
                total.sent_bytes = total.sent_bytes.saturating_add(usage.sent_bytes);
                total.function_requests = total
                    .function_requests
                    .saturating_add(usage.function_requests);
            }
        }
    }
    if let Some(total) = total {
        row("total", "", &total);
    }
    table.text()
}

/// Returns the name of a key, or its id if it has none. Usage without a key belongs to the owner of
/// the host.
fn key(row: &DailyUsage) -> &str {
    match (&row.key_id, &row.key_name) {
        (None, _) => "owner",
        (Some(id), None) => id,
        (Some(_), Some(name)) => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_hours_and_a_total_and_names_are_escaped() {
        let row = |name: Option<&str>| -> DailyUsage {
            let mut row = serde_json::json!({
                "date": "2026-11-29", "sandboxSeconds": 5400.0, "cpuSeconds": 36.0,
                "memoryGibSeconds": 10800.0, "storedGibSeconds": 0.0, "storedBytes": 0,
                "sentBytes": 1 << 20, "functionRequests": 7,
            });
            if let Some(name) = name {
                row["keyID"] = "k1".into();
                row["keyName"] = name.into();
            }
            serde_json::from_value(row).unwrap()
        };
        let text = table(&[row(None), row(Some("ci\u{1b}[2J\n"))]);
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        let cells = |line: usize| -> Vec<&str> {
            text.lines().nth(line).unwrap().split_whitespace().collect()
        };
        let owner = [
            "2026-11-29",
            "owner",
            "1.50",
            "0.0100",
            "3.00",
            "0",
            "1.0",
            "7",
        ];
        assert_eq!(cells(1), owner);
        assert_eq!(
            cells(3),
            ["total", "-", "3.00", "0.0200", "6.00", "0", "2.0", "14"]
        );
        assert_eq!(table(&[]).lines().count(), 1);
    }
}
