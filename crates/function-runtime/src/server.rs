//! HTTP server of a tenant's process: accepts the gateway's connections, selects the function of
//! each request, applies its limits and runs a guest (an instance of the function's module).
//!
//! A *tenant* is one owner of functions. A *slot* is address space for the memory of one instance,
//! which requests use one after the other. The *head* of a request or response is its first line
//! and its headers, without the body. A *permit* counts towards a limit until it is dropped. An
//! *epoch* is a short interval, counted by the thread in `epoch_ticker`. A *fiber* is a stack of
//! its own on which a guest can yield to other requests. A guest on a fiber yields when an epoch
//! ends.

use crate::core_wasi::CoreState;
use crate::cpu_meter::{MeteredGuest, RequestUsage};
use crate::epoch_ticker::EpochTicker;
use crate::fault::RequestFault;
use crate::function::{Deployment, Function, VersionCode};
use crate::guest_body::{GuestBody, GuestTask, ResponseBody};
use crate::head_timeout::{HeadTimeout, InFlightRequests};
use crate::http_world::HttpState;
use crate::logs::RequestLog;
use crate::memory_limiter::{MemoryLimiter, MemoryReservation};
use crate::outgoing::OutgoingRequests;
use crate::tenant::Tenant;
use crate::write_timeout::WriteTimeout;
use crate::{core_world, request_body};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Body;
use hyper::header::{HOST, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::future::poll_fn;
use std::hash::{BuildHasher, RandomState};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, Sleep, sleep_until};

/// Multiplier for request ids. Multiplication by an odd number modulo 2^64 maps different request
/// numbers to different values.
const ID_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
/// Header with the name of the function. The gateway overwrites the value of a client.
pub const FUNCTION_HEADER: HeaderName =
    HeaderName::from_static(jiffy_proto::function::FUNCTION_HEADER);
/// Header with the request's id, in requests of the gateway and in responses.
pub const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Maximum length of an id that is accepted from a request.
const MAX_REQUEST_ID_BYTES: usize = 64;
/// Timeout for the head of each request on a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for which a write may make no progress.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of a request's head in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Maximum number of outgoing requests of a guest per incoming request.
const MAX_OUTGOING_REQUESTS: u32 = 32;
/// Delay after a failed accept.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Server of one tenant.
#[derive(Clone)]
pub struct FunctionServer(Arc<ServerState>);

/// State that all connections share.
struct ServerState {
    tenant: Arc<Tenant>,
    ticker: EpochTicker,
    /// Permits for connections of the gateway.
    connections: Arc<Semaphore>,
    next_id: AtomicU64,
    /// Random values of this process. The first distinguishes its ids from the ids of other
    /// processes. The second hides the number of requests.
    id_keys: [u64; 2],
}

impl FunctionServer {
    /// Creates a server.
    #[must_use]
    pub fn new(tenant: Arc<Tenant>, ticker: EpochTicker) -> Self {
        let connections = usize::try_from(tenant.limits().connections).unwrap_or(1);
        Self(Arc::new(ServerState {
            tenant,
            ticker,
            connections: Arc::new(Semaphore::new(connections)),
            next_id: AtomicU64::new(0),
            // The standard library has no other random numbers: each `RandomState` has its own
            // keys.
            id_keys: [(); 2].map(|()| RandomState::new().hash_one(0u8)),
        }))
    }

    /// Accepts connections of the gateway until the process exits.
    pub async fn listen(self, listener: UnixListener) {
        loop {
            // The permit precedes the accept: further connections wait in the kernel's queue.
            let Ok(permit) = self.0.connections.clone().acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let server = self.clone();
                    tokio::spawn(async move {
                        server.connection(stream).await;
                        drop(permit);
                    });
                }
                // For example, no descriptor is free.
                Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    }

