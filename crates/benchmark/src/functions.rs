//! Benchmark `functions`: requests to a deployed function.

use crate::counters::Meter;
use crate::daemon::ms;
use crate::{Measured, Series};
use anyhow::{Context, ensure};
use hyper::Method;
use hyper::header::HeaderMap;
use jiffy_client::{Client, ServerOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::task::JoinSet;

/// Maximum length of a response in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Durations of successful requests in milliseconds, and the number of failed requests.
#[derive(Default)]
struct Requests {
    times: Vec<f64>,
    failures: usize,
}

/// Sends `n` requests to a function, `c` at a time. A first request starts the function.
///
/// # Errors
/// Fails if the first request fails, or if all other requests fail.
pub async fn functions(
    name: &str,
    path: &str,
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let client = jiffy_daemon::open_client(server).await?;
    // An unknown or broken function is reported with its error, not as a number of failures.
    request(&client, name, path)
        .await
        .with_context(|| format!("function {name} does not answer"))?;
    load(&client, name, path, warm_up, c).await?;
    let began = Instant::now();
    let requests = load(&client, name, path, n, c).await?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(
        !requests.times.is_empty(),
        "all {n} requests to function {name} failed"
    );
    let rate = requests.times.len() as f64 / seconds;
    let failures = requests.failures as f64;
    let rows = [
        (format!("request, c={c}"), "ms", requests.times),
        (format!("requests, c={c}"), "per second", vec![rate]),
        (format!("failures, c={c}"), "count", vec![failures]),
    ];
    let series = rows.map(|(name, unit, samples)| Series::new(name, unit, None, samples));
    Ok(Measured {
        method: "GET requests to the function through the control plane, C at a time, from sending \
            a request to reading its response. A response with another status than 2xx counts as \
            a failure",
        limits: "the start of the function; connections to its own host name; a network between \
            client and host",
        ..Measured::new("functions", series.into(), &Meter::new())
    })
}

/// Sends `number` requests, `concurrency` at a time.
async fn load(
    client: &Client,
    name: &str,
    path: &str,
    number: usize,
    concurrency: usize,
) -> anyhow::Result<Requests> {
    // Workers share the number of remaining requests, so that a slow worker delays no others.
    let remaining = Arc::new(AtomicUsize::new(number));
    let mut workers = JoinSet::new();
    for _ in 0..concurrency {
        let (client, name, path) = (client.clone(), name.to_owned(), path.to_owned());
        let remaining = remaining.clone();
        workers.spawn(async move {
            let mut requests = Requests::default();
            // Relaxed suffices: the counter protects no other data.
            let next = |remaining: usize| remaining.checked_sub(1);
            while remaining
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
                .is_ok()
            {
                let began = Instant::now();
                match request(&client, &name, &path).await {
                    Ok(()) => requests.times.push(ms(began.elapsed())),
                    Err(_) => requests.failures += 1,
                }
            }
            requests
        });
    }
    let mut all = Requests::default();
    while let Some(worker) = workers.join_next().await {
        let requests = worker?;
        all.times.extend(requests.times);
        all.failures += requests.failures;
    }
    Ok(all)
}

/// Sends one request, which must succeed.
async fn request(client: &Client, name: &str, path: &str) -> anyhow::Result<()> {
    let headers = HeaderMap::new();
    let response = client.request_function(name, Method::GET, path, &headers, None);
    let response = response.await?;
    let status = response.status;
    // The body is read before the check, so that the connection can be reused.
    response.collect(MAX_RESPONSE_BYTES).await?;
    ensure!(status.is_success(), "the response has status {status}");
    Ok(())
}
