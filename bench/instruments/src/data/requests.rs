//! Requests and streams to the test server.

use super::SAMPLE_TIME;
use anyhow::{Context, ensure};
use std::future::Future;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;

/// Body of the server's answers.
pub(super) const ANSWER: &[u8] = b"ok";
/// Size of one write and of a read buffer in bytes.
const PIECE: usize = 1 << 20;

/// Returns the number of requests per second with `connections` at a time, and the number of
/// requests.
pub(super) async fn per_second<F, Fut>(
    connections: usize,
    time: Duration,
    request: F,
) -> anyhow::Result<(f64, u64)>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = anyhow::Result<()>> + Send,
{
    // The first request opens a connection.
    request().await?;
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..connections {
        let request = request.clone();
        tasks.spawn(async move {
            let mut sent = 0u64;
            // Each task sends its next request when the previous one is answered.
            while began.elapsed() < time {
                request().await?;
                sent += 1;
            }
            anyhow::Ok(sent)
        });
    }
    let mut sent = 0;
    while let Some(done) = tasks.join_next().await {
        sent += done.context("the task of requests failed")??;
    }
    ensure!(sent > 0, "no request was answered within {SAMPLE_TIME:?}");
    Ok((sent as f64 / began.elapsed().as_secs_f64(), sent))
}

/// Sends `bytes` to the server. Returns the duration until the server has received all of them.
pub(super) async fn send(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    bytes: u64,
) -> anyhow::Result<Duration> {
    let began = Instant::now();
    stream
        .write_all(format!("SINK {bytes}\n").as_bytes())
        .await?;
    let piece = vec![0x5a; PIECE];
    let mut remaining = usize::try_from(bytes)?;
    while remaining > 0 {
        let now = remaining.min(PIECE);
        stream
            .write_all(piece.get(..now).unwrap_or_default())
            .await?;
        remaining -= now;
    }
    stream.flush().await?;
    // The server answers after the last byte, so that the time includes bytes in buffers.
    let answer = stream
        .read_u8()
        .await
        .context("the server did not acknowledge the bytes")?;
    ensure!(
        answer == b'.',
        "the server did not receive all {bytes} bytes"
    );
    Ok(began.elapsed())
}

/// Receives `bytes` from the server. Returns the duration.
pub(super) async fn receive(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    bytes: u64,
) -> anyhow::Result<Duration> {
    let began = Instant::now();
    stream
        .write_all(format!("SOURCE {bytes}\n").as_bytes())
        .await?;
    let received = drain(stream).await?;
    ensure!(received == bytes, "received {received} of {bytes} bytes");
    Ok(began.elapsed())
}

/// Reads to the end, and returns the number of bytes.
pub(super) async fn drain(mut from: impl AsyncRead + Unpin) -> anyhow::Result<u64> {
    let mut buffer = vec![0; PIECE];
    let mut received = 0;
    loop {
        match from.read(&mut buffer).await? {
            0 => return Ok(received),
            now => received += now as u64,
        }
    }
}
