//! World `jiffy-core/1`, the interface of core modules: the host writes a request to the guest's
//! memory as one message, and reads the response from this memory as one message.
//!
//! The *head* of a request or response is its first line and its headers, without the body. An
//! *epoch* is a short interval, counted by the thread in `epoch_ticker`. A guest on a fiber yields
//! when an epoch ends.
//!
//! The lines of a message end in LF: `METHOD PATH` or a status, then `name: value` for each header,
//! then an empty line and the body.
//!
//! A guest runs on a *fiber*, a stack of its own on which it can yield to other requests. Short
//! requests run without a fiber, on the stack of their worker thread.

use crate::core_wasi::{self, CoreState, GuestStack};
use crate::cpu_meter::{BusyTooLong, MAX_BUSY_TIME, thread_cpu};
use crate::epoch_ticker::yield_to_runtime;
use crate::fault::RequestFault;
use crate::memory_limiter::MemoryLimiter;
use crate::world::{self, CORE_FUNCTIONS, CORE_MEMORY};
use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode, http::request::Parts};
use std::sync::atomic::{AtomicU32, Ordering};
use wasmtime::{
    Engine, Instance, InstancePre, Linker, Memory, Module, ModuleExport, Store, StoreContextMut,
    TypedFunc, UpdateDeadline,
};

