//! Instruments `gateway` and `code`: cost of the gateway between ports of the host and of a guest.

use crate::goals;
use anyhow::{Context, ensure};
use bytes::Bytes;
use hyper::Method;
use jiffy_agent_client::{AgentClient, PooledResponse, ProcessSpec};
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::daemon::{BenchmarkDaemon, ms, timed};
use jiffy_benchmark::{Measured, Series};
use jiffy_benchmark::{prepare_guests, run_true};
use jiffy_client::Sandbox;
use jiffy_client::ServerOptions;
use jiffy_engine_api::SandboxSize;
use jiffy_engines::SandboxSpec;
use serde_json::json;
use std::time::Instant;
use tokio::task::JoinSet;

/// Size of a transferred file in bytes.
const FILE_BYTES: u64 = 1 << 30;
/// [`FILE_BYTES`] as an argument of `truncate`.
const TRUNCATE_SIZE: &str = "1G";
/// Size of one write in bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// Number of open, silent streams.
const IDLE_STREAMS: usize = 500;
/// Port of the server for silent streams.
const STREAMS_PORT: u16 = 8000;
/// Port of the code interpreter.
const CODE_PORT: u16 = 49_999;
/// Size of a sandbox whose memory holds a file of 1 GiB.
pub(crate) const LARGE_SIZE: SandboxSize = SandboxSize {
    vcpus: 2,
    memory_mib: 4096,
    disk_mib: 1024,
};

/// Answers every request with one line, and with a second line when `/tmp/end` exists.
const SERVER_SCRIPT: &str = r"
import asyncio, os
async def serve(reader, writer):
    await reader.readuntil(b'\r\n\r\n')
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello\n\r\n')
    await writer.drain()
    while not os.path.exists('/tmp/end'): await asyncio.sleep(0.2)
    writer.write(b'4\r\nbye\n\r\n0\r\n\r\n')
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(serve, '127.0.0.1', 8000, backlog=1024)
    open('/tmp/listening', 'w').close()
    async with server: await server.serve_forever()
asyncio.run(main())
";

/// Agents of two guests, with and without the gateway in between.
struct AgentRoutes {
    /// Client whose requests pass through the gateway.
    through: AgentClient,
    /// Client that is connected to the guest without a gateway.
    direct: AgentClient,
}

/// Measures exec, files and idle streams through the gateway, and over the guest's own socket.
pub async fn gateway(n: usize, warm_up: usize, server: &ServerOptions) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let sandbox = daemon.create_with_token(LARGE_SIZE).await?;
    let spec = SandboxSpec {
        size: LARGE_SIZE,
        ..SandboxSpec::default()
    };
    // A guest of this process: the daemon's guests are only reachable through the daemon.
    let vm = prepare_guests().await?.boot(&spec).await?;
    let routes = AgentRoutes {
        through: daemon.agent(&sandbox)?,
        direct: jiffy_engines::agent(&vm),
    };
    let mut series = exec(&routes, n, warm_up).await?;
    series.extend(files(&routes).await?);
    vm.stop().await;
    series.extend(streams(&daemon, &sandbox, &routes.through, n).await?);
    daemon.remove(&sandbox.record.id).await?;
    Ok(Measured {
        method: "one sandbox behind the gateway, and one guest with a direct socket, of the same \
            size, in turn: `true` from sending process.Start to reading the exit code; upload of a \
            file of 1 GiB to the guest's memory, and download of a sparse file of 1 GiB; 500 \
            requests to a server in the guest that sends one line and then stays silent",
        limits: "concurrent clients; a network in between; TLS; data from a disk",
        ..Measured::new("gateway", series, &Meter::new())
    })
}

/// Measures `true` over both routes.
async fn exec(routes: &AgentRoutes, n: usize, warm_up: usize) -> anyhow::Result<Vec<Series>> {
    let (mut through, mut direct) = (Vec::new(), Vec::new());
    for round in 0..warm_up + n {
        // Both routes alternate, so that a change of the load affects both.
        for (agent, samples) in [
            (&routes.through, &mut through),
            (&routes.direct, &mut direct),
        ] {
            let ((), took) = timed(run_true(agent)).await?;
            if round >= warm_up {
                samples.push(took);
            }
        }
    }
    Ok(vec![
        Series::new(
            "exec of `true` through the gateway",
            "ms",
            Some(goals::EXEC),
            through,
        ),
        Series::new("exec of `true` straight", "ms", Some(goals::EXEC), direct),
    ])
}

