//! Activity of one client connection: requests in flight and idle times. The listener closes
//! inactive connections at the time that follows from them.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *lingering* close reads and discards the remaining bytes of the client first, so that the last
//! response is not lost.

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

/// State of a client's connection.
#[derive(Debug)]
struct ActivityState {
    /// Number of requests whose responses are incomplete.
    in_flight: usize,
    /// True for HTTP/2, whose frames may belong to no request. There, received bytes do not imply
    /// that the head of a request has begun.
    http2: bool,
    /// True if the last request had a body. Its remainder may still arrive when the connection is
    /// closed.
    has_body: bool,
    /// True if the gateway is shutting down. Then the connection is closed without lingering.
    shutting_down: bool,
    /// True if the client's end of file is ignored until the response is sent. If false, an end of
    /// file means that the client has disconnected.
    answer_after_eof: bool,
    /// Task to wake when `answer_after_eof` becomes false.
    eof_waker: Option<Waker>,
    /// Time since which no request is in flight.
    idle_since: Instant,
    /// Time since which the head of a request is being received.
    head_since: Option<Instant>,
}

impl ActivityState {
    fn close_on_eof(&mut self) {
        self.answer_after_eof = false;
        // The task that reads the connection must now see the end of file.
        if let Some(waker) = self.eof_waker.take() {
            waker.wake();
        }
    }
}

impl ConnectionActivity {
    /// Starts as if a head was being received: a new client has `GatewayLimits::head` for its first
    /// request.
    pub(crate) fn new(started: Instant, permit: ConnectionPermit) -> Self {
        let state = Mutex::new(ActivityState {
            in_flight: 0,
            http2: false,
            has_body: false,
            shutting_down: false,
            answer_after_eof: false,
            eof_waker: None,
            idle_since: started,
            head_since: Some(started),
        });
        Self { state, permit }
    }

    /// Disables the lingering close during shutdown.
    pub(crate) fn shut_down(&self) {
        self.state().shutting_down = true;
    }

    /// Returns true if the client's end of file is to be ignored for now. `waker` is woken when
    /// this changes.
    pub(crate) fn waits_after_eof(&self, waker: &Waker) -> bool {
        let mut state = self.state();
        // Register the waker under the lock, so that `close_on_eof` cannot miss it.
        if state.answer_after_eof {
            state.eof_waker = Some(waker.clone());
        }
        state.answer_after_eof
    }

    fn state(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock()
    }

    /// Must be called when bytes arrive. Starts the time limit of a request's head if the bytes
    /// begin a head.
    pub(crate) fn bytes_arrived(&self) {
        let mut state = self.state();
        if state.in_flight == 0 && !state.http2 && state.head_since.is_none() {
            state.head_since = Some(Instant::now());
        }
    }

    /// Returns true if the client may still be sending bytes of an answered request.
    pub(crate) fn may_send_more(&self) -> bool {
        let state = self.state();
        !state.shutting_down && (state.has_body || state.head_since.is_some())
    }

    /// Returns the time at which the connection is closed without further activity.
    pub(crate) fn deadline(&self, limits: &GatewayLimits) -> Option<Instant> {
        let state = self.state();
        match state.head_since {
            // A response may take any time.
            _ if state.in_flight > 0 => None,
            Some(since) => since.checked_add(limits.head),
            // A client that authenticated may stay idle for longer.
            None if self.permit.is_known() => state.idle_since.checked_add(limits.idle),
            None => state.idle_since.checked_add(limits.idle_unknown),
        }
    }
}

/// Request in flight on a client's connection. Dropping this value ends the request.
pub(crate) struct InFlightRequest(Arc<ConnectionActivity>);

impl InFlightRequest {
    /// Registers a request whose head was received completely.
    pub(crate) fn begin(activity: &Arc<ConnectionActivity>, request: &Request<Incoming>) -> Self {
        let mut state = activity.state();
        state.in_flight += 1;
        state.head_since = None;
        state.http2 = request.version() == Version::HTTP_2;
        state.has_body = !state.http2 && !request.body().is_end_stream();
        // The control plane answers a `GET` or `HEAD` soon, so a client that only closed its
        // sending side still receives the response. For guests, the gateway calls `close_on_eof`.
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        state.answer_after_eof = !state.http2 && !state.has_body && is_read;
        drop(state);
        Self(Arc::clone(activity))
    }

    /// Stops ignoring the client's end of file, because the answer may take any time.
    pub(crate) fn close_on_eof(&self) {
        self.0.state().close_on_eof();
    }

    /// Marks the end of the request's body: later bytes belong to an upgraded stream.
    pub(crate) fn body_ended(&self) {
        self.0.state().has_body = false;
    }

    /// Marks the client as known: it presented a key or reached a sandbox.
    pub(crate) fn mark_known(&self) {
        self.0.permit.mark_known();
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        // The count was incremented in `begin`.
        state.in_flight -= 1;
        state.idle_since = Instant::now();
        state.close_on_eof();
    }
}