/// Maximum number of headers of a response.
const MAX_HEADERS: usize = 100;
/// Maximum length of a response's head in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Headers that only the server sets.
const SERVER_HEADERS: [&str; 6] = [
    "connection",
    "content-length",
    "keep-alive",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// After a request exceeded its time on the worker's own stack, this number of following requests
/// start on a fiber directly.
const FIBER_REQUESTS: u32 = 256;
/// Number of epoch ends after which an attempt on a worker's own stack is aborted. The first epoch
/// may end at any time after the start: the attempt has at least one complete epoch.
const TRY_EPOCHS: u64 = 2;

/// Module prepared for instantiation.
pub(crate) struct CoreFunction {
    pre: InstancePre<CoreState>,
    memory: ModuleExport,
    /// Exports in the order of [`CORE_FUNCTIONS`].
    functions: [ModuleExport; 3],
    /// True if the module imports a function that waits.
    may_wait: bool,
    /// True if the module imports nothing. Its effects can then be discarded and the request
    /// repeated.
    is_pure: bool,
    /// Number of further requests that start directly on a fiber.
    fiber_requests: AtomicU32,
}

/// Error: the attempt on the worker's own stack exceeded its time limit. The request restarts on a
/// fiber.
#[derive(Debug, thiserror::Error)]
#[error("the guest needs a fiber")]
struct FiberNeeded;

/// Response of a guest, or the reason for its absence.
type Answer = Result<Response<Bytes>, RequestFault>;

/// Links the imports of a module, and resolves its exports in advance.
pub(crate) fn prepare(module: &Module) -> wasmtime::Result<CoreFunction> {
    let export = |name| {
        let index = module.get_export_index(name);
        index.ok_or_else(|| wasmtime::Error::msg(format!("the module does not export {name}")))
    };
    // The unsafe calls of exports rely on this check.
    world::check_core(module)?;
    // `jiffy_buf` returns an address for the request, `jiffy_handle` handles it and returns the
    // length of the response, and `jiffy_out` returns the address of the response.
    let [(buf, _), (handle, _), (out, _)] = CORE_FUNCTIONS;
    let mut linker = Linker::new(module.engine());
    core_wasi::link(module, &mut linker)?;
    Ok(CoreFunction {
        pre: linker.instantiate_pre(module)?,
        memory: export(CORE_MEMORY)?,
        functions: [export(buf)?, export(handle)?, export(out)?],
        may_wait: core_wasi::may_wait(module),
        is_pure: module.imports().len() == 0,
        fiber_requests: AtomicU32::new(0),
    })
}

/// Returns an error for an export that [`prepare`] has found and the instance lacks.
fn missing(what: &str) -> wasmtime::Error {
    wasmtime::Error::msg(format!("{what} is not exported"))
}

impl CoreFunction {
    /// Creates an instance and discards it.
    pub(crate) async fn instantiate_once(
        &self,
        engine: &Engine,
        limiter: MemoryLimiter,
    ) -> wasmtime::Result<()> {
        let mut store = store(engine, CoreState::new(limiter, None));
        self.pre.instantiate_async(&mut store).await.map(drop)
    }

    /// Passes a message to a new instance and returns its response. `state` is called for each new
    /// instance.
    ///
    /// Creating a fiber is a large part of the cost of a small request, and almost all requests
    /// complete long before they would yield. A guest without imports therefore runs on the
    /// worker's own stack first. If the guest takes longer, its instance is discarded, which has no
    /// visible effect, and the request restarts on a fiber. The next [`FIBER_REQUESTS`] requests
    /// then start on a fiber directly.
    pub(crate) async fn call(
        &self,
        engine: &Engine,
        state: impl Fn() -> CoreState,
        message: &[u8],
        max_response: u64,
    ) -> wasmtime::Result<Answer> {
        if self.is_pure && !self.expects_fiber() {
            match self.try_call(engine, state(), message, max_response) {
                Err(error) if error.is::<FiberNeeded>() => {
                    // Concurrent requests may overwrite the number, which only affects their speed.
                    self.fiber_requests.store(FIBER_REQUESTS, Ordering::Relaxed);
                }
                ended => return ended,
            }
        }
        self.call_on_fiber(engine, state(), message, max_response)
            .await
    }

    /// Returns whether the request should start on a fiber, and counts the request.
    fn expects_fiber(&self) -> bool {
        let decrement = |remaining: u32| remaining.checked_sub(1);
        // The load avoids a write to memory that all workers share in the usual case.
        self.fiber_requests.load(Ordering::Relaxed) > 0
            && self
                .fiber_requests
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, decrement)
                .is_ok()
    }

    /// Runs the guest on the worker's own stack for at most a few milliseconds.
    fn try_call(
        &self,
        engine: &Engine,
        mut state: CoreState,
        message: &[u8],
        max_response: u64,
    ) -> wasmtime::Result<Answer> {
        state.stack = GuestStack::Try;
        let mut store = store(engine, state);
        store.set_epoch_deadline(TRY_EPOCHS);
        let instance = self.pre.instantiate(&mut store)?;
        let calls = self.calls(&mut store, &instance)?;
        let at = calls.buf.call(&mut store, u32::try_from(message.len())?)?;
        calls.write(&mut store, at, message)?;
        let range = (at, u32::try_from(message.len())?);
        let length = calls.handle.call(&mut store, range)?;
        let at = calls.out.call(&mut store, ())?;
        calls.response(&store, at, length, max_response)
    }

    /// Runs the guest on a fiber, where it can yield and wait.
    async fn call_on_fiber(
        &self,
        engine: &Engine,
        state: CoreState,
        message: &[u8],
        max_response: u64,
    ) -> wasmtime::Result<Answer> {
        let mut store = store(engine, state);
        let instance = self.pre.instantiate_async(&mut store).await?;
        let calls = self.calls(&mut store, &instance)?;
        let length = u32::try_from(message.len())?;
        let at = if self.may_wait {
            calls.buf.call_async(&mut store, length).await?
        } else {
            busy(&mut store, |store| calls.buf.call(store, length))?
        };
        calls.write(&mut store, at, message)?;
        let length = calls.handle.call_async(&mut store, (at, length)).await?;
        let at = if self.may_wait {
            calls.out.call_async(&mut store, ()).await?
        } else {
            busy(&mut store, |store| calls.out.call(store, ()))?
        };
        calls.response(&store, at, length, max_response)
    }

    /// Returns the exports of an instance.
    fn calls(
        &self,
        store: &mut Store<CoreState>,
        instance: &Instance,
    ) -> wasmtime::Result<GuestCalls> {
        let memory = instance
            .get_module_export(&mut *store, &self.memory)
            .and_then(|export| export.into_memory())
            .ok_or_else(|| missing(CORE_MEMORY))?;
        let mut function = |export| {
            let export = instance.get_module_export(&mut *store, export);
            export
                .and_then(|e| e.into_func())
                .ok_or_else(|| missing("a function"))
        };
        let [buf, handle, out] = &self.functions;
        let (buf, handle, out) = (function(buf)?, function(handle)?, function(out)?);
        // SAFETY: `prepare` has checked that the module exports these names with these types.
        unsafe {
            Ok(GuestCalls {
                memory,
                buf: TypedFunc::new_unchecked(&*store, buf),
                handle: TypedFunc::new_unchecked(&*store, handle),
                out: TypedFunc::new_unchecked(&*store, out),
            })
        }
    }
}

