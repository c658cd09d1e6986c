//! One request to a guest: on a connection that waited, or a fresh one.

use crate::answer::Failure;
use crate::body::{FromClient, ToGuest};
use crate::counters::{Counters, add, remove};
use crate::gateway::Shared;
use crate::pool::{Key, Lease, Pool};
use crate::sandboxes::{ExchangePermit, OpenError, Sandboxes};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use jiffy_proto::agent::ENVD_PORT;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::timeout;

/// How long a connection may have waited when what is sent on it cannot be sent again: servers in guests may be about to close it. The agent
/// is not: it keeps its connections open far longer than the pool does.
const FRESH: Duration = Duration::from_secs(1);

/// One of the exchanges under way.
#[derive(Debug)]
pub(crate) struct Underway {
    counters: Arc<Counters>,
    /// Its place among those of the sandbox's owner.
    _permit: ExchangePermit,
}

impl Underway {
    /// None if `most` are under way already.
    pub(crate) fn begin(
        counters: &Arc<Counters>,
        most: usize,
        permit: ExchangePermit,
    ) -> Option<Self> {
        add(&counters.exchanges_open, 1);
        let underway = Self {
            counters: Arc::clone(counters),
            _permit: permit,
        };
        let count = counters.exchanges_open.load(Relaxed);
        (count <= most as u64).then_some(underway)
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        remove(&self.counters.exchanges_open);
    }
}

/// Sends a request and waits, without limit, for the head of the answer. `fresh`: not on a connection that has served before.
pub(crate) async fn send<S: Sandboxes>(
    shared: &Shared<S>,
    key: &Key,
    parts: Parts,
    body: FromClient,
    fresh: bool,
) -> Result<(Response<Incoming>, Lease), Failure> {
    let counters = &shared.counters;
    let again = (body.is_end_stream() && idempotent(&parts.method)).then(|| parts.clone());
    let mut request = Request::from_parts(parts, ToGuest::new(body, Arc::clone(counters)));
    let longest = if again.is_some() || u32::from(key.1) == ENVD_PORT {
        Duration::MAX
    } else {
        FRESH
    };
    if !fresh && let Some(mut lease) = shared.pool.take(key, longest) {
        add(&counters.reused, 1);
        match lease.sender.try_send_request(request).await {
            Ok(answer) => return Ok((answer, lease)),
            Err(mut error) => match (error.take_message(), again) {
                // Nothing of it was sent.
                (Some(unsent), _) => request = unsent,
                (None, Some(parts)) => {
                    request = Request::from_parts(parts, ToGuest::empty(Arc::clone(counters)));
                }
                (None, None) => return Err(broken_off(error.error())),
            },
        }
        add(&counters.retried, 1);
    }
    let mut lease = connect(shared, key).await?;
    match lease.sender.try_send_request(request).await {
        Ok(answer) => Ok((answer, lease)),
        Err(error) => Err(broken_off(error.error())),
    }
}

/// Whether doing it twice is as good as once (RFC 9110, 9.2.2).
fn idempotent(method: &Method) -> bool {
    method.is_idempotent()
}

fn broken_off(error: &hyper::Error) -> Failure {
    let reason = if error.is_parse() || error.is_parse_too_large() {
        "its answer is not HTTP, or its head is too large"
    } else if error.is_user() {
        "the client's request body broke off"
    } else {
        "it closed the connection before answering"
    };
    Failure::Unavailable(reason.to_owned())
}

async fn connect<S: Sandboxes>(shared: &Shared<S>, key: &Key) -> Result<Lease, Failure> {
    let limits = &shared.config.limits;
    let slot = shared
        .pool
        .slot(&key.0, limits.exchanges_per_sandbox)
        .ok_or(Failure::Busy)?;
    let epoch = shared.pool.epoch();
    let opening = shared.sandboxes.open(&key.0, key.1);
    let stream = match timeout(limits.open, opening).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(OpenError::NotFound)) => return Err(Failure::NotFound),
        Ok(Err(OpenError::NotRunning)) => return Err(Failure::NotRunning),
        Ok(Err(OpenError::PortClosed)) => return Err(Failure::PortClosed),
        Ok(Err(OpenError::Limit(reason))) => return Err(Failure::Limit(reason)),
        Ok(Err(OpenError::Unavailable(reason))) => return Err(Failure::Unavailable(reason)),
        Err(_) => {
            return Err(Failure::Unavailable(
                "it could not be opened in time".to_owned(),
            ));
        }
    };
    add(&shared.counters.guest_connections, 1);
    let (sender, connection) = http1::Builder::new()
        .preserve_header_case(true)
        .max_headers(limits.headers)
        .max_header_size(limits.head_bytes)
        .max_buf_size(limits.head_bytes)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|e| broken_off(&e))?;
    // Its errors are those of the exchanges on it.
    let driver = tokio::spawn(connection.with_upgrades());
    Ok(Pool::lease(
        key.clone(),
        epoch,
        sender,
        driver.abort_handle(),
        slot,
    ))
}
