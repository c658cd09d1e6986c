//! Request bodies. They are read in full before a guest starts, so that a slow client occupies no
//! slot.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other.

use crate::fault::RequestFault;
use crate::memory_limiter::MemoryReservation;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;
use jiffy_proto::function::FunctionLimits;
use std::time::Duration;

/// Reads a body within the size and time limits. Adds the received bytes to `reservation`.
pub(crate) async fn read(
    body: impl Body<Data = Bytes> + Unpin,
    limits: &FunctionLimits,
    reservation: &mut MemoryReservation,
) -> Result<Bytes, RequestFault> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let too_large = |length: u64| length > limits.request_bytes;
    // The lower bound is the `content-length`, if the request has one.
    if too_large(body.size_hint().lower()) {
        return Err(RequestFault::RequestTooLarge);
    }
    let time = Duration::from_millis(limits.request_body_ms.into());
    let read = collect(body, limits.request_bytes, reservation);
    tokio::time::timeout(time, read)
        .await
        .map_err(|_| RequestFault::RequestTimeout)?
}

/// Reads a body of at most `max` bytes, and reserves memory of the tenant for it.
async fn collect(
    mut body: impl Body<Data = Bytes> + Unpin,
    max: u64,
    reservation: &mut MemoryReservation,
) -> Result<Bytes, RequestFault> {
    let mut read = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| RequestFault::RequestAborted)?;
        // Trailers are discarded.
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let more = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if more.saturating_add(u64::try_from(read.len()).unwrap_or(u64::MAX)) > max {
            return Err(RequestFault::RequestTooLarge);
        }
        // Memory is reserved for the bytes that arrived, not for the announced length.
        if !reservation.grow(more) {
            return Err(RequestFault::HostBusy);
        }
        read.extend_from_slice(&data);
    }
    Ok(read.freeze())
}
