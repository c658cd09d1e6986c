//! Frames (messages) between a puller and its parent. The *puller* is the confined process that
//! downloads images from registries.
//!
//! A frame consists of four bytes of payload length (big endian), one byte of kind, and the
//! payload. Requests and responses are JSON; data frames contain data of the registry. The
//! descriptor of a connection is attached to the frame [`PullRequest::Connected`].

use crate::error::PullFault;
use crate::login::RegistryLogin;
use serde::{Deserialize, Serialize};

/// Maximum payload of a frame in bytes.
pub(crate) const MAX_FRAME_BYTES: usize = 128 << 10;
/// Maximum payload of a puller's data frame in bytes.
pub(crate) const DATA_CHUNK_BYTES: usize = 64 << 10;
/// Length of a frame's header in bytes.
pub(crate) const HEADER_BYTES: usize = 5;
/// Payload is a [`PullRequest`] or [`PullResponse`].
pub(crate) const KIND_JSON: u8 = 0;
/// Payload is data of the registry.
pub(crate) const KIND_DATA: u8 = 1;

/// Request of the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum PullRequest {
    /// First request.
    Setup {
        /// `host` or `host:port`.
        registry: String,
        /// Repository in the registry.
        repository: String,
        /// Hosts (`host` or `host:port`) that are contacted by plain HTTP.
        plain_http: Vec<String>,
        /// Authentication, if any.
        login: Option<RegistryLogin>,
    },
    /// Requests a manifest of at most `most` bytes by tag or digest. Answered with data and
    /// [`PullResponse::Done`].
    Manifest { reference: String, most: u64 },
    /// Requests the bytes of a blob from `offset` to its end. The request fails if the blob is
    /// longer than `most` bytes.
    Blob {
        digest: String,
        offset: u64,
        most: u64,
    },
    /// Requests the bytes of a file from `offset` to its end, for the download of an exported
    /// template from any HTTP server. `target` is the path and query of the file on the server that
    /// [`Self::Setup`] names as `registry`. The request fails if the file is longer than `most`
    /// bytes.
    File {
        target: String,
        offset: u64,
        most: u64,
    },
    /// Checks whether the registry has a blob of this size. Answered with [`PullResponse::Has`].
    Has { digest: String, size: u64 },
    /// Response to [`PullResponse::Connect`], with the connection attached.
    Connected,
    /// Response to [`PullResponse::Connect`] if the connection failed.
    NotConnected,
}

/// Response of a puller.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum PullResponse {
    /// The puller is confined and ready for requests.
    Ready,
    /// Requests a TCP connection.
    Connect { host: String, port: u16 },
    /// All data was sent.
    Done,
    /// Response to [`PullRequest::Has`].
    Has(bool),
    /// The request failed.
    Failed(PullFault),
}

/// Returns the frame header of a payload.
pub(crate) fn header(kind: u8, length: usize) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [a, b, c, d, kind]
}

/// Parses a frame header. Returns kind and length of the payload. `None` if the payload is too
/// long.
pub(crate) fn parse_header(header: [u8; HEADER_BYTES]) -> Option<(u8, usize)> {
    let [a, b, c, d, kind] = header;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    (length <= MAX_FRAME_BYTES).then_some((kind, length))
}
