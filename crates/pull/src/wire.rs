//! Frames between a puller and its parent: length, kind, payload.
//!
//! Four bytes of length (big endian, of the payload), one of kind. Orders and reports are JSON; data is
//! bytes as the registry sent them. The descriptor of a connection comes with the frame
//! [`Order::Connected`].

use crate::error::Fault;
use serde::{Deserialize, Serialize};

/// Largest payload of a frame, bytes.
pub(crate) const MAX_FRAME: usize = 128 << 10;
/// Largest data frame that a puller sends, bytes.
pub(crate) const DATA_CHUNK: usize = 64 << 10;
pub(crate) const HEADER: usize = 5;
pub(crate) const KIND_JSON: u8 = 0;
pub(crate) const KIND_DATA: u8 = 1;

/// Order of the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// First of all orders.
    Setup {
        /// `host` or `host:port`.
        registry: String,
        /// Repository in the registry.
        repository: String,
        /// Hosts (`host` or `host:port`) that are spoken to without TLS.
        plain_http: Vec<String>,
        /// User and password.
        credentials: Option<(String, String)>,
    },
    /// A manifest, by tag or digest; answered with data and [`Report::Done`].
    Manifest { reference: String, most: u64 },
    /// A blob from `offset` on; `most` bounds offset and data together.
    Blob {
        digest: String,
        offset: u64,
        most: u64,
    },
    /// Asks if the registry has a blob of this size; answered with [`Report::Has`].
    Has { digest: String, size: u64 },
    /// Answer to [`Report::Connect`]; the connection comes with it.
    Connected,
    /// Answer to [`Report::Connect`]: there is none.
    NotConnected,
}

/// Report of a puller.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Confined and ready for orders.
    Ready,
    /// Wants a TCP connection.
    Connect { host: String, port: u16 },
    /// All data was sent.
    Done,
    /// Answer to [`Order::Has`].
    Has(bool),
    /// The order cannot be carried out.
    Failed(Fault),
}

/// Frame header of a payload.
pub(crate) fn header(kind: u8, length: usize) -> [u8; HEADER] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [a, b, c, d, kind]
}

/// Kind and length of a payload; none if it is too long.
pub(crate) fn parse_header(header: [u8; HEADER]) -> Option<(u8, usize)> {
    let [a, b, c, d, kind] = header;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    (length <= MAX_FRAME).then_some((kind, length))
}
