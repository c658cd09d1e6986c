//! Frames of the Connect protocol, on the client's side. A frame has one byte of flags, four bytes
//! of length (big-endian) and a JSON message. The flag 2 marks the last frame of a stream.

use crate::connection_pool::PooledResponse;
use crate::error::{ClientError, WireError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Maximum length of an agent's frame in bytes.
const MAX_FRAME_BYTES: usize = 4 * 1024 * 1024;

/// Encodes a message as JSON.
pub(crate) fn encode(message: &impl Serialize) -> Result<Bytes, ClientError> {
    serde_json::to_vec(message)
        .map(Bytes::from)
        .map_err(|e| ClientError::Protocol(format!("cannot encode the request: {e}")))
}

/// Encodes a message as a frame.
pub(crate) fn message(value: &impl Serialize) -> Result<Bytes, ClientError> {
    Ok(wrap(&encode(value)?))
}

/// Prepends the head of a frame without flags.
fn wrap(payload: &[u8]) -> Bytes {
    let mut frame = Vec::with_capacity(payload.len() + 5);
    frame.push(0);
    frame.extend_from_slice(
        &u32::try_from(payload.len())
            // Requests are far shorter. The agent rejects an excessive length.
            .unwrap_or(u32::MAX)
            .to_be_bytes(),
    );
    frame.extend_from_slice(payload);
    frame.into()
}

/// Encodes `{"data":{"input":{"<field>":"<base64>"}}}` as a frame.
pub(crate) fn input(field: &str, bytes: &[u8]) -> Bytes {
    let mut payload = format!("{{\"data\":{{\"input\":{{\"{field}\":\"");
    STANDARD.encode_string(bytes, &mut payload);
    payload.push_str("\"}}}");
    wrap(payload.as_bytes())
}

/// Reader of the frames of a response.
pub(crate) struct ResponseFrames {
    answer: PooledResponse,
    buffer: BytesMut,
    has_ended: bool,
}

/// Content of the last frame.
#[derive(Deserialize)]
struct EndOfStream {
    #[serde(default)]
    error: Option<WireError>,
}

impl ResponseFrames {
    /// Creates a reader of the frames of a response.
    pub fn new(answer: PooledResponse) -> Self {
        Self {
            answer,
            buffer: BytesMut::new(),
            has_ended: false,
        }
    }

    /// Returns the next message, or `None` after a successful end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        while !self.has_ended {
            let Some((flags, payload)) = self.take_frame()? else {
                match self.answer.next().await? {
                    Some(piece) => self.buffer.extend_from_slice(&piece),
                    None => {
                        return Err(ClientError::Protocol(
                            "the stream has ended without an end frame".to_owned(),
                        ));
                    }
                }
                continue;
            };
            if flags & 2 == 0 {
                return Ok(Some(payload));
            }
            self.has_ended = true;
            // Read to the end, so that the connection becomes idle.
            while self.answer.next().await?.is_some() {}
            let end: EndOfStream = serde_json::from_slice(&payload)
                .map_err(|e| ClientError::Protocol(format!("end frame: {e}")))?;
            // Connect reports errors of streams in the last frame, after status 200.
            if let Some(error) = end.error {
                return Err(error.into());
            }
        }
        Ok(None)
    }

    /// Removes the first frame from the buffer. `None` if it is incomplete.
    fn take_frame(&mut self) -> Result<Option<(u8, Bytes)>, ClientError> {
        let Some(&[flags, a, b, c, d]) = self.buffer.first_chunk::<5>() else {
            return Ok(None);
        };
        // The cast is lossless: `usize` has at least 32 bits here.
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        // Bit 0 would mean compression, which this client does not request.
        if length > MAX_FRAME_BYTES || flags & !2 != 0 {
            return Err(ClientError::Protocol(format!(
                "frame with flags {flags:#x} and {length} bytes"
            )));
        }
        // The limit above also bounds the buffer: more is received only while a frame is
        // incomplete.
        if self.buffer.len() < 5 + length {
            return Ok(None);
        }
        self.buffer.advance(5);
        Ok(Some((flags, self.buffer.split_to(length).freeze())))
    }
}
