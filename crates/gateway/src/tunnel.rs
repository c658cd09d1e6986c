//! Tunnel between a client and a guest after an upgrade (for example WebSocket). The gateway copies
//! bytes in both directions and preserves half-close: each side may finish sending before the
//! other.

use crate::counters::{GatewayCounters, add};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use std::io;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio_util::sync::CancellationToken;

/// Size of the buffer of each direction.
const BUFFER_BYTES: usize = 16 * 1024;

/// Copies bytes until both sides have finished sending or one fails. While neither side has
/// finished, silence has no limit. Afterwards the other side may be silent for at most
/// `half_closed`, because a vanished peer looks like a peer that has finished sending.
pub(crate) async fn join(
    client: Upgraded,
    guest: Upgraded,
    counters: &GatewayCounters,
    half_closed: Duration,
) {
    let (from_client, to_client) = split(TokioIo::new(client));
    let (from_guest, to_guest) = split(TokioIo::new(guest));
    let (client_done, guest_done) = (CancellationToken::new(), CancellationToken::new());
    // An error of either side is a normal end.
    let _ = tokio::try_join!(
        one_way(
            from_client,
            to_guest,
            &counters.bytes_to_guests,
            &client_done,
            &guest_done,
            half_closed,
        ),
        one_way(
            from_guest,
            to_client,
            &counters.bytes_to_clients,
            &guest_done,
            &client_done,
            half_closed,
        ),
    );
}

/// Copies the bytes of one direction.
async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    counter: &AtomicU64,
    done: &CancellationToken,
    other_done: &CancellationToken,
    half_closed: Duration,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        // The time starts again with each piece of data, so only silence is limited.
        let alone = async {
            other_done.cancelled().await;
            tokio::time::sleep(half_closed).await;
        };
        let count = tokio::select! {
            count = from.read(&mut buffer) => count?,
            () = alone => return Err(io::ErrorKind::TimedOut.into()),
        };
        if count == 0 {
            // Pass on the end of file, but keep the other direction open.
            to.shutdown().await?;
            done.cancel();
            return Ok(());
        }
        to.write_all(buffer.get(..count).unwrap_or_default())
            .await?;
        // Flush each piece, because the stream may be interactive.
        to.flush().await?;
        add(counter, count as u64);
    }
}
