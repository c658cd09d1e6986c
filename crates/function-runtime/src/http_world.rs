//! World `wasi:http/proxy@0.2`, the interface of components: the component exports the handler of
//! wasi:http. It has clocks, random numbers, the environment of its deployment and output to the
//! function's log, but no files or sockets.
//!
//! The *world* of a module is the interface between the module and its host. An *epoch* is a short
//! interval, counted by the thread in `epoch_ticker`. A guest yields when an epoch ends. The
//! *broker* is a thread of the daemon that connects to other hosts for guests.

use crate::cpu_meter::RequestUsage;
use crate::epoch_ticker::yield_to_runtime;
use crate::logs::RequestLog;
use crate::memory_limiter::MemoryLimiter;
use crate::outgoing::{OutgoingRequests, SentRequest};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use jiffy_proto::function::{LoadSettings, LogStream};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use tokio::io::AsyncWrite;
use tokio::sync::oneshot;
use wasmtime::component::{Component, Linker, ResourceTable};
use wasmtime::{Engine, Store};
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::p2::bindings::ProxyPre;
use wasmtime_wasi_http::p2::bindings::http::types::{ErrorCode, Scheme};
use wasmtime_wasi_http::p2::body::HyperOutgoingBody;
use wasmtime_wasi_http::{
    Error, RequestOptions, WasiBody, WasiHttpCtx, WasiHttpCtxView, WasiHttpHooks, WasiHttpView,
};

/// Maximum number of resources (handles of wasi) that a guest holds at once.
const MAX_HANDLES: usize = 256;
/// Maximum size in bytes of the headers of one message, as represented in memory.
const MAX_FIELDS_BYTES: usize = 64 << 10;
/// Maximum number of random bytes per call.
const MAX_RANDOM_BYTES: u64 = 64 << 10;
/// Maximum number of bytes that the host copies from a guest in one call.
const MAX_CALL_BYTES: usize = 16 << 20;
/// Number of buffered body bytes, of a response or of an outgoing request, at which the guest must
/// wait.
const BODY_CHUNK_BYTES: usize = 64 << 10;

/// Number of epoch ends ([`crate::epoch_ticker`]) after which a guest first yields.
const FIRST_EPOCHS: u64 = 2;
/// Number of bytes that the log accepts in one write.
const MAX_LOG_WRITE: usize = 64 << 10;

/// Component prepared for instantiation.
pub(crate) struct HttpFunction(ProxyPre<HttpState>);

/// Response of a guest, or the error code that it returned.
pub(crate) type GuestResponse = Result<hyper::Response<HyperOutgoingBody>, ErrorCode>;

/// State of one request.
pub(crate) struct HttpState {
    limiter: MemoryLimiter,
    table: ResourceTable,
    wasi: WasiCtx,
    http: WasiHttpCtx,
    hooks: OutgoingHooks,
}

impl HttpState {
    /// Creates the state of one request: limits, environment and log of the guest, without network
    /// and files.
    pub(crate) fn new(
        limiter: MemoryLimiter,
        settings: &LoadSettings,
        log: Option<Arc<RequestLog>>,
        outgoing: Option<OutgoingRequests>,
    ) -> Self {
        let mut wasi = WasiCtx::builder();
        wasi.max_random_size(MAX_RANDOM_BYTES)
            // Guests reach other hosts only by requests through the broker.
            .allow_tcp(false)
            .allow_udp(false)
            .allow_ip_name_lookup(false);
        // The daemon has added the variables of the function's sandbox key, if the function has
        // one.
        for (name, value) in &settings.env {
            wasi.env(name, value);
        }
        if let Some(log) = log {
            wasi.stdout(LogOutput {
                log: log.clone(),
                stream: LogStream::Stdout,
            });
            wasi.stderr(LogOutput {
                log,
                stream: LogStream::Stderr,
            });
        }
        let mut table = ResourceTable::new();
        table.set_max_capacity(MAX_HANDLES);
        let mut http = WasiHttpCtx::new();
        http.set_field_size_limit(MAX_FIELDS_BYTES);
        Self {
            limiter,
            table,
            wasi: wasi.build(),
            http,
            hooks: OutgoingHooks(outgoing),
        }
    }
}

impl WasiView for HttpState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView {
            ctx: &mut self.wasi,
            table: &mut self.table,
        }
    }
}

impl WasiHttpView for HttpState {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView {
            ctx: &mut self.http,
            table: &mut self.table,
            hooks: &mut self.hooks,
        }
    }
}

