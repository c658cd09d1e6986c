//! Activity on one client's connection: requests in flight, and the times since which it is idle.

use crate::admission::ConnectionPermit;
use crate::config::GatewayLimits;
use hyper::body::{Body as _, Incoming};
use hyper::{Method, Request, Version};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::task::Waker;
use tokio::time::Instant;

/// Requests in flight on a connection, and its idle times.
#[derive(Debug)]
pub(crate) struct ConnectionActivity {
    state: Mutex<ActivityState>,
    permit: ConnectionPermit,
}

#[derive(Debug)]
struct ActivityState {
    /// Requests whose answers are not complete.
    in_flight: usize,
    /// HTTP/2 has frames that belong to no request: there, bytes do not mean that a head has begun.
    http2: bool,
    /// The last request came with a body, whose rest may still arrive when the connection is
    /// closed.
    has_body: bool,
    /// The gateway is shutting down: no lingering close.
    shutting_down: bool,
    /// The end of the client's bytes is ignored until the answer is out. Otherwise it counts as a
    /// client that has gone.
    answer_after_eof: bool,
    /// Task to wake when `answer_after_eof` ends.
    eof_waker: Option<Waker>,
    /// Since when nothing is under way.
    idle_since: Instant,
    /// Since when the head of a request is arriving.
    head_since: Option<Instant>,
}

impl ActivityState {
    fn close_on_eof(&mut self) {
        self.answer_after_eof = false;
        if let Some(waker) = self.eof_waker.take() {
            waker.wake();
        }
    }
}

impl ConnectionActivity {
    /// Starts as if a head had begun: a client that connects has `GatewayLimits::head` for its
    /// first request.
    pub(crate) fn new(began: Instant, permit: ConnectionPermit) -> Self {
        let state = Mutex::new(ActivityState {
            in_flight: 0,
            http2: false,
            has_body: false,
            shutting_down: false,
            answer_after_eof: false,
            eof_waker: None,
            idle_since: began,
            head_since: Some(began),
        });
        Self { state, permit }
    }

    /// The gateway ends: an answered client is not read from any more.
    pub(crate) fn shut_down(&self) {
        self.state().shutting_down = true;
    }

    /// Returns true if the end of the client's bytes is to be ignored for now; `waker` is woken
    /// when it is no longer.
    pub(crate) fn waits_after_eof(&self, waker: &Waker) -> bool {
        let mut state = self.state();
        if state.answer_after_eof {
            state.eof_waker = Some(waker.clone());
        }
        state.answer_after_eof
    }

    fn state(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock()
    }

    pub(crate) fn bytes_arrived(&self) {
        let mut state = self.state();
        if state.in_flight == 0 && !state.http2 && state.head_since.is_none() {
            state.head_since = Some(Instant::now());
        }
    }

    /// Returns true if the client may still be sending bytes of a request that is already answered.
    pub(crate) fn may_send_more(&self) -> bool {
        let state = self.state();
        !state.shutting_down && (state.has_body || state.head_since.is_some())
    }

    /// When it is closed if nothing else happens.
    pub(crate) fn deadline(&self, limits: &GatewayLimits) -> Option<Instant> {
        let state = self.state();
        match state.head_since {
            _ if state.in_flight > 0 => None,
            Some(since) => since.checked_add(limits.head),
            None if self.permit.is_known() => state.idle_since.checked_add(limits.idle),
            None => state.idle_since.checked_add(limits.idle_unknown),
        }
    }
}

/// A request that is under way until this is dropped.
pub(crate) struct InFlightRequest(Arc<ConnectionActivity>);

impl InFlightRequest {
    pub(crate) fn begin(activity: &Arc<ConnectionActivity>, request: &Request<Incoming>) -> Self {
        let mut state = activity.state();
        state.in_flight += 1;
        state.head_since = None;
        state.http2 = request.version() == Version::HTTP_2;
        state.has_body = !state.http2 && !request.body().is_end_stream();
        // A `GET` or `HEAD` of the control plane is answered soon; `close_on_eof` is called for
        // guests.
        let asks = matches!(*request.method(), Method::GET | Method::HEAD);
        state.answer_after_eof = !state.http2 && !state.has_body && asks;
        drop(state);
        Self(Arc::clone(activity))
    }

    /// The answer may take any time: a client that closes its side is taken for gone.
    pub(crate) fn close_on_eof(&self) {
        self.0.state().close_on_eof();
    }

    /// The request's body is over: later bytes are those of an upgraded stream.
    pub(crate) fn body_ended(&self) {
        self.0.state().has_body = false;
    }

    /// The client showed a key, or reached a sandbox.
    pub(crate) fn mark_known(&self) {
        self.0.permit.mark_known();
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.in_flight -= 1;
        state.idle_since = Instant::now();
        state.close_on_eof();
    }
}