/// Exports of an instance.
struct GuestCalls {
    memory: Memory,
    buf: TypedFunc<u32, u32>,
    handle: TypedFunc<(u32, u32), u32>,
    out: TypedFunc<(), u32>,
}

impl GuestCalls {
    fn write(&self, store: &mut Store<CoreState>, at: u32, message: &[u8]) -> wasmtime::Result<()> {
        Ok(self.memory.write(store, usize::try_from(at)?, message)?)
    }

    /// Reads the response of the guest from its memory.
    fn response(
        &self,
        store: &Store<CoreState>,
        at: u32,
        length: u32,
        max_response: u64,
    ) -> wasmtime::Result<Answer> {
        // The exact limit of the body is checked when the length of the head is known.
        if u64::from(length) > max_response.saturating_add(MAX_HEAD_BYTES as u64) {
            return Ok(Err(RequestFault::ResponseTooLarge));
        }
        let at = usize::try_from(at)?;
        // The guest chooses address and length: their sum may overflow or leave the memory.
        let end = at.checked_add(usize::try_from(length)?);
        let message = end.and_then(|end| self.memory.data(store).get(at..end));
        let message = message.ok_or_else(|| {
            wasmtime::Error::msg("the response lies outside of the module's memory")
        })?;
        Ok(parse_response(message, max_response))
    }
}

/// Calls a function on the worker's own stack. The function cannot yield, and may run for
/// [`MAX_BUSY_TIME`]. A fiber for each call would cost a tenth of a small request.
fn busy<T>(
    store: &mut Store<CoreState>,
    call: impl FnOnce(&mut Store<CoreState>) -> wasmtime::Result<T>,
) -> wasmtime::Result<T> {
    store.data_mut().stack = GuestStack::Busy { since: None };
    let done = call(store);
    store.data_mut().stack = GuestStack::Fiber;
    done
}

/// Creates the store of one request, which ends with the request.
fn store(engine: &Engine, state: CoreState) -> Store<CoreState> {
    let mut store = Store::new(engine, state);
    store.limiter(|state| &mut state.limiter);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(epoch_ended);
    store
}

/// Called when a guest reaches the end of an epoch. A guest on a fiber yields. A guest on the
/// worker's own stack cannot yield: it continues until its time limit, or is aborted.
fn epoch_ended(mut store: StoreContextMut<'_, CoreState>) -> wasmtime::Result<UpdateDeadline> {
    match &mut store.data_mut().stack {
        GuestStack::Fiber => Ok(yield_to_runtime()),
        GuestStack::Try => Err(FiberNeeded.into()),
        GuestStack::Busy { since } => {
            // The clock is first read here, since most calls complete within an epoch.
            let now = thread_cpu();
            let since = *since.get_or_insert(now);
            if now.saturating_sub(since) > MAX_BUSY_TIME {
                Err(BusyTooLong.into())
            } else {
                Ok(UpdateDeadline::Continue(1))
            }
        }
    }
}

