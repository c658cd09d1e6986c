//! World `jiffy-core/1`: a request and a response are each one message in the guest's memory.
//!
//! A message is lines that end in LF: `METHOD PATH` or a status, then `name: value` for each
//! header, then an empty line and the body.

use crate::core_wasi::{self, CoreState};
use crate::cpu_meter::thread_cpu;
use crate::fault::RequestFault;
use crate::memory_limiter::MemoryLimiter;
use crate::world::{self, CORE_FUNCTIONS, CORE_MEMORY};
use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode, http::request::Parts};
use std::time::Duration;
use wasmtime::{
    Engine, InstancePre, Linker, Module, ModuleExport, Store, StoreContextMut, TypedFunc,
    UpdateDeadline,
};

/// Most headers of a response.
const MAX_HEADERS: usize = 100;
/// Longest head of a response in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Processor time of `jiffy_buf`, which runs on a worker's own stack and cannot yield.
const MAX_BUF_TIME: Duration = Duration::from_millis(10);
/// Headers that are the server's to set.
const SERVER_HEADERS: [&str; 6] = [
    "connection",
    "content-length",
    "keep-alive",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// Module that is ready to be instantiated.
pub(crate) struct CoreFunction {
    pre: InstancePre<CoreState>,
    memory: ModuleExport,
    /// In the order of [`CORE_FUNCTIONS`].
    functions: [ModuleExport; 3],
    /// It imports functions that wait.
    may_wait: bool,
}

/// `jiffy_buf` took longer than it may.
#[derive(Debug, thiserror::Error)]
#[error("jiffy_buf ran for more than {} ms", MAX_BUF_TIME.as_millis())]
pub(crate) struct BufTooSlow;

/// Resolves exports in advance.
pub(crate) fn prepare(module: &Module) -> wasmtime::Result<CoreFunction> {
    let export = |name| {
        let index = module.get_export_index(name);
        index.ok_or_else(|| wasmtime::Error::msg(format!("the module does not export {name}")))
    };
    // Calls rely on it.
    world::check_core(module)?;
    let [(buf, _), (handle, _), (out, _)] = CORE_FUNCTIONS;
    let mut linker = Linker::new(module.engine());
    core_wasi::link(module, &mut linker)?;
    Ok(CoreFunction {
        pre: linker.instantiate_pre(module)?,
        memory: export(CORE_MEMORY)?,
        functions: [export(buf)?, export(handle)?, export(out)?],
        may_wait: core_wasi::may_wait(module),
    })
}

fn missing(what: &str) -> wasmtime::Error {
    wasmtime::Error::msg(format!("{what} is not exported"))
}

impl CoreFunction {
    /// Makes an instance and throws it away.
    pub(crate) async fn prove(
        &self,
        engine: &Engine,
        limiter: MemoryLimiter,
    ) -> wasmtime::Result<()> {
        let mut store = store(engine, CoreState::new(limiter, None));
        self.pre.instantiate_async(&mut store).await.map(drop)
    }

    /// Passes a message to a new instance, and returns the message that it answers with.
    pub(crate) async fn call(
        &self,
        engine: &Engine,
        state: CoreState,
        message: &[u8],
        max_response: u64,
    ) -> wasmtime::Result<Result<Vec<u8>, RequestFault>> {
        let mut store = store(engine, state);
        let instance = self.pre.instantiate_async(&mut store).await?;
        let [buf, handle, out] = &self.functions;
        let memory = instance
            .get_module_export(&mut store, &self.memory)
            .and_then(|export| export.into_memory())
            .ok_or_else(|| missing(CORE_MEMORY))?;
        let function = |store: &mut Store<CoreState>, export| {
            let export = instance.get_module_export(store, export);
            export
                .and_then(|e| e.into_func())
                .ok_or_else(|| missing("a function"))
        };
        let buf = function(&mut store, buf)?;
        let handle = function(&mut store, handle)?;
        let out = function(&mut store, out)?;
        // SAFETY: `prepare` has checked that the module exports these names with these types.
        let (buf, handle, out) = unsafe {
            (
                TypedFunc::<u32, u32>::new_unchecked(&store, buf),
                TypedFunc::<(u32, u32), u32>::new_unchecked(&store, handle),
                TypedFunc::<(), u32>::new_unchecked(&store, out),
            )
        };
        let length = u32::try_from(message.len())?;
        // A fiber for each call is a tenth of a small request.
        let at = match self.may_wait {
            true => buf.call_async(&mut store, length).await?,
            false => {
                store.data_mut().can_yield = false;
                let at = buf.call(&mut store, length)?;
                store.data_mut().can_yield = true;
                at
            }
        };
        memory.write(&mut store, usize::try_from(at)?, message)?;
        let length = handle.call_async(&mut store, (at, length)).await?;
        if u64::from(length) > max_response.saturating_add(MAX_HEAD_BYTES as u64) {
            return Ok(Err(RequestFault::ResponseTooLarge));
        }
        let at = usize::try_from(out.call_async(&mut store, ()).await?)?;
        let end = at.checked_add(usize::try_from(length)?);
        let response = end.and_then(|end| memory.data(&store).get(at..end));
        let response = response.ok_or_else(|| {
            wasmtime::Error::msg("the response lies outside of the module's memory")
        })?;
        Ok(Ok(response.to_vec()))
    }
}

fn store(engine: &Engine, state: CoreState) -> Store<CoreState> {
    let mut store = Store::new(engine, state);
    store.limiter(|state| &mut state.limiter);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(epoch_ended);
    store
}

/// Lets a guest yield, or go on where it cannot, for a while.
fn epoch_ended(mut store: StoreContextMut<'_, CoreState>) -> wasmtime::Result<UpdateDeadline> {
    let state = store.data_mut();
    if state.can_yield {
        return Ok(UpdateDeadline::Yield(1));
    }
    let now = thread_cpu();
    let begun = *state.busy_since.get_or_insert(now);
    match now.saturating_sub(begun) > MAX_BUF_TIME {
        true => Err(BufTooSlow.into()),
        false => Ok(UpdateDeadline::Continue(1)),
    }
}

/// Writes a request as a message.
pub(crate) fn request_message(head: &Parts, body: &[u8]) -> Vec<u8> {
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let headers = head.headers.iter();
    let length: usize = headers.map(|(n, v)| n.as_str().len() + v.len() + 3).sum();
    let mut message = Vec::with_capacity(length + path.len() + body.len() + 32);
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

/// Reads a response from a message of the guest's.
pub(crate) fn parse_response(
    message: Vec<u8>,
    max_body: u64,
) -> Result<Response<Bytes>, RequestFault> {
    let bad = |what: &str| RequestFault::Trap(format!("the response is not valid: {what}"));
    let message = Bytes::from(message);
    let mut at = 0;
    let mut status = None;
    let mut headers = HeaderMap::new();
    loop {
        let rest = message.get(at..).unwrap_or_default();
        let window = rest
            .get(..MAX_HEAD_BYTES.saturating_sub(at))
            .unwrap_or(rest);
        let end = window.iter().position(|byte| *byte == b'\n');
        let end = end.ok_or_else(|| bad("its head has no end"))?;
        let line = rest.get(..end).unwrap_or_default();
        at += end + 1;
        if status.is_none() {
            let code = StatusCode::from_bytes(line).map_err(|_| bad("its status"))?;
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
            if headers.len() >= MAX_HEADERS {
                return Err(bad("too many headers"));
            }
            if !SERVER_HEADERS.contains(&name.as_str()) {
                headers.append(name, value);
            }
        }
    }
    let body = message.slice(at..);
    if u64::try_from(body.len()).unwrap_or(u64::MAX) > max_body {
        return Err(RequestFault::ResponseTooLarge);
    }
    let mut response = Response::new(body);
    *response.status_mut() = status.unwrap_or(StatusCode::OK);
    *response.headers_mut() = headers;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(message: &str) -> Result<Response<Bytes>, RequestFault> {
        parse_response(message.as_bytes().to_vec(), 10)
    }

    #[test]
    fn a_response_is_a_status_headers_and_a_body() {
        let response = parsed("201\nx: a b\nx:c\nContent-Length: 7\n\nbody\n").unwrap();
        assert_eq!(response.status(), 201);
        let values: Vec<_> = response.headers().get_all("x").iter().collect();
        assert_eq!(values, ["a b", "c"]);
        assert!(!response.headers().contains_key("content-length"));
        assert_eq!(response.body(), "body\n");
    }

    #[test]
    fn a_malformed_response_is_a_fault() {
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
