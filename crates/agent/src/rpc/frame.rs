//! Frames of streaming calls: one byte with flags, the length in four bytes (big-endian), JSON.

use super::error::{RpcCode, RpcError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;

/// Flag of the last frame of a response.
pub const END_STREAM: u8 = 2;
/// Maximum length of a received message in bytes.
pub const MAX_MESSAGE: usize = 4 * 1024 * 1024;

/// Length of the header of a frame: flags and length.
const HEADER_BYTES: usize = 5;

/// Begins a frame. The length is unknown, so `finish` writes it.
fn begin(flags: u8, capacity: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(capacity + HEADER_BYTES);
    frame.extend_from_slice(&[flags, 0, 0, 0, 0]);
    frame
}

/// Writes the length of the message into the header of a frame.
fn finish(mut frame: Vec<u8>) -> Bytes {
    let length = u32::try_from(frame.len() - HEADER_BYTES).unwrap_or(u32::MAX);
    frame[1..5].copy_from_slice(&length.to_be_bytes());
    Bytes::from(frame)
}

/// Returns a message as a frame.
pub fn message(value: &impl Serialize) -> Bytes {
    let mut frame = begin(0, 64);
    // Ignore the result: all messages have string keys, and serialization cannot fail.
    let _ = serde_json::to_writer(&mut frame, value);
    finish(frame)
}

/// Returns the frame of `{"event":{"data":{"<field>":"<base64>"}}}`. The JSON is written directly.
pub fn data_event(field: &str, bytes: &[u8]) -> Bytes {
    let mut frame = begin(0, bytes.len().div_ceil(3) * 4 + 48);
    frame.extend_from_slice(b"{\"event\":{\"data\":{\"");
    frame.extend_from_slice(field.as_bytes());
    frame.extend_from_slice(b"\":\"");
    let at = frame.len();
    frame.resize(at + bytes.len().div_ceil(3) * 4, 0);
    // The buffer has exactly the length of the encoded text, so the encoding does not fail.
    let written = STANDARD
        .encode_slice(bytes, &mut frame[at..])
        .unwrap_or_default();
    frame.truncate(at + written);
    frame.extend_from_slice(b"\"}}}");
    finish(frame)
}

/// Returns the last frame of a response.
pub fn end(error: Option<&RpcError>) -> Bytes {
    match error {
        None => Bytes::from_static(b"\x02\0\0\0\x02{}"),
        Some(error) => {
            let mut frame = begin(END_STREAM, 64);
            // Ignore the result, as in `message`.
            let _ = serde_json::to_writer(&mut frame, &serde_json::json!({ "error": error }));
            finish(frame)
        }
    }
}

/// Removes the next complete message from the buffer. Returns `None` if more bytes are required.
pub fn take(buffer: &mut BytesMut) -> Result<Option<Bytes>, RpcError> {
    if buffer.len() < HEADER_BYTES {
        return Ok(None);
    }
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    // The header is checked before the rest arrives, so that a wrong length allocates no memory.
    if buffer[0] & 1 != 0 {
        return Err(RpcError::new(
            RpcCode::Unimplemented,
            "compressed frames are not supported; send frames without compression",
        ));
    }
    if buffer[0] != 0 {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            format!("frame with unknown flags {:#04x}", buffer[0]),
        ));
    }
    if length > MAX_MESSAGE {
        return Err(RpcError::new(
            RpcCode::ResourceExhausted,
            format!("a frame of {length} bytes is longer than the limit of {MAX_MESSAGE}"),
        ));
    }
    // The rest of the frame has not arrived yet.
    if buffer.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    Ok(Some(buffer.split_to(length).freeze()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_any_split() {
        let frame = data_event("stdout", b"hello");
        for cut in 0..frame.len() {
            let mut buffer = BytesMut::from(&frame[..cut]);
            assert!(take(&mut buffer).unwrap().is_none());
            buffer.extend_from_slice(&frame[cut..]);
            let message = take(&mut buffer).unwrap().unwrap();
            assert_eq!(&message[..], br#"{"event":{"data":{"stdout":"aGVsbG8="}}}"#);
            assert!(buffer.is_empty());
        }
    }

    #[test]
    fn bad_frames_are_refused_before_their_bytes_arrive() {
        for header in [[0, 0xff, 0, 0, 0], [1, 0, 0, 0, 1], [9, 0, 0, 0, 1]] {
            assert!(take(&mut BytesMut::from(&header[..])).is_err());
        }
    }
}