    /// Serves one connection of the gateway.
    pub async fn connection(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let in_flight = InFlightRequests::default();
        let service = service_fn(|request| async {
            let in_flight_request = in_flight.enter();
            let response = self.handle(request).await;
            Ok::<_, Infallible>(response.map(|body| body.until_sent(&in_flight_request)))
        });
        let stream = WriteTimeout::new(stream, WRITE_TIMEOUT);
        let stream = HeadTimeout::new(stream, HEAD_TIMEOUT, in_flight.clone());
        // The connection was closed or failed: no further action is necessary.
        let _ = http1::Builder::new()
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }

    /// Answers a request of the gateway, which names the function in [`FUNCTION_HEADER`].
    pub async fn handle<B>(&self, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let name = request
            .headers()
            .get(FUNCTION_HEADER)
            .and_then(|name| name.to_str().ok());
        let name = name.unwrap_or_default().to_owned();
        let Some(function) = self.0.tenant.function(&name) else {
            return fault_response(&RequestFault::NotFound);
        };
        let id = self.request_id(&request);
        self.answer(name, &function, &id, request).await
    }

    pub(crate) fn function(&self, name: &str) -> Option<Arc<Function>> {
        self.0.tenant.function(name)
    }

    /// Answers a request to a function. A failure becomes an error response.
    pub(crate) async fn answer<B>(
        &self,
        name: String,
        function: &Arc<Function>,
        id: &HeaderValue,
        request: Request<B>,
    ) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let log = Arc::new(RequestLog::new(function.log.clone(), id.clone()));
        let mut response = match self.run(name, function, request, &log).await {
            Ok(response) => response,
            Err(fault) => {
                record_fault(function, &log, &fault);
                fault_response(&fault)
            }
        };
        let headers = response.headers_mut();
        headers.insert(REQUEST_ID_HEADER, id.clone());
        response
    }

    /// Returns the id in the request's header if the id is usable, otherwise a new id.
    fn request_id<B>(&self, request: &Request<B>) -> HeaderValue {
        match request.headers().get(REQUEST_ID_HEADER) {
            Some(id) if (1..=MAX_REQUEST_ID_BYTES).contains(&id.len()) && id.to_str().is_ok() => {
                id.clone()
            }
            _ => self.new_request_id(),
        }
    }

    /// Returns a new id of 128 bits. The first half is random and constant for the process. The
    /// second half differs between the requests of the process, and does not show their number.
    pub(crate) fn new_request_id(&self) -> HeaderValue {
        // The counter only has to return different numbers, so that `Relaxed` suffices.
        let number = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let mixed = number.wrapping_mul(ID_MULTIPLIER) ^ self.0.id_keys[1];
        let id = (u128::from(self.0.id_keys[0]) << 64) | u128::from(mixed);
        let id = HeaderValue::from_maybe_shared(Bytes::from(format!("{id:032x}")));
        // Hexadecimal digits are always a valid value: the default is never used.
        id.unwrap_or(HeaderValue::from_static("unnamed"))
    }

    /// Checks the head, reads the body, waits for a permit and a slot, and runs a guest.
    async fn run(
        &self,
        name: String,
        function: &Arc<Function>,
        request: Request<impl Body<Data = Bytes> + Unpin>,
        log: &Arc<RequestLog>,
    ) -> Result<Response<ResponseBody>, RequestFault> {
        let start = Instant::now();
        let deployment = function.deployment();
        if !deployment.enabled {
            return Err(RequestFault::Disabled);
        }
        let (mut head, body) = request.into_parts();
        if head.method == Method::CONNECT {
            return Err(RequestFault::BadRequest(
                "the method CONNECT is not supported",
            ));
        }
        if head.uri.authority().is_none() && !head.headers.contains_key(HOST) {
            return Err(RequestFault::BadRequest("the request has no host"));
        }
        // The header is addressed to this process and not to the guest.
        head.headers.remove(FUNCTION_HEADER);
        let mut reservation = MemoryReservation::empty(self.0.tenant.budget());
        // The body precedes permit and slot: a slow client occupies neither.
        let body = request_body::read(body, &deployment.settings.limits, &mut reservation).await?;
        let permit = deployment.admit().await?;
        // Only a function's own limit has a queue. Without a free slot, the request fails at once.
        let slot = self
            .0
            .tenant
            .slots()
            .clone()
            .try_acquire_owned()
            .map_err(|_| RequestFault::HostBusy)?;
        let usage = Arc::new(RequestUsage::default());
        let guest = GuestRequest {
            server: self.clone(),
            name,
            function: function.clone(),
            deadline: start + deployment.settings.limits.wall_time(),
            deployment,
            usage,
            log: log.clone(),
            _permits: [permit, slot],
            _reservation: reservation,
        };
        // The measured latency excludes the waits for the body and the permit.
        let admitted = Instant::now();
        let response = match &guest.deployment.version.code {
            VersionCode::Core(_) => guest.run_core(head, body).await,
            VersionCode::Http(_) => guest.run_http(head, body).await,
        };
        function.metrics.record_response(admitted.elapsed());
        response
    }
}

