//! Key broker: a separate process that unwraps secrets with the command of a key file, for a
//! process that cannot start programs. The two are connected by a socket.
//!
//! A message is its length (4 bytes, little-endian) followed by JSON.

use crate::data_keys::{hex, to_hex};
use crate::keyring::{MAX_WRAPPED_BYTES, key_error};
use crate::{Keyring, StoreError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, OwnedMutexGuard};
use zeroize::Zeroizing;

/// Maximum length in bytes of a message. A wrapped secret in hexadecimal takes up to half of it,
/// and names take the rest.
const MAX_MESSAGE_BYTES: usize = 4 * MAX_WRAPPED_BYTES;
/// Timeout of an answer. Longer than the timeout of the command, which the broker enforces.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(40);

/// Request to decrypt the secret of a tenant.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnwrapRequest {
    tenant: String,
    key: String,
    wrapped: String,
}

/// Answer to a request: the secret, or the reason of the failure.
#[derive(Serialize, Deserialize)]
enum UnwrapAnswer {
    Secret(Zeroizing<String>),
    Failed(String),
}

/// Connection to a key broker.
#[derive(Debug)]
pub struct KeyBroker(Arc<Mutex<UnixStream>>);

impl KeyBroker {
    /// Uses the broker at the other end of `socket`. Must be called inside a tokio runtime.
    pub fn new(socket: BlockingStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self(Arc::new(Mutex::new(UnixStream::from_std(socket)?))))
    }

    /// Decrypts a wrapped secret of a tenant with the master key `key`, in the broker process.
    pub(crate) async fn unwrap(
        &self,
        tenant: &str,
        key: &str,
        wrapped: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, StoreError> {
        let request = UnwrapRequest {
            tenant: tenant.to_owned(),
            key: key.to_owned(),
            wrapped: to_hex(wrapped),
        };
        let exchange = async {
            let socket = self.0.clone().lock_owned().await;
            let message = message(&request)?;
            // A separate task reads the answer even if the caller is dropped or times out.
            // Otherwise the next caller would receive this answer.
            let answer = tokio::spawn(exchange(socket, message));
            answer.await.map_err(io::Error::other).flatten()
        };
        let failed = |reason: String| key_error(tenant, &format!("the key broker: {reason}"));
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange)
            .await
            .map_err(|_| failed(format!("no answer within {ANSWER_TIMEOUT:?}")))?;
        match answer.map_err(|e| failed(e.to_string()))? {
            UnwrapAnswer::Secret(secret) => bytes(&secret)
                .map(Zeroizing::new)
                .ok_or_else(|| failed("a malformed answer".to_owned())),
            UnwrapAnswer::Failed(reason) => Err(key_error(tenant, &reason)),
        }
    }

    /// Serves requests with the command of `keyring` until the peer closes `socket`.
    ///
    /// # Errors
    /// A malformed request ends the service.
    pub fn serve(mut socket: BlockingStream, keyring: &Keyring) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        loop {
            let mut length = [0; 4];
            match socket.read_exact(&mut length) {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            let mut text = vec![0; checked_length(length)?];
            socket.read_exact(&mut text)?;
            let request: UnwrapRequest = parse(&text)?;
            let wrapped = bytes(&request.wrapped).ok_or(io::ErrorKind::InvalidData)?;
            let unwrapped = keyring.run(&request.tenant, "unwrap", &request.key, &wrapped);
            let answer = match runtime.block_on(unwrapped) {
                Ok(secret) => UnwrapAnswer::Secret(Zeroizing::new(to_hex(&secret))),
                Err(StoreError::Key { reason, .. }) => UnwrapAnswer::Failed(reason),
                Err(e) => UnwrapAnswer::Failed(e.to_string()),
            };
            socket.write_all(&message(&answer)?)?;
        }
    }
}

/// Sends `message` and returns the answer.
async fn exchange(
    mut socket: OwnedMutexGuard<UnixStream>,
    message: Zeroizing<Vec<u8>>,
) -> io::Result<UnwrapAnswer> {
    socket.write_all(&message).await?;
    let mut length = [0; 4];
    socket.read_exact(&mut length).await?;
    let mut text = Zeroizing::new(vec![0; checked_length(length)?]);
    socket.read_exact(&mut text).await?;
    parse(&text)
}

fn message(value: &impl Serialize) -> io::Result<Zeroizing<Vec<u8>>> {
    let text = Zeroizing::new(serde_json::to_vec(value)?);
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    Ok(Zeroizing::new([&length.to_le_bytes()[..], &text].concat()))
}

fn checked_length(length: [u8; 4]) -> io::Result<usize> {
    let length = usize::try_from(u32::from_le_bytes(length)).map_err(io::Error::other)?;
    if length <= MAX_MESSAGE_BYTES {
        Ok(length)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

fn parse<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
    // Discard the parser's error, which could contain a secret.
    serde_json::from_slice(text).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Decodes hexadecimal digits of any even number.
fn bytes(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let pairs = pairs.iter().map(|pair| std::str::from_utf8(pair).ok());
    pairs
        .map(|pair| pair.and_then(hex::<1>).map(|[byte]| byte))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    async fn read_request(peer: &mut UnixStream) -> UnwrapRequest {
        let mut length = [0; 4];
        peer.read_exact(&mut length).await.unwrap();
        let mut text = vec![0; checked_length(length).unwrap()];
        peer.read_exact(&mut text).await.unwrap();
        parse(&text).unwrap()
    }

    async fn answer(peer: &mut UnixStream, secret: &[u8]) {
        let answer = UnwrapAnswer::Secret(Zeroizing::new(to_hex(secret)));
        peer.write_all(&message(&answer).unwrap()).await.unwrap();
    }

    #[tokio::test]
    async fn an_answer_to_a_cancelled_request_is_not_given_to_the_next_caller() {
        let (ours, theirs) = BlockingStream::pair().unwrap();
        let broker = Arc::new(KeyBroker::new(ours).unwrap());
        theirs.set_nonblocking(true).unwrap();
        let mut peer = UnixStream::from_std(theirs).unwrap();
        let cancelled = tokio::spawn({
            let broker = broker.clone();
            async move { broker.unwrap("one", "k1", b"1").await }
        });
        assert_eq!(read_request(&mut peer).await.tenant, "one");
        cancelled.abort();
        assert!(cancelled.await.unwrap_err().is_cancelled());
        let next = broker.unwrap("two", "k1", b"2");
        let serve = async {
            answer(&mut peer, b"secret of one").await;
            assert_eq!(read_request(&mut peer).await.tenant, "two");
            answer(&mut peer, b"secret of two").await;
        };
        let (secret, ()) = tokio::join!(next, serve);
        assert_eq!(&**secret.unwrap(), b"secret of two");
    }
}
