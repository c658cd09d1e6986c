//! `Idempotency-Key`: a repeated request to create a sandbox returns the first response instead of
//! creating another sandbox.

use crate::error::ApiError;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Maximum number of requests that are remembered per caller.
const MAX_REPLAYS: usize = 1024;
/// Time for which a request and its response are stored, from the arrival of the request.
const REPLAY_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Maximum size of a response in bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// A stored response.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn response(&self) -> Response {
        let mut response = Response::new(Body::from(self.body.clone()));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers.clone();
        response
    }
}

/// Request that was received with an `Idempotency-Key`.
#[derive(Debug)]
struct ReplaySlot {
    /// Digest of the request.
    request: [u8; 32],
    /// Time at which the request was received.
    since: Instant,
    /// Response. `None` while the first request is in flight.
    answer: watch::Receiver<Option<Arc<Answer>>>,
}

/// Remembered requests of one caller, by idempotency key. `order` has the keys sorted by age,
/// oldest first.
#[derive(Debug, Default)]
struct ReplayCache {
    slots: HashMap<String, ReplaySlot>,
    order: VecDeque<String>,
}

/// Stored responses, by the id of the caller's API key (`None`: the host's owner).
#[derive(Debug, Default)]
pub(crate) struct ReplayCaches(Mutex<HashMap<Option<String>, ReplayCache>>);

/// Returns the idempotency key of a request, if present.
pub(crate) fn key_of(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else {
        return Ok(None);
    };
    let is_valid = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    let text = value.to_str().unwrap_or_default();
    if (1..=255).contains(&text.len()) && text.as_bytes().iter().all(is_valid) {
        return Ok(Some(text.to_owned()));
    }
    Err(ApiError::invalid(
        "`Idempotency-Key` must be 1 to 255 of a-z, 0-9 and `-`",
    ))
}

/// Returns the error of an idempotency key that was used with another request.
pub(crate) fn key_reused() -> ApiError {
    ApiError::new(
        StatusCode::UNPROCESSABLE_ENTITY,
        "idempotency_key_reused",
        "this `Idempotency-Key` was used before with a different request: use a new key",
    )
    .permanent()
}

/// Returns a digest that identifies the call and its body.
pub(crate) fn digest(call: &str, body: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(call);
    // Separates the call from the body.
    hash.update([0]);
    hash.update(body);
    hash.finalize().into()
}

impl ReplayCaches {
    fn lock(&self) -> MutexGuard<'_, HashMap<Option<String>, ReplayCache>> {
        self.0.lock()
    }

    /// Executes `work`, unless `owner` sent the same request with the same idempotency key before.
    /// A repeated request waits for the first response and returns it. Only successful responses
    /// are stored, so that a failed request can be retried. `work` continues if the client
    /// disconnects.
    pub async fn execute_once<F>(
        self: &Arc<Self>,
        owner: Option<String>,
        key: String,
        request: [u8; 32],
        work: F,
    ) -> Result<Response, ApiError>
    where
        F: Future<Output = Response> + Send + 'static,
    {
        let (sender, mut answer) = {
            // The lock covers look-up and insertion, so that only one of two concurrent requests
            // executes.
            let mut caches = self.lock();
            // Idempotency keys of different callers do not collide.
            let cache = caches.entry(owner.clone()).or_default();
            cache.evict_expired();
            match cache.slots.get(&key) {
                Some(slot) if slot.request != request => {
                    return Err(key_reused());
                }
                Some(slot) => (None, slot.answer.clone()),
                None => {
                    let (sender, answer) = watch::channel(None);
                    cache.order.push_back(key.clone());
                    let slot = ReplaySlot {
                        request,
                        since: Instant::now(),
                        answer: answer.clone(),
                    };
                    cache.slots.insert(key.clone(), slot);
                    (Some(sender), answer)
                }
            }
        };
        if let Some(sender) = sender {
            // In a task of its own, which outlives the client's connection.
            let this = self.clone();
            tokio::spawn(async move {
                let mut entry = PendingReplay {
                    this,
                    owner,
                    key,
                    is_stored: false,
                };
                let answer = buffered(work.await).await;
                entry.is_stored = answer.status.is_success();
                // Remove a failed request before its response is visible: a retry must not find it.
                drop(entry);
                sender.send_replace(Some(Arc::new(answer)));
            });
        }
        // The sender is dropped without a response only if `work` panicked.
        let done = answer.wait_for(Option::is_some).await;
        let done = done.ok().and_then(|a| a.clone());
        let lost = || {
            ApiError::internal(
                "the first request with this `Idempotency-Key` was aborted: send the request again",
            )
        };
        done.map(|a| a.response()).ok_or_else(lost)
    }
}

/// Request in flight. Dropping this value removes its slot unless `is_stored` is set, also after a
/// panic.
struct PendingReplay {
    this: Arc<ReplayCaches>,
    owner: Option<String>,
    key: String,
    is_stored: bool,
}

impl Drop for PendingReplay {
    fn drop(&mut self) {
        if self.is_stored {
            return;
        }
        if let Some(cache) = self.this.lock().get_mut(&self.owner) {
            cache.slots.remove(&self.key);
            cache.order.retain(|k| *k != self.key);
        }
    }
}

impl ReplayCache {
    /// Removes expired requests, and the oldest requests until a new one does not exceed
    /// [`MAX_REPLAYS`].
    fn evict_expired(&mut self) {
        while let Some(oldest) = self.order.front() {
            let is_expired = |s: &ReplaySlot| s.since.elapsed() > REPLAY_LIFETIME;
            if self.order.len() < MAX_REPLAYS && !self.slots.get(oldest).is_some_and(is_expired) {
                return;
            }
            self.slots.remove(oldest);
            self.order.pop_front();
        }
    }
}

/// Reads a response completely, so that it can be repeated.
async fn buffered(response: Response) -> Answer {
    let (parts, body) = response.into_parts();
    // Response bodies are in memory, so that reading fails only above the limit. Responses that
    // create a sandbox are far smaller.
    let body = to_bytes(body, MAX_ANSWER_BYTES).await.unwrap_or_default();
    Answer {
        status: parts.status,
        headers: parts.headers,
        body,
    }
}
