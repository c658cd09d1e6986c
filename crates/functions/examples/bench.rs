//! Medians of requests to functions in one process beside those to plain hyper, as JSON.
//!
//! usage: bench [REQUESTS]. `bench/functions` runs it and keeps its output.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made ends")]

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jiffy_functions::compile;
use jiffy_functions::engine;
use jiffy_functions::epoch_ticker::EpochTicker;
use jiffy_functions::server::{FUNCTION_HEADER, FunctionServer};
use jiffy_functions::tenant::Tenant;
use jiffy_proto::function::{FunctionLimits, SlotReset, TenantLimits};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

const OWNER: &str = "bench";
const WARM_UP: usize = 200;
/// Rounds, in each of which all series are measured: they meet the same other load.
const ROUNDS: usize = 5;
const FUNCTIONS: [&str; 5] = ["core-0", "core-1", "core-16", "core-256", "http"];

/// Module that answers with 16 bytes after writing a byte to each of `pages` pages.
fn core_module(pages: usize) -> Vec<u8> {
    let end = 65536 + pages * 4096;
    let text = format!(
        r#"(module (memory (export "memory") 64) (data (i32.const 0) "200\n\nhello, function")
            (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
            (func (export "jiffy_handle") (param i32 i32) (result i32)
              (local $i i32)
              (local.set $i (i32.const 65536))
              (block $done (loop $next
                (br_if $done (i32.ge_u (local.get $i) (i32.const {end})))
                (i32.store8 (local.get $i) (i32.const 1))
                (local.set $i (i32.add (local.get $i) (i32.const 4096)))
                (br $next)))
              (i32.const 20))
            (func (export "jiffy_out") (result i32) (i32.const 0)))"#
    );
    wat::parse_str(text).unwrap()
}

fn main() {
    let requests = std::env::args().nth(1).map_or(5000, |n| n.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, usize::from))
        .event_interval(1)
        .global_queue_interval(8)
        .enable_all()
        .build()
        .unwrap();
    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    runtime.block_on(async { serve_plain(UnixListener::bind(&plain).unwrap()) });
    let servers = [SlotReset::Strict, SlotReset::Fast].map(|reset| {
        let path = directory.path().join(reset.word());
        let server = runtime.block_on(serve_functions(&path, reset));
        (reset, path, server)
    });
    let mut series = Series::default();
    for _ in 0..ROUNDS {
        let requests = requests / ROUNDS;
        for clients in [1, 8] {
            let times = runtime.block_on(measure(&plain, "none", clients, requests));
            series.add("plain hyper".to_owned(), clients, times);
        }
        for (name, (reset, path, server)) in FUNCTIONS
            .iter()
            .flat_map(|name| servers.iter().map(move |server| (name, server)))
        {
            let label = |way: &str| format!("{name}, {}, {way}", reset.word());
            let times = runtime.block_on(in_process(server, name, requests));
            series.add(label("in process"), 1, times);
            for clients in [1, 8] {
                let times = runtime.block_on(measure(path, name, clients, requests));
                series.add(label("over HTTP"), clients, times);
            }
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let output = json!({
        "task": "functions",
        "method": "one process, rounds in turn: in process from a request's head to its response's end; over HTTP by hyper over a Unix socket, with clients in the same process that keep their connection; core-N writes to N pages of its memory; http is a component of wasi:http that also logs a line",
        "unit": "us",
        "load": load.trim(),
        "series": series.json(),
    });
    println!("{}", serde_json::to_string_pretty(&output).unwrap());
}

/// Times of each series, in the order of their first.
#[derive(Default)]
struct Series(Vec<(String, usize, Vec<Duration>, Duration)>);

impl Series {
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

fn result(name: &str, clients: usize, (mut times, elapsed): (Vec<Duration>, Duration)) -> Value {
    times.sort();
    let at = |share: usize| times[times.len() * share / 1000].as_secs_f64() * 1e6;
    let rate = times.len() as f64 / elapsed.as_secs_f64();
    json!({
        "name": name, "clients": clients, "requests_per_s": rate.round(),
        "min": at(0), "p50": at(500), "p90": at(900), "p99": at(990),
    })
}

fn serve_plain(listener: UnixListener) {
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(|_| async {
                let body = Full::new(Bytes::from_static(b"hello, function"));
                Ok::<_, Infallible>(hyper::Response::new(body))
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
}

async fn serve_functions(path: &std::path::Path, reset: SlotReset) -> FunctionServer {
    let limits = TenantLimits {
        slots: 64,
        reset,
        ..TenantLimits::default()
    };
    let engine = engine::running(&limits).unwrap();
    let ticker = EpochTicker::start(&engine).unwrap();
    let tenant = Arc::new(Tenant::new(OWNER, limits, engine).unwrap());
    let compiling = engine::compiling().unwrap();
    let component = include_bytes!("../tests/guests/http.wat");
    let component = wat::parse_bytes(component).unwrap().into_owned();
    let mut modules = vec![("http".to_owned(), component)];
    modules.extend([0, 1, 16, 256].map(|pages| (format!("core-{pages}"), core_module(pages))));
    for (name, module) in modules {
        let file = compile::compile(&compiling, &module, OWNER).unwrap();
        let digest = *blake3::hash(&file).as_bytes();
        let limits = FunctionLimits::default();
        let loaded = tenant.load(&ticker, &name, &file, &digest, limits.into());
        loaded.await.unwrap();
    }
    let listener = UnixListener::bind(path).unwrap();
    let server = FunctionServer::new(tenant, ticker);
    tokio::spawn(server.clone().listen(listener));
    server
}

/// Times of requests without HTTP, one after the other.
async fn in_process(
    server: &FunctionServer,
    function: &str,
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
            let request = hyper::Request::get("/")
                .header("host", "f")
                .header(FUNCTION_HEADER, &function)
                .body(Full::new(Bytes::new()))
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

/// Times of requests by clients that run at once, and the time of all.
async fn measure(
    path: &std::path::Path,
    function: &str,
    clients: usize,
    requests: usize,
) -> (Vec<Duration>, Duration) {
    let head = format!("GET / HTTP/1.1\r\nhost: f\r\njiffy-function: {function}\r\n\r\n");
    let head: Arc<[u8]> = head.into_bytes().into();
    let start = Instant::now();
    let tasks: Vec<_> = (0..clients)
        .map(|_| {
            let (path, head) = (path.to_owned(), head.clone());
            tokio::spawn(client(path, head, requests / clients))
        })
        .collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.unwrap());
    }
    // Requests that warm up take their share of it.
    let share = (requests as f64) / (requests + WARM_UP * clients) as f64;
    (times, start.elapsed().mul_f64(share))
}

async fn client(path: std::path::PathBuf, head: Arc<[u8]>, requests: usize) -> Vec<Duration> {
    let mut stream = UnixStream::connect(path).await.unwrap();
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

/// Returns true at the end of one of the bodies that are served here.
fn is_complete(response: &[u8]) -> bool {
    response.ends_with(b"hello, function") || response.ends_with(b"0\r\n\r\n")
}