/// Encodes a request as a message.
pub(crate) fn request_message(head: &Parts, body: &[u8]) -> Vec<u8> {
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    // Each header also has a colon, a space and a line feed. 32 more bytes suffice for the method
    // and the other separators, usually.
    let headers = head.headers.iter();
    let length: usize = headers.map(|(n, v)| n.as_str().len() + v.len() + 3).sum();
    let mut message = Vec::with_capacity(length + path.len() + body.len() + 32);
    // A valid head has no line feeds, so that the message needs no escaping.
    message.extend_from_slice(head.method.as_str().as_bytes());
    message.push(b' ');
    message.extend_from_slice(path.as_bytes());
    message.push(b'\n');
    for (name, value) in &head.headers {
        message.extend_from_slice(name.as_str().as_bytes());
        message.extend_from_slice(b": ");
        message.extend_from_slice(value.as_bytes());
        message.push(b'\n');
    }
    message.push(b'\n');
    message.extend_from_slice(body);
    message
}

/// Decodes a response from a message of the guest.
fn parse_response(message: &[u8], max_body: u64) -> Answer {
    let bad = |what: &str| RequestFault::Trap(format!("the response is not valid: {what}"));
    let mut at = 0;
    let mut status = None;
    let mut headers = HeaderMap::new();
    loop {
        let rest = message.get(at..).unwrap_or_default();
        // The head must end within the limit, counted from the start of the message.
        let window = rest
            .get(..MAX_HEAD_BYTES.saturating_sub(at))
            .unwrap_or(rest);
        let end = window.iter().position(|byte| *byte == b'\n');
        let end = end.ok_or_else(|| bad("no empty line terminates the head"))?;
        let line = rest.get(..end).unwrap_or_default();
        at += end + 1;
        if status.is_none() {
            let code = StatusCode::from_bytes(line).map_err(|_| bad("its status"))?;
            // A 1xx status would announce another response.
            if code.is_informational() {
                return Err(bad("its status"));
            }
            status = Some(code);
        } else if line.is_empty() {
            break;
        } else {
            let colon = line.iter().position(|byte| *byte == b':');
            let (name, value) = line.split_at(colon.ok_or_else(|| bad("a header has no colon"))?);
            let name = HeaderName::from_bytes(name).map_err(|_| bad("a header's name"))?;
            let value = value.get(1..).unwrap_or_default().trim_ascii();
            let value = HeaderValue::from_bytes(value).map_err(|_| bad("a header's value"))?;
            // Check the number before the insertion, because repeated names also count.
            if headers.len() >= MAX_HEADERS {
                return Err(bad("too many headers"));
            }
            if !SERVER_HEADERS.contains(&name.as_str()) {
                headers.append(name, value);
            }
        }
    }
    let body = message.get(at..).unwrap_or_default();
    if u64::try_from(body.len()).unwrap_or(u64::MAX) > max_body {
        return Err(RequestFault::ResponseTooLarge);
    }
    let mut response = Response::new(Bytes::copy_from_slice(body));
    *response.status_mut() = status.unwrap_or(StatusCode::OK);
    *response.headers_mut() = headers;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(message: &str) -> Result<Response<Bytes>, RequestFault> {
        parse_response(message.as_bytes(), 10)
    }

    #[test]
    fn parse_response_accepts_status_headers_and_body() {
        let response = parsed("201\nx: a b\nx:c\nContent-Length: 7\n\nbody\n").unwrap();
        assert_eq!(response.status(), 201);
        let values: Vec<_> = response.headers().get_all("x").iter().collect();
        assert_eq!(values, ["a b", "c"]);
        assert!(!response.headers().contains_key("content-length"));
        assert_eq!(response.body(), "body\n");
    }

    #[test]
    fn malformed_response_is_rejected() {
        for message in [
            "",
            "\n",
            "200",
            "200\n",
            "99\n\n",
            "100\n\n",
            "200\nx\n\n",
            "200\na b: c\n\n",
        ] {
            assert!(
                matches!(parsed(message), Err(RequestFault::Trap(_))),
                "{message:?}"
            );
        }
        assert_eq!(
            parsed("200\n\n12345678901").unwrap_err(),
            RequestFault::ResponseTooLarge
        );
    }
}