/// Counts a failure, and writes it to the function's log with the details that the client does not
/// receive.
fn record_fault(function: &Function, log: &RequestLog, fault: &RequestFault) {
    function.metrics.record_fault(fault);
    match fault.detail() {
        Some(detail) => log.fault(&format!("{}: {detail}", fault.error_code())),
        None => log.fault(fault.error_code()),
    }
}

/// Returns the error response of a fault.
pub(crate) fn fault_response(fault: &RequestFault) -> Response<ResponseBody> {
    fault.answer().map(ResponseBody::from)
}

/// Request of a running guest, with all resources that it occupies.
struct GuestRequest {
    server: FunctionServer,
    name: String,
    function: Arc<Function>,
    deployment: Arc<Deployment>,
    usage: Arc<RequestUsage>,
    log: Arc<RequestLog>,
    /// Deadline of the request.
    deadline: Instant,
    /// Permits of the function and of the tenant's slot.
    _permits: [OwnedSemaphorePermit; 2],
    /// Memory of the request's body.
    _reservation: MemoryReservation,
}

impl Drop for GuestRequest {
    fn drop(&mut self) {
        // This also counts the processor time of requests whose client disconnected: their future
        // is dropped.
        self.function.metrics.record_cpu(self.usage.cpu());
    }
}

impl GuestRequest {
    fn limiter(&self) -> MemoryLimiter {
        let bytes = self.deployment.settings.limits.memory_bytes();
        MemoryLimiter::new(self.server.0.tenant.budget(), self.usage.clone(), bytes)
    }

    /// Returns the sender of outgoing requests. `None` if the function has no allowed hosts.
    fn outgoing(&self) -> Option<OutgoingRequests> {
        let is_allowed = !self.deployment.settings.allow.is_empty();
        is_allowed.then(|| OutgoingRequests {
            egress: self.server.0.tenant.egress().clone(),
            function: self.name.clone(),
            left: MAX_OUTGOING_REQUESTS,
        })
    }

    /// Runs a guest within its limits of processor time and of total time. The caller pins the
    /// future, so that its several KiB are not moved.
    async fn run_limited<T, F>(&self, guest: Pin<&mut F>) -> Result<T, RequestFault>
    where
        F: Future<Output = wasmtime::Result<Result<T, RequestFault>>>,
    {
        // The guest yields at the end of an epoch only while the ticker counts it as running.
        let _ticking = self.server.0.ticker.enter();
        let _running = self.function.metrics.enter();
        #[cfg(feature = "fast-reset")]
        let guest = crate::fast_reset::within_windows(guest);
        let guest = async { guest.await.map_err(|error| self.usage.fault(&error))? };
        let guest = pin!(guest);
        let limit = self.deployment.settings.limits.cpu_time();
        let mut guest = MeteredGuest::new(guest, &self.usage, limit);
        // The timer is set when the guest first waits: almost all guests complete in their
        // first poll.
        let mut timer = pin!(None::<Sleep>);
        poll_fn(|context| {
            if let Poll::Ready(ended) = Pin::new(&mut guest).poll(context) {
                return Poll::Ready(ended);
            }
            if timer.is_none() {
                timer.set(Some(sleep_until(self.deadline)));
            }
            if let Some(timer) = timer.as_mut().as_pin_mut() {
                ready!(timer.poll(context));
            }
            // The flag is set before the caller drops the guest's store (see
            // `RequestUsage::ended_early`).
            self.usage.ended_early.store(true, Ordering::Release);
            Poll::Ready(Err(RequestFault::Timeout))
        })
        .await
    }