/// Sender of a guest's outgoing requests. Requests fail with `HTTP-request-denied` if the function
/// has no allowed hosts.
struct OutgoingHooks(Option<OutgoingRequests>);

impl WasiHttpHooks for OutgoingHooks {
    fn send_request(
        &mut self,
        request: hyper::Request<WasiBody>,
        options: Option<RequestOptions>,
        _fut: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> SentRequest {
        match &mut self.0 {
            Some(outgoing) => outgoing.send(request, options),
            None => Box::new(async { Err(Error::HttpRequestDenied) }),
        }
    }

    fn p2_outgoing_body_chunk_size(&mut self) -> usize {
        BODY_CHUNK_BYTES
    }
}

/// Writes a guest's output to the function's log.
#[derive(Clone)]
struct LogOutput {
    log: Arc<RequestLog>,
    stream: LogStream,
}

impl IsTerminal for LogOutput {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for LogOutput {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn wasmtime_wasi::p2::OutputStream> {
        Box::new(self.clone())
    }
}

impl AsyncWrite for LogOutput {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        output: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.log.write(self.stream, output);
        Poll::Ready(Ok(output.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[wasmtime_wasi::async_trait]
impl wasmtime_wasi::p2::Pollable for LogOutput {
    async fn ready(&mut self) {}
}

impl wasmtime_wasi::p2::OutputStream for LogOutput {
    fn write(&mut self, bytes: Bytes) -> wasmtime_wasi::p2::StreamResult<()> {
        self.log.write(self.stream, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> wasmtime_wasi::p2::StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> wasmtime_wasi::p2::StreamResult<usize> {
        // Always ready: `RequestLog` discards the output beyond its limit.
        Ok(MAX_LOG_WRITE)
    }
}

/// Creates the linker with all imports of components, once per engine.
pub(crate) fn linker(engine: &Engine) -> wasmtime::Result<Linker<HttpState>> {
    let mut linker = Linker::new(engine);
    // Standard libraries import all of WASI 0.2. Files and sockets exist, but calls on them fail.
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(&mut linker)?;
    Ok(linker)
}

/// Links a component. Fails if the component imports a function outside the world.
pub(crate) fn prepare(
    linker: &Linker<HttpState>,
    component: &Component,
) -> wasmtime::Result<HttpFunction> {
    ProxyPre::new(linker.instantiate_pre(component)?).map(HttpFunction)
}

/// Creates the state of one instance, with its limits of memory, copies and processor time.
fn store(engine: &Engine, state: HttpState) -> Store<HttpState> {
    let mut store = Store::new(engine, state);
    // The limiter counts memory and tables; the fuel limits copies between guest and host.
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(MAX_CALL_BYTES);
    // The current epoch may end at any time. Almost all guests complete within a full epoch.
    store.set_epoch_deadline(FIRST_EPOCHS);
    store.epoch_deadline_callback(|_| Ok(yield_to_runtime()));
    store
}

impl HttpFunction {
    /// Creates an instance and discards it, in order to validate a new version.
    pub(crate) async fn instantiate_once(
        &self,
        engine: &Engine,
        limiter: MemoryLimiter,
        settings: &LoadSettings,
    ) -> wasmtime::Result<()> {
        let mut store = store(engine, HttpState::new(limiter, settings, None, None));
        self.0.instantiate_async(&mut store).await.map(drop)
    }

    /// Passes a request to a new instance, which sends its response through `response`. Returns
    /// when the guest has finished and the instance has been dropped.
    pub(crate) async fn call(
        &self,
        engine: &Engine,
        state: HttpState,
        request: Request<Full<Bytes>>,
        response: oneshot::Sender<GuestResponse>,
        usage: &RequestUsage,
    ) -> wasmtime::Result<()> {
        let mut store = store(engine, state);
        let request = request.map(|body| body.map_err(|never| -> Error { match never {} }));
        let request = store
            .data_mut()
            .http()
            .new_incoming_request(Scheme::Http, request)?;
        let response = store.data_mut().http().new_response_outparam(response)?;
        let proxy = self.0.instantiate_async(&mut store).await?;
        let handler = proxy.wasi_http_incoming_handler();
        let ended = handler.call_handle(&mut store, request, response).await;
        // The flag is set while `store` still exists: dropping the store ends the response body.
        if ended.is_err() {
            usage.ended_early.store(true, Ordering::Release);
        }
        ended
    }
}
