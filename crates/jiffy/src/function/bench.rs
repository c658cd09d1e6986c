//! `jiffy function bench`.

use super::path;
use crate::cli::FunctionBenchArgs;
use crate::sandbox::table::show;
use crate::units::millis;
use hyper::Method;
use hyper::header::HeaderMap;
use jiffy_client::Client;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Longest response that is read, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Result of a measurement. Latencies in microseconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FunctionBenchResult {
    requests: usize,
    failures: u32,
    concurrency: u32,
    requests_per_second: f64,
    p50_us: u64,
    p95_us: u64,
    p99_us: u64,
    max_us: u64,
}

/// Measures requests, after one that wakes the function.
pub async fn run(args: &FunctionBenchArgs) -> anyhow::Result<()> {
    path(&args.name, "")?;
    let client = jiffy_daemon::open_client(&args.output.host.server()).await?;
    request(&client, args.name.clone(), args.path.clone()).await?;
    let (left, failures) = (
        Arc::new(AtomicU32::new(args.requests)),
        Arc::new(AtomicU32::new(0)),
    );
    let began = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..args.concurrency {
        let (client, name, path) = (client.clone(), args.name.clone(), args.path.clone());
        let (left, failures) = (left.clone(), failures.clone());
        workers.spawn(async move {
            let mut times = Vec::new();
            let next = |left: u32| left.checked_sub(1);
            while left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
                .is_ok()
            {
                let sent = Instant::now();
                match request(&client, name.clone(), path.clone()).await {
                    Ok(true) => times.push(sent.elapsed()),
                    _ => drop(failures.fetch_add(1, Ordering::Relaxed)),
                }
            }
            times
        });
    }
    let mut times: Vec<Duration> = workers.join_all().await.into_iter().flatten().collect();
    let took = began.elapsed();
    times.sort_unstable();
    let at = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).saturating_sub(1);
        let time = times.get(rank).copied().unwrap_or_default();
        u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
    };
    let result = FunctionBenchResult {
        requests: times.len(),
        failures: failures.load(Ordering::Relaxed),
        concurrency: args.concurrency,
        requests_per_second: times.len() as f64 / took.as_secs_f64(),
        p50_us: at(50),
        p95_us: at(95),
        p99_us: at(99),
        max_us: at(100),
    };
    show(args.output.json, &result, |r| {
        format!(
            "{} requests, {} failures, {} at once: {:.0} requests/s\n\
             p50 {} ms, p95 {} ms, p99 {} ms, max {} ms\n",
            r.requests,
            r.failures,
            r.concurrency,
            r.requests_per_second,
            millis(r.p50_us),
            millis(r.p95_us),
            millis(r.p99_us),
            millis(r.max_us),
        )
    })
}

/// Returns true if the response is a success.
async fn request(client: &Client, name: String, path: String) -> anyhow::Result<bool> {
    let headers = HeaderMap::new();
    let answer = client.request_function(&name, Method::GET, &path, &headers, None);
    let answer = answer.await?;
    let status = answer.status;
    answer.collect(MAX_RESPONSE_BYTES).await?;
    Ok(status.is_success())
}