    /// Runs a request in a core module (`jiffy-core/1`).
    async fn run_core(
        self,
        head: Parts,
        body: Bytes,
    ) -> Result<Response<ResponseBody>, RequestFault> {
        let VersionCode::Core(code) = &self.deployment.version.code else {
            // Not reachable: `run` has matched the world.
            return Err(RequestFault::Trap(
                "the version is of another world".to_owned(),
            ));
        };
        let message = core_world::request_message(&head, &body);
        // The message contains a copy of the body.
        drop(body);
        let max = self.deployment.settings.limits.response_bytes;
        let engine = self.server.0.tenant.engine();
        // `call` calls this closure a second time if it discards its attempt without a fiber and
        // starts again on a fiber.
        let state = || {
            self.usage.reset_attempt();
            CoreState::new(self.limiter(), Some(self.log.clone()))
        };
        let guest = pin!(code.call(engine, state, &message, max));
        let response = self.run_limited(guest).await?;
        Ok(response.map(ResponseBody::from))
    }

    /// Runs the guest until its response has a head. A guest that is still running continues in a
    /// task of its own, so that a client that does not read the response cannot delay the time
    /// limit.
    async fn run_http(
        self,
        head: Parts,
        body: Bytes,
    ) -> Result<Response<ResponseBody>, RequestFault> {
        let max = self.deployment.settings.limits.response_bytes;
        let (sender, receiver) = oneshot::channel();
        let usage = self.usage.clone();
        let request = Request::from_parts(head, Full::new(body));
        let head_sent = Arc::new(AtomicBool::new(false));
        let sent = head_sent.clone();
        let mut guest = Box::pin(async move {
            let state = HttpState::new(
                self.limiter(),
                &self.deployment.settings,
                Some(self.log.clone()),
                self.outgoing(),
            );
            let engine = self.server.0.tenant.engine();
            let guest = async {
                let VersionCode::Http(code) = &self.deployment.version.code else {
                    return Err(wasmtime::Error::msg("the version is of another world"));
                };
                code.call(engine, state, request, sender, &self.usage)
                    .await
                    .map(Ok)
            };
            // `answer` records the faults that occur before the head is sent.
            let ended = self.run_limited(pin!(guest)).await;
            if let Err(fault) = &ended
                && sent.load(Ordering::Acquire)
            {
                record_fault(&self.function, &self.log, fault);
            }
            ended
        });
        // A guest that completes in this poll needs no task.
        let polled = poll_fn(|context| Poll::Ready(guest.as_mut().poll(context))).await;
        let task = match polled {
            Poll::Ready(ended) => GuestTask::Ended(ended),
            Poll::Pending => GuestTask::Running(tokio::spawn(guest)),
        };
        if let GuestTask::Ended(Err(fault)) = &task {
            // No part of the response was sent.
            return Err(fault.clone());
        }
        let response = match receiver.await {
            Ok(Ok(response)) => response,
            Ok(Err(code)) => {
                return Err(RequestFault::Trap(format!(
                    "the guest returned the error {code:?}"
                )));
            }
            // The guest dropped the sender without a response.
            Err(_) => return Err(task.fault().await),
        };
        if response.status().is_informational() {
            // For example, status 101 would upgrade the connection, and an upgraded connection
            // would bypass the checks of HTTP messages.
            let status = response.status();
            return Err(RequestFault::Trap(format!(
                "the response has the status {status}"
            )));
        }
        // From here on, the guest's task records its own faults.
        head_sent.store(true, Ordering::Release);
        let (head, body) = response.into_parts();
        let body = GuestBody::new(body, max, usage, task)?;
        Ok(Response::from_parts(head, body.into()))
    }
}
