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

/// Slot of the cache: a request that was received with an `Idempotency-Key`, and its response.
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
    /// Responses to the calls of one caller, by idempotency key.
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

/// Returns the error of a caller with too many requests in flight.
fn too_many() -> ApiError {
    let message =
        format!("{MAX_REPLAYS} requests with an `Idempotency-Key` are in flight: try again later");
    ApiError::too_many("max_exchanges", message).after(1)
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
            cache.evict();
            match cache.slots.get(&key) {
                Some(slot) if slot.request != request => {
                    return Err(key_reused());
                }
                Some(slot) => (None, slot.answer.clone()),
                // Without a slot, a repetition of this request would create a second sandbox.
                None if cache.order.len() >= MAX_REPLAYS => return Err(too_many()),
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
            // Execute the call in a task of its own, which outlives the client's connection.
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
    /// True once the response was stored. Otherwise, dropping this value frees the key.
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
    /// Removes expired responses, and the oldest responses until a new request does not exceed
    /// [`MAX_REPLAYS`]. Requests in flight remain: their repetitions must wait for them.
    fn evict(&mut self) {
        let slots = &mut self.slots;
        let mut surplus = (self.order.len() + 1).saturating_sub(MAX_REPLAYS);
        self.order.retain(|key| {
            let Some(slot) = slots.get(key) else {
                return false;
            };
            let is_evicted = surplus > 0 || slot.since.elapsed() > REPLAY_LIFETIME;
            if !is_evicted || slot.answer.borrow().is_none() {
                return true;
            }
            surplus = surplus.saturating_sub(1);
            slots.remove(key);
            false
        });
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    /// Executes `work` once for a key. The response is empty.
    async fn execute(
        caches: Arc<ReplayCaches>,
        key: impl Into<String>,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let work = async move {
            work.await;
            Response::new(Body::empty())
        };
        caches.execute_once(None, key.into(), [0; 32], work).await
    }

    #[tokio::test]
    async fn a_request_in_flight_is_remembered_while_others_are_evicted() {
        let caches = Arc::new(ReplayCaches::default());
        let (release, runs) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let create = || {
            let (release, runs) = (release.clone(), runs.clone());
            async move {
                runs.fetch_add(1, Ordering::Relaxed);
                release.notified().await;
            }
        };
        let first = tokio::spawn(execute(caches.clone(), "slow", create()));
        while runs.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        for number in 0..=MAX_REPLAYS {
            let key = format!("k{number}");
            execute(caches.clone(), key, async {}).await.unwrap();
        }
        let second = tokio::spawn(execute(caches.clone(), "slow", create()));
        // The oldest response was evicted, so that its request is executed again.
        execute(caches.clone(), "k0", async {}).await.unwrap();
        release.notify_one();
        first.await.unwrap().unwrap();
        second.await.unwrap().unwrap();
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        assert!(caches.lock().get(&None).unwrap().order.len() <= MAX_REPLAYS);
    }

    #[tokio::test]
    async fn requests_beyond_the_limit_are_rejected_if_all_are_in_flight() {
        let caches = Arc::new(ReplayCaches::default());
        let mut waiting = tokio::task::JoinSet::new();
        for number in 0..MAX_REPLAYS {
            let key = format!("k{number}");
            waiting.spawn(execute(caches.clone(), key, std::future::pending()));
        }
        while caches.lock().get(&None).map_or(0, |c| c.order.len()) < MAX_REPLAYS {
            tokio::task::yield_now().await;
        }
        execute(caches.clone(), "next", async {}).await.unwrap_err();
    }
}