/// Measures uploads and downloads in MiB per second over both routes.
async fn files(routes: &AgentRoutes) -> anyhow::Result<Vec<Series>> {
    let mut series = Vec::new();
    for (way, agent) in [
        ("through the gateway", &routes.through),
        ("straight", &routes.direct),
    ] {
        let (mut up, mut down) = (Vec::new(), Vec::new());
        // Three samples only, because a transfer of 1 GiB takes long.
        for _ in 0..3 {
            up.push(upload(agent).await?);
            down.push(download(agent).await?);
        }
        series.push(Series::new(format!("1 GiB up {way}"), "MiB/s", None, up));
        series.push(Series::new(
            format!("1 GiB down {way}"),
            "MiB/s",
            None,
            down,
        ));
    }
    Ok(series)
}

/// Returns the MiB per second of one transfer of [`FILE_BYTES`].
fn rate(began: Instant) -> f64 {
    (FILE_BYTES >> 20) as f64 / began.elapsed().as_secs_f64()
}

/// Uploads a file of 1 GiB to the guest's memory. Returns MiB per second.
pub(crate) async fn upload(agent: &AgentClient) -> anyhow::Result<f64> {
    const PATH: &str = "/dev/shm/up";
    let piece = Bytes::from(vec![0x5a; CHUNK_BYTES]);
    let began = Instant::now();
    let mut writer = agent.write_stream(PATH, Some("root"));
    for _ in 0..FILE_BYTES / CHUNK_BYTES as u64 {
        writer.write(piece.clone()).await?;
    }
    writer.finish().await?;
    // The time ends before the check of the size, which is another request.
    let rate = rate(began);
    let received = agent.stat(PATH, Some("root")).await?.size;
    let received: u64 = received.parse()?;
    ensure!(
        received == FILE_BYTES,
        "received {received} of {FILE_BYTES} bytes"
    );
    agent.remove(PATH, Some("root")).await?;
    Ok(rate)
}

/// Downloads a sparse file of 1 GiB from a guest. Returns MiB per second.
pub(crate) async fn download(agent: &AgentClient) -> anyhow::Result<f64> {
    const PATH: &str = "/tmp/down";
    sh(agent, &format!("truncate -s {TRUNCATE_SIZE} {PATH}")).await?;
    let began = Instant::now();
    let mut reader = agent.read_stream(PATH, None).await?;
    let mut received = 0;
    while let Some(piece) = reader.next().await? {
        received += piece.len() as u64;
    }
    ensure!(
        received == FILE_BYTES,
        "received {received} of {FILE_BYTES} bytes"
    );
    Ok(rate(began))
}

/// Runs a shell command until it exits.
pub(crate) async fn sh(agent: &AgentClient, script: &str) -> anyhow::Result<()> {
    let spec = ProcessSpec::new("/bin/sh", ["-c", script]);
    let (status, _, err) = agent.start(&spec).await?.output(1 << 16).await?;
    let err = String::from_utf8_lossy(&err);
    ensure!(status.exit_code == 0, "{script}: {err}");
    Ok(())
}

