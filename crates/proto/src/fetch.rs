//! Messages between a VMM whose memory is still incomplete on this host and the fetcher, a process
//! that obtains the missing memory. Each message is one little-endian `SOCK_SEQPACKET` packet. The
//! VMM sends requests, and the fetcher answers them in any order.
//!
//! The fetcher writes a chunk to the layer's file before it answers, and the VMM has this file
//! open. Therefore no content passes through the socket, and a VMM reads only its own layers.

/// Length of a request in bytes.
pub const REQUEST_BYTES: usize = 16;
/// Maximum length of an answer in bytes.
pub const MAX_ANSWER_BYTES: usize = ANSWER_HEADER_BYTES + MAX_REASON_BYTES;
/// Maximum number of unanswered requests of one VMM. A VMM has a few requests for each of its
/// threads.
pub const MAX_OPEN_REQUESTS: usize = 1024;

/// Length of an answer without its reason: the request, and the number of the outcome.
const ANSWER_HEADER_BYTES: usize = 20;
/// Maximum length of a reason in bytes.
const MAX_REASON_BYTES: usize = 240;
/// Numbers of the outcomes in an answer.
const PRESENT: u32 = 0;
const FAILED: u32 = 1;
const COMPLETE: u32 = 2;
/// Version of both messages.
const VERSION: u32 = 1;

/// Request for a chunk of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchRequest {
    /// Index of the layer in [`crate::snapshot::RestoreConfig::memory`].
    pub layer: u32,
    /// Index of the chunk in units of [`crate::layer::MEMORY_CHUNK`].
    pub chunk: u64,
}

/// Answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchAnswer {
    /// The request.
    pub request: FetchRequest,
    /// Result.
    pub outcome: FetchOutcome,
}

/// Result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchOutcome {
    /// The layer's file contains the chunk.
    Present,
    /// The chunk could not be fetched for this reason. A later attempt may succeed.
    Failed(String),
    /// The layer's file contains all chunks. Also sent without a request. The chunk number of the
    /// answer is then a placeholder.
    Complete,
}

/// Error of decoding a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid message between VMM and fetcher, or a message of another version")]
pub struct MessageError;

impl FetchRequest {
    /// Encodes the request.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.layer.to_le_bytes());
        bytes[8..].copy_from_slice(&self.chunk.to_le_bytes());
        bytes
    }

    /// Decodes a request that [`Self::encode`] encoded.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let (request, rest) = Self::split(bytes)?;
        rest.is_empty().then_some(request).ok_or(MessageError)
    }

    /// Decodes the request at the start of `bytes`. Returns the request and the remaining bytes.
    fn split(bytes: &[u8]) -> Result<(Self, &[u8]), MessageError> {
        let (version, rest) = bytes.split_first_chunk().ok_or(MessageError)?;
        let (layer, rest) = rest.split_first_chunk().ok_or(MessageError)?;
        let (chunk, rest) = rest.split_first_chunk().ok_or(MessageError)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(MessageError);
        }
        let request = Self {
            layer: u32::from_le_bytes(*layer),
            chunk: u64::from_le_bytes(*chunk),
        };
        Ok((request, rest))
    }
}

impl FetchAnswer {
    /// Encodes the answer. A long reason is truncated.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.request.encode().to_vec();
        match &self.outcome {
            FetchOutcome::Present => bytes.extend(PRESENT.to_le_bytes()),
            FetchOutcome::Complete => bytes.extend(COMPLETE.to_le_bytes()),
            FetchOutcome::Failed(reason) => {
                bytes.extend(FAILED.to_le_bytes());
                // A cut in the middle of a character would make the text invalid.
                let end = reason.floor_char_boundary(MAX_REASON_BYTES);
                bytes.extend(reason.bytes().take(end));
            }
        }
        bytes
    }

    /// Decodes an answer that [`Self::encode`] encoded. Control characters of a reason become
    /// spaces.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() > MAX_ANSWER_BYTES {
            return Err(MessageError);
        }
        let (request, rest) = FetchRequest::split(bytes)?;
        let (outcome, reason) = rest.split_first_chunk().ok_or(MessageError)?;
        let outcome = match (u32::from_le_bytes(*outcome), reason) {
            (PRESENT, []) => FetchOutcome::Present,
            (COMPLETE, []) => FetchOutcome::Complete,
            (FAILED, reason) => {
                // The reason may come from a store, which is not trusted.
                let reason = String::from_utf8_lossy(reason);
                FetchOutcome::Failed(reason.replace(char::is_control, " "))
            }
            _ => return Err(MessageError),
        };
        Ok(Self { request, outcome })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: FetchRequest = FetchRequest {
        layer: 3,
        chunk: 1 << 40,
    };

    #[test]
    fn messages_survive_the_round_trip() {
        assert_eq!(FetchRequest::decode(&REQUEST.encode()), Ok(REQUEST));
        let failed = FetchOutcome::Failed("503".into());
        for outcome in [FetchOutcome::Present, FetchOutcome::Complete, failed] {
            let answer = FetchAnswer {
                request: REQUEST,
                outcome,
            };
            assert_eq!(FetchAnswer::decode(&answer.encode()), Ok(answer));
        }
    }

    #[test]
    fn messages_of_another_length_or_version_are_refused() {
        let bytes = REQUEST.encode();
        for length in 0..bytes.len() {
            assert!(FetchRequest::decode(&bytes[..length]).is_err());
            assert!(FetchAnswer::decode(&bytes[..length]).is_err());
        }
        assert!(FetchRequest::decode(&[bytes, bytes].concat()).is_err());
        let mut other = bytes;
        other[0] = 2;
        assert!(FetchRequest::decode(&other).is_err());
        assert!(FetchAnswer::decode(&[&bytes[..], &[9, 0, 0, 0]].concat()).is_err());
        assert!(FetchAnswer::decode(&[0; MAX_ANSWER_BYTES + 1]).is_err());
    }

    #[test]
    fn a_long_reason_is_cut_and_has_no_control_characters() {
        let answer = FetchAnswer {
            request: REQUEST,
            outcome: FetchOutcome::Failed("\u{1b}ö".repeat(500)),
        };
        let bytes = answer.encode();
        assert!(bytes.len() <= MAX_ANSWER_BYTES);
        let FetchOutcome::Failed(reason) = FetchAnswer::decode(&bytes).unwrap().outcome else {
            panic!()
        };
        assert!(!reason.contains(char::is_control) && reason.contains('ö'));
    }
}
