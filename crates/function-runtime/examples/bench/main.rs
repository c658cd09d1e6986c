//! Compares medians of requests to functions in one process with requests to plain hyper. Prints
//! JSON.
//!
//! `bench serve` serves forever instead, for profilers, and prints its addresses.
//!
//! usage: bench [REQUESTS [ROUNDS_OF_LOAD [EXAMPLES]]]. EXAMPLES is a directory with built examples
//! as NAME.wasm. `bench/functions` runs this program and stores its output.
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a measurement that fails aborts the program"
)]

mod load;
mod paired;
mod process;
mod servers;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use jiffy_function_runtime::engine::RESETS;
use jiffy_function_runtime::server::{FUNCTION_HEADER, FunctionServer};
use paired::PairedDifferences;
use serde_json::{Value, json};
use servers::{EXAMPLES, FUNCTIONS};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Number of requests that precede the measured requests of a series.
const WARM_UP: usize = 200;
/// Number of rounds. Each round measures all series, so that all are subject to the same other
/// load.
const ROUNDS: usize = 5;
/// The number of requests to the examples is divided by this number, because they take longer.
const EXAMPLE_SHARE: usize = 10;

fn main() {
    let serves = std::env::args().nth(1).is_some_and(|word| word == "serve");
    let argument = |at, default| {
        std::env::args()
            .nth(at)
            .map_or(default, |n| n.parse().unwrap())
    };
    let (requests, load_rounds) = if serves {
        (0, 0)
    } else {
        (argument(1, 5000), argument(2, 3))
    };
    let examples = std::env::args().nth(3).map(servers::built_examples);
    let examples = examples.unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, usize::from))
        // As in `jiffy-functions serve`.
        .global_queue_interval(8)
        .enable_all()
        .build()
        .unwrap();
    let plain = runtime.block_on(servers::serve_plain());
    let servers = RESETS
        .iter()
        .map(|&reset| servers::serve_functions(reset, &examples));
    let servers: Vec<_> = servers.map(|server| runtime.block_on(server)).collect();
    if serves {
        eprintln!("plain hyper {plain}");
        for functions in &servers {
            for (name, address) in &functions.addresses {
                eprintln!("{name}, {} {address}", functions.reset.word());
            }
        }
        runtime.block_on(std::future::pending::<()>());
    }
    let (mut series, mut paired) = (Series::default(), PairedDifferences::default());
    for _ in 0..ROUNDS {
        let requests = requests / ROUNDS;
        for (name, functions) in FUNCTIONS
            .iter()
            .flat_map(|name| servers.iter().map(move |server| (name, server)))
        {
            let label = |way: &str| format!("{name}, {}, {way}", functions.reset.word());
            let times = runtime.block_on(in_process(&functions.server, name, None, requests));
            series.add(label("in process"), 1, times);
            for clients in [1, 8] {
                // Measured before each series, because the load changes within a run.
                let beside = runtime.block_on(measure(plain, clients, requests));
                let address = functions.addresses[name];
                let times = runtime.block_on(measure(address, clients, requests));
                paired.add(&label("direct"), clients, &beside.0, &times.0);
                series.add("plain hyper".to_owned(), clients, beside);
                series.add(label("direct"), clients, times);
            }
        }
    }
    for (name, body) in EXAMPLES {
        if examples.contains_key(name) {
            for functions in &servers {
                let times = in_process(
                    &functions.server,
                    name,
                    Some(body),
                    requests / EXAMPLE_SHARE,
                );
                let label = format!("example in {name}, {}, in process", functions.reset.word());
                series.add(label, 1, runtime.block_on(times));
            }
        }
    }
    let mut targets = vec![("plain hyper".to_owned(), plain)];
    for name in ["core-0", "core-16", "http"] {
        targets.extend(servers.iter().map(|functions| {
            let label = format!("{name}, {}", functions.reset.word());
            (label, functions.addresses[name])
        }));
    }
    let real = load::measure(&targets, load_rounds);
    let small = servers::compiled(&servers::core_module(0));
    let loaded = ["c", "rust"].map(|name| Some((name, examples.get(name)?.as_slice())));
    let loaded: Vec<_> = loaded.into_iter().flatten().collect();
    let process = process::measure(servers::OWNER, &small, &loaded);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let output = json!({
        "task": "functions",
        "method": "one process, rounds in turn: in process from a request's head to its response's end; direct: as a connection that the daemon has handed over, by TCP, with clients in the same process that keep their connection; direct_over_plain: differences of the medians of a round, in which plain hyper was measured before each; load: wrk and h2load, 2 threads, on the same processors; core-N writes to N pages of its memory; http is a component of wasi:http that also logs a line; the examples are those in examples/functions, with a small body; process: jailed processes of a tenant, from their start until they serve and until their first function has answered; KiB of smaps_rollup; many functions: one file loaded under many names, each of which is a copy",
        "unit": "us",
        "load": load.trim(),
        "series": series.json(),
        "direct_over_plain": paired.report(),
        "load_by_clients": real,
        "reference": load::reference(),
        "process": process,
    });
    println!("{}", serde_json::to_string_pretty(&output).unwrap());
}

