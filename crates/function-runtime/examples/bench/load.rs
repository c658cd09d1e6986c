//! Load from the real clients wrk and h2load, if they are installed. The *reference* consists of
//! published figures of another project, with which the results are compared.

use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Command;

/// Numbers of concurrent connections, as in the reference.
const CONNECTIONS: [u32; 4] = [8, 16, 32, 64];
/// Duration of a measurement.
const SECONDS: u32 = 3;
/// Name of the server that serves as the baseline.
const PLAIN: &str = "plain hyper";

/// Source of the reference, which was measured on an unspecified larger machine. Only the ratio to
/// the plain server of the same project is comparable.
const REFERENCE: &str = "Drogon on TinyKVM (README of libriscv/drogon-sandbox, commit 01dfd5cf; wrk \
                         with as many threads as connections, on another and larger machine)";
/// Requests per second of the reference, by [`CONNECTIONS`].
const REFERENCE_RATES: [f64; 4] = [817_439.0, 1_283_099.0, 1_552_155.0, 1_969_675.0];
/// Requests per second of the plain server of the reference, published only for the first number of
/// connections.
const REFERENCE_PLAIN: f64 = 889_613.0;

/// Returns the reference as part of the results.
pub fn reference() -> Value {
    json!({
        "name": REFERENCE, "client": "wrk", "connections": CONNECTIONS,
        "requests_per_s": REFERENCE_RATES, "plain_at_the_first": REFERENCE_PLAIN,
    })
}

/// Returns one series per client and number of connections. Alternates between the `targets`.
pub fn measure(targets: &[(String, SocketAddr)], rounds: usize) -> Vec<Value> {
    let mut measured = Vec::new();
    for connections in CONNECTIONS {
        for round in 0..rounds {
            for (name, address) in targets {
                for (client, run) in [("wrk", wrk as Run), ("h2load", h2load)] {
                    let Some(mut result) = run(*address, connections) else {
                        continue;
                    };
                    let more = json!({
                        "name": name, "client": client, "connections": connections,
                        "round": round,
                    });
                    merge(&mut result, more);
                    measured.push(result);
                }
            }
        }
    }
    print_table(&measured);
    measured
}

type Run = fn(SocketAddr, u32) -> Option<Value>;

fn merge(into: &mut Value, more: Value) {
    if let (Some(into), Value::Object(more)) = (into.as_object_mut(), more) {
        into.extend(more);
    }
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    assert!(output.status.success(), "{program}: {output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Runs wrk with two threads.
fn wrk(address: SocketAddr, connections: u32) -> Option<Value> {
    let url = format!("http://{address}/");
    let (connections, seconds) = (connections.to_string(), format!("{SECONDS}s"));
    let text = output(
        "wrk",
        &["-t2", "-c", &connections, "-d", &seconds, "--latency", &url],
    )?;
    assert!(
        !text.contains("Non-2xx") && !text.contains("Socket errors"),
        "{text}"
    );
    let field = |name: &str| {
        let line = text.lines().map(str::trim).find(|l| l.starts_with(name));
        let value = line.and_then(|line| line.split_whitespace().nth(1));
        value
            .unwrap_or_else(|| panic!("no {name} in {text}"))
            .to_owned()
    };
    let rate: f64 = field("Requests/sec:").parse().unwrap();
    Some(json!({
        "requests_per_s": rate.round(),
        "p50": micros(&field("50%")), "p90": micros(&field("90%")), "p99": micros(&field("99%")),
    }))
}

fn h2load(address: SocketAddr, connections: u32) -> Option<Value> {
    let url = format!("http://{address}/");
    let (connections, seconds) = (connections.to_string(), SECONDS.to_string());
    let text = output(
        "h2load",
        &["--h1", "-t2", "-c", &connections, "-D", &seconds, &url],
    )?;
    assert!(text.contains(" 0 failed, 0 errored"), "{text}");
    let line = text.lines().find(|l| l.starts_with("finished in")).unwrap();
    let rate = line
        .split(", ")
        .find_map(|part| part.strip_suffix(" req/s"));
    let times = text
        .lines()
        .find(|l| l.starts_with("time for request:"))
        .unwrap();
    // The columns after the name (three words) are minimum, maximum and mean.
    let mean = times.split_whitespace().nth(5).unwrap();
    let rate: f64 = rate.unwrap().parse().unwrap();
    Some(json!({ "requests_per_s": rate.round(), "mean": micros(mean) }))
}

/// Parses a time with its unit to microseconds.
fn micros(text: &str) -> f64 {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let found = units
        .iter()
        .find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
    found.unwrap_or_else(|| panic!("{text} is not a time"))
}

/// Prints the median requests per second, as in the reference, and the ratio to plain hyper to
/// standard error.
fn print_table(measured: &[Value]) {
    for client in ["wrk", "h2load"] {
        let of_client: Vec<_> = measured.iter().filter(|m| m["client"] == client).collect();
        let mut names: Vec<&str> = Vec::new();
        for one in &of_client {
            let name = one["name"].as_str().unwrap();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        if names.is_empty() {
            eprintln!("{client} is not installed");
            continue;
        }
        eprintln!(
            "requests/s with {client} | {}",
            CONNECTIONS.map(|c| c.to_string()).join(" | ")
        );
        let rates = |name: &str| {
            CONNECTIONS.map(|connections| {
                let same = of_client
                    .iter()
                    .filter(|m| m["name"] == name && m["connections"] == connections);
                let mut rates: Vec<f64> = same
                    .map(|m| m["requests_per_s"].as_f64().unwrap())
                    .collect();
                rates.sort_by(f64::total_cmp);
                rates.get(rates.len() / 2).copied().unwrap_or_default()
            })
        };
        let plain = rates(PLAIN).map(Some);
        for name in names {
            print_row(name, rates(name), plain);
        }
        if client == "wrk" {
            let plain = [Some(REFERENCE_PLAIN), None, None, None];
            print_row(REFERENCE, REFERENCE_RATES, plain);
        }
    }
}

/// Prints a row of the table: rates in requests per second, with their share of the plain rates.
fn print_row(name: &str, rates: [f64; 4], plain: [Option<f64>; 4]) {
    let cell = |(rate, plain): (f64, Option<f64>)| match plain {
        Some(plain) if plain > 0.0 => format!("{rate:.0} ({:.0} %)", rate / plain * 100.0),
        _ => format!("{rate:.0}"),
    };
    let cells: Vec<_> = rates.into_iter().zip(plain).map(cell).collect();
    eprintln!("{name} | {}", cells.join(" | "));
}