/// Measures the cost of many silent streams, and checks that they still receive later data.
async fn streams(
    daemon: &BenchmarkDaemon,
    sandbox: &Sandbox,
    agent: &AgentClient,
    n: usize,
) -> anyhow::Result<Vec<Series>> {
    agent.write("/tmp/server.py", None, SERVER_SCRIPT).await?;
    let start = "nohup python3 /tmp/server.py >/tmp/server.log 2>&1 & until [ -e /tmp/listening ]; \
        do sleep 0.02; done";
    sh(agent, start).await?;
    // The difference of both values is the memory of the streams.
    let before = daemon.memory_kib().await?;
    let began = Instant::now();
    let mut opening: JoinSet<anyhow::Result<PooledResponse>> = JoinSet::new();
    for _ in 0..IDLE_STREAMS {
        let (daemon, sandbox) = (daemon.clone(), sandbox.clone());
        // All streams are opened at once, within the backlog of the server.
        opening.spawn(async move {
            let answer = daemon.request_port(&sandbox, STREAMS_PORT, Method::GET, "/", None);
            let mut answer = answer.await?;
            let line = answer.next().await?.unwrap_or_default();
            ensure!(
                &line[..] == b"hello\n",
                "the first line of a stream is {line:?}"
            );
            Ok(answer)
        });
    }
    let mut open = Vec::with_capacity(IDLE_STREAMS);
    while let Some(answer) = opening.join_next().await {
        open.push(answer??);
    }
    // Every stream has received its first line.
    let opened = ms(began.elapsed());
    let after = daemon.memory_kib().await?;
    let mut exec_times = Vec::new();
    for _ in 0..n {
        exec_times.push(timed(run_true(agent)).await?.1);
    }
    // The server now ends all streams with a second line.
    sh(agent, "touch /tmp/end").await?;
    for answer in &mut open {
        let line = answer.next().await?.unwrap_or_default();
        ensure!(
            &line[..] == b"bye\n",
            "the last line of a stream is {line:?}"
        );
    }
    let mut series = vec![
        Series::new(
            format!("{IDLE_STREAMS} streams: until all have answered"),
            "ms",
            None,
            vec![opened],
        ),
        Series::new(
            format!("exec of `true` beside {IDLE_STREAMS} silent streams"),
            "ms",
            Some(goals::EXEC),
            exec_times,
        ),
    ];
    let each = (after - before) / IDLE_STREAMS as f64;
    series.push(Series::new(
        "daemon's memory per silent stream",
        "KiB",
        None,
        vec![each],
    ));
    Ok(series)
}

/// Measures the first piece of code in a new sandbox.
pub async fn code(n: usize, warm_up: usize, server: &ServerOptions) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let (mut created, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..warm_up + n {
        let (sandbox, create_ms) = timed(daemon.create_from("code-interpreter-v1")).await?;
        // The first execution accesses pages of the interpreter's process for the first time after
        // the restore. The second execution shows the cost without these accesses.
        let ((), first_ms) = timed(run_one_plus_one(&daemon, &sandbox)).await?;
        let ((), second_ms) = timed(run_one_plus_one(&daemon, &sandbox)).await?;
        daemon.remove(&sandbox.record.id).await?;
        if round >= warm_up {
            created.push(create_ms);
            first.push(first_ms);
            second.push(second_ms);
        }
    }
    let series = vec![
        Series::new("create", "ms", Some(goals::CREATE), created),
        Series::new("first run_code('1+1')", "ms", None, first),
        Series::new("second run_code('1+1')", "ms", None, second),
    ];
    Ok(Measured {
        method: "template code-interpreter-v1 in its own size, sequential sandboxes: create; then \
            POST /execute to port 49999 through the gateway, from sending the request to the end \
            of its answer, twice",
        limits: "code that imports, draws or computes; the start of the client",
        ..Measured::new("code", series, &Meter::new())
    })
}

/// Executes code in the interpreter of a sandbox, and checks its result.
async fn run_one_plus_one(daemon: &BenchmarkDaemon, sandbox: &Sandbox) -> anyhow::Result<()> {
    let body = serde_json::to_vec(&json!({ "code": "1+1", "language": "python" }))?;
    let answer = daemon.request_port(
        sandbox,
        CODE_PORT,
        Method::POST,
        "/execute",
        Some(body.into()),
    );
    let text = answer.await?.collect(1 << 20).await?;
    let text = String::from_utf8_lossy(&text);
    let result = text
        .lines()
        // The answer is a stream of JSON lines.
        .find(|line| line.contains("\"result\""))
        .with_context(|| format!("no result: {text}"))?;
    ensure!(
        result.contains("\"text\":\"2\"") || result.contains("\"text\": \"2\""),
        "{result}"
    );
    Ok(())
}