/// Series, in the order in which they were first measured. Each has the name of the server, the
/// number of clients, the times of all requests, and the total time.
#[derive(Default)]
struct Series(Vec<(String, usize, Vec<Duration>, Duration)>);

impl Series {
    /// Adds the times of a round to the series of this server with this number of clients.
    fn add(&mut self, name: String, clients: usize, (times, elapsed): (Vec<Duration>, Duration)) {
        let same = |one: &&mut (String, usize, _, _)| one.0 == name && one.1 == clients;
        match self.0.iter_mut().find(same) {
            Some(one) => {
                one.2.extend(times);
                one.3 += elapsed;
            }
            None => self.0.push((name, clients, times, elapsed)),
        }
    }

    fn json(self) -> Vec<Value> {
        let all = self.0.into_iter();
        all.map(|(name, clients, times, elapsed)| result(&name, clients, (times, elapsed)))
            .collect()
    }
}

/// Returns the result of a measurement as JSON. Times are in microseconds; `p50`, `p90` and `p99`
/// are percentiles.
fn result(name: &str, clients: usize, (mut times, elapsed): (Vec<Duration>, Duration)) -> Value {
    times.sort();
    let at = |share: usize| times[times.len() * share / 1000].as_secs_f64() * 1e6;
    let rate = times.len() as f64 / elapsed.as_secs_f64();
    json!({
        "name": name, "clients": clients, "requests_per_s": rate.round(),
        "min": at(0), "p50": at(500), "p90": at(900), "p99": at(990),
    })
}

/// Measures sequential requests without HTTP: GET, or POST with a body.
async fn in_process(
    server: &FunctionServer,
    function: &str,
    body: Option<&'static str>,
    requests: usize,
) -> (Vec<Duration>, Duration) {
    let (server, function) = (server.clone(), function.to_owned());
    let run = tokio::spawn(async move {
        let mut times = Vec::new();
        let mut begin = Instant::now();
        for number in 0..WARM_UP + requests {
            if number == WARM_UP {
                begin = Instant::now();
            }
            let request = match body {
                Some(_) => hyper::Request::post("/"),
                None => hyper::Request::get("/"),
            };
            let request = request
                .header("host", "f")
                .header(FUNCTION_HEADER, &function)
                .body(Full::new(Bytes::from_static(
                    body.unwrap_or_default().as_bytes(),
                )))
                .unwrap();
            let start = Instant::now();
            let response = server.handle(request).await;
            assert_eq!(response.status(), 200);
            response.into_body().collect().await.unwrap();
            if number >= WARM_UP {
                times.push(start.elapsed());
            }
        }
        (times, begin.elapsed())
    });
    run.await.unwrap()
}

/// Measures requests by concurrent clients. Returns the time of each request, and the total time.
async fn measure(
    address: SocketAddr,
    clients: usize,
    requests: usize,
) -> (Vec<Duration>, Duration) {
    let start = Instant::now();
    let tasks = (0..clients).map(|_| tokio::spawn(client(address, requests / clients)));
    let tasks: Vec<_> = tasks.collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.unwrap());
    }
    // Exclude the share of the warm-up requests.
    let share = (requests as f64) / (requests + WARM_UP * clients) as f64;
    (times, start.elapsed().mul_f64(share))
}

/// Sends requests one after the other on one connection. Returns the times of the measured
/// requests.
async fn client(address: SocketAddr, requests: usize) -> Vec<Duration> {
    let head = format!("GET / HTTP/1.1\r\nhost: {address}\r\n\r\n").into_bytes();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut buffer = vec![0; 4096];
    let mut times = Vec::new();
    for number in 0..WARM_UP + requests {
        let start = Instant::now();
        stream.write_all(&head).await.unwrap();
        let mut length = 0;
        loop {
            let read = stream.read(&mut buffer[length..]).await.unwrap();
            assert!(read > 0, "the connection was closed");
            length += read;
            if is_complete(&buffer[..length]) {
                break;
            }
        }
        assert!(
            buffer.starts_with(b"HTTP/1.1 200"),
            "{:?}",
            String::from_utf8_lossy(&buffer)
        );
        if number >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    times
}

/// Returns whether the response ends with one of the bodies of these servers. The response of the
/// component is chunked.
fn is_complete(response: &[u8]) -> bool {
    response.ends_with(b"hello, function") || response.ends_with(b"0\r\n\r\n")
}
