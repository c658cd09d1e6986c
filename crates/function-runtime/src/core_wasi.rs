//! Host functions of modules of `jiffy-core/1`: clocks, random numbers, sleep and output to the
//! function's log. They have the names and types of WASI preview 1, which the compilers of many
//! languages emit. Modules have no arguments, environment, files or sockets.
//!
//! A *worker* is a thread that serves requests. An *epoch* is a short interval, counted by the
//! thread in `epoch_ticker`. A *fiber* is a stack of its own on which a guest can yield to other
//! requests. A guest on a fiber yields when an epoch ends.
//!
//! `jiffy-core/1` is the interface between the host and a function that is a core module. The host
//! calls three exports for each request: `jiffy_buf` returns an address for the request,
//! `jiffy_handle` handles the request, and `jiffy_out` returns the address of the response.

use crate::logs::RequestLog;
use crate::memory_limiter::MemoryLimiter;
use crate::world::{CORE_MEMORY, WASI_MODULE};
use jiffy_proto::function::LogStream;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use wasmtime::{Caller, ExternType, Linker, Memory, Module, Val, ValType};

/// Maximum number of random bytes per call.
const MAX_RANDOM_BYTES: u32 = 64 << 10;
/// Maximum number of buffers per write.
const MAX_BUFFERS: u32 = 1024;
/// Maximum number of events per `poll_oneoff`.
const MAX_SUBSCRIPTIONS: u32 = 16;
/// Value of the monotonic clock at its first use in this process. A module can be the snapshot of a
/// program that was initialised before its deployment (Wizer). Such a program remembers times of
/// the monotonic clock of the tool that initialised it, and must not read earlier times here. WASI
/// runtimes usually start this clock at zero, and an initialisation takes far less than an hour.
const MONOTONIC_START: Duration = Duration::from_secs(3600);
/// Length of a subscription and of an event in bytes.
const SUBSCRIPTION_BYTES: usize = 48;
const EVENT_BYTES: usize = 32;

// Error numbers of WASI preview 1.
const SUCCESS: i32 = 0;
const BAD_DESCRIPTOR: i32 = 8;
const FAULT: i32 = 21;
const INVALID: i32 = 28;

/// Time of the first use of the monotonic clock.
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// State of one request.
pub(crate) struct CoreState {
    pub(crate) limiter: MemoryLimiter,
    log: Option<Arc<RequestLog>>,
    pub(crate) stack: GuestStack,
}

/// Stack on which a guest runs. It determines what happens at the end of an epoch.
#[derive(Debug)]
pub(crate) enum GuestStack {
    /// A fiber: the guest yields.
    Fiber,
    /// The worker's own stack, for the first attempt to serve a request. The attempt is aborted,
    /// and the request restarts on a fiber (`CoreFunction::call`).
    Try,
    /// The worker's own stack, for the calls of `jiffy_buf` and `jiffy_out` of a request whose
    /// `jiffy_handle` runs on a fiber, unless the module may wait. The calls are short, and a fiber
    /// for each would be slow. The request may have had effects, so it is not restarted: a call may
    /// run for [`MAX_BUSY_TIME`](crate::cpu_meter::MAX_BUSY_TIME), and then fails.
    Busy {
        /// Processor time of the thread at the end of the first epoch. `None` before.
        since: Option<Duration>,
    },
}

impl CoreState {
    pub(crate) fn new(limiter: MemoryLimiter, log: Option<Arc<RequestLog>>) -> Self {
        Self {
            limiter,
            log,
            stack: GuestStack::Fiber,
        }
    }
}

type CoreCaller<'a> = Caller<'a, CoreState>;

/// Name of the import that waits.
const POLL: &str = "poll_oneoff";

/// Returns whether the module imports a function that waits. Such a module must run on a fiber.
pub(crate) fn may_wait(module: &Module) -> bool {
    module.imports().any(|import| import.name() == POLL)
}

/// Links the imports of a module. Unsupported functions of WASI return `EBADF` to the guest.
pub(crate) fn link(module: &Module, linker: &mut Linker<CoreState>) -> wasmtime::Result<()> {
    let implemented = [
        "args_sizes_get",
        "args_get",
        "environ_sizes_get",
        "environ_get",
        "sched_yield",
        "proc_exit",
        "clock_time_get",
        "random_get",
        "fd_write",
        "poll_oneoff",
    ];
    // A module may name an import twice.
    linker.allow_shadowing(true);
    for import in module.imports() {
        let ExternType::Func(kind) = import.ty() else {
            // Other kinds of imports stay unlinked, and the module is rejected.
            continue;
        };
        // Only a function that returns an error number can report that it is unsupported.
        let results: Vec<_> = kind.results().collect();
        let is_errno = matches!(results.as_slice(), [ValType::I32]);
        if import.module() == WASI_MODULE && is_errno && !implemented.contains(&import.name()) {
            linker.func_new(WASI_MODULE, import.name(), kind, |_, _, results| {
                results.fill(Val::I32(BAD_DESCRIPTOR));
                Ok(())
            })?;
        }
    }
    for name in ["args_sizes_get", "environ_sizes_get"] {
        linker.func_wrap(WASI_MODULE, name, no_strings)?;
    }
    // Both lists are empty, so that no byte is written.
    for name in ["args_get", "environ_get"] {
        linker.func_wrap(WASI_MODULE, name, |_: u32, _: u32| SUCCESS)?;
    }
    linker
        .func_wrap(WASI_MODULE, "sched_yield", || SUCCESS)?
        .func_wrap(WASI_MODULE, "proc_exit", exit)?
        .func_wrap(WASI_MODULE, "clock_time_get", clock_time)?
        .func_wrap(WASI_MODULE, "random_get", random)?
        .func_wrap(WASI_MODULE, "fd_write", write)?
        .func_wrap_async(
            WASI_MODULE,
            "poll_oneoff",
            |caller, (from, to, count, at)| Box::new(poll(caller, from, to, count, at)),
        )?;
    Ok(())
}

fn memory(caller: &mut CoreCaller<'_>) -> wasmtime::Result<Memory> {
    let export = caller.get_export(CORE_MEMORY);
    let memory = export.and_then(wasmtime::Extern::into_memory);
    memory.ok_or_else(|| wasmtime::Error::msg("the module has no memory"))
}

/// Writes to the guest's memory. Returns an error number to the guest if the address is out of
/// bounds.
fn put(caller: &mut CoreCaller<'_>, at: u32, bytes: &[u8]) -> wasmtime::Result<i32> {
    let memory = memory(caller)?;
    let written = memory.write(caller, usize::try_from(at)?, bytes);
    Ok(written.map_or(FAULT, |()| SUCCESS))
}

/// Reports an empty list of strings: 0 entries and 0 bytes.
fn no_strings(mut caller: CoreCaller<'_>, count: u32, bytes: u32) -> wasmtime::Result<i32> {
    match put(&mut caller, count, &[0; 4])? {
        SUCCESS => put(&mut caller, bytes, &[0; 4]),
        failed => Ok(failed),
    }
}

/// Terminates the guest. A guest that exits returns no response.
fn exit(code: i32) -> wasmtime::Result<()> {
    Err(wasmtime::Error::msg(format!(
        "the module exited with status {code}"
    )))
}

/// Returns the time of clock 0 (real time since 1970) or 1 (monotonic).
fn now(clock: u32) -> Option<Duration> {
    match clock {
        0 => SystemTime::now().duration_since(UNIX_EPOCH).ok(),
        1 => Some(MONOTONIC_START + STARTED.elapsed()),
        _ => None,
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Implements `clock_time_get`: writes the time of `clock` in nanoseconds to `at`.
fn clock_time(
    mut caller: CoreCaller<'_>,
    clock: u32,
    _precision: u64,
    at: u32,
) -> wasmtime::Result<i32> {
    match now(clock) {
        Some(time) => put(&mut caller, at, &nanoseconds(time).to_le_bytes()),
        None => Ok(INVALID),
    }
}

/// Fills the guest's memory at `at` with random bytes.
fn random(mut caller: CoreCaller<'_>, at: u32, length: u32) -> wasmtime::Result<i32> {
    if length > MAX_RANDOM_BYTES {
        return Ok(INVALID);
    }
    let memory = memory(&mut caller)?;
    let Some(bytes) =
        range(at, length).and_then(|range| memory.data_mut(&mut caller).get_mut(range))
    else {
        return Ok(FAULT);
    };
    // The address range is checked above: the host writes to the guest's memory only.
    rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(SUCCESS)
}

/// Returns the range of addresses. `None` if its end overflows.
fn range(at: u32, length: u32) -> Option<std::ops::Range<usize>> {
    let at = usize::try_from(at).ok()?;
    Some(at..at.checked_add(usize::try_from(length).ok()?)?)
}

/// Returns the 32-bit number at an address. `None` if the number is out of bounds.
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

/// Writes output on descriptors 1 and 2 to the log.
fn write(
    mut caller: CoreCaller<'_>,
    descriptor: u32,
    buffers: u32,
    count: u32,
    at: u32,
) -> wasmtime::Result<i32> {
    let stream = match descriptor {
        1 => LogStream::Stdout,
        2 => LogStream::Stderr,
        _ => return Ok(BAD_DESCRIPTOR),
    };
    if count > MAX_BUFFERS {
        return Ok(INVALID);
    }
    let memory = memory(&mut caller)?;
    let data = memory.data(&caller);
    let mut total = 0u32;
    for index in 0..count {
        // A buffer is described by 8 bytes: address and length.
        let head = usize::try_from(buffers)?.saturating_add(usize::try_from(index)? * 8);
        let buffer = word(data, head).zip(word(data, head.saturating_add(4)));
        let Some(bytes) =
            buffer.and_then(|(from, length)| data.get(range(from, length)?).zip(Some(length)))
        else {
            return Ok(FAULT);
        };
        // The validation of a new version of a function serves no request, and has no log.
        if let Some(log) = &caller.data().log {
            log.write(stream, bytes.0);
        }
        // Output beyond the log's limit counts as written, so that guests do not fail.
        total = total.saturating_add(bytes.1);
    }
    put(&mut caller, at, &total.to_le_bytes())
}

/// Event that a guest waits for.
struct Subscription {
    user_data: [u8; 8],
    kind: u8,
    /// Time to wait. `None` if the event is not a clock.
    wait: Option<Duration>,
}

/// Decodes a subscription of WASI preview 1. The user data is at offset 0, the kind at 8. A clock
/// has its number at 16, the timeout in nanoseconds at 24 and flags at 40. `None` if the
/// subscription is not valid.
fn subscription(bytes: &[u8]) -> Option<Subscription> {
    let user_data = *bytes.first_chunk()?;
    // Kind 0 is a clock. The other kinds refer to descriptors.
    let kind = *bytes.get(8)?;
    if kind != 0 {
        return Some(Subscription {
            user_data,
            kind,
            wait: None,
        });
    }
    let timeout = u64::from_le_bytes(*bytes.get(24..)?.first_chunk()?);
    let timeout = Duration::from_nanos(timeout);
    // The lowest flag selects a point in time instead of a duration.
    let is_absolute = bytes.get(40)? & 1 == 1;
    let wait = if is_absolute {
        timeout.saturating_sub(now(word(bytes, 16)?)?)
    } else {
        timeout
    };
    Some(Subscription {
        user_data,
        kind,
        wait: Some(wait),
    })
}

/// Sleeps until the first of the clock events. Subscriptions to descriptors fail at once with
/// `EBADF`.
async fn poll(
    mut caller: CoreCaller<'_>,
    from: u32,
    to: u32,
    count: u32,
    at: u32,
) -> wasmtime::Result<i32> {
    if count == 0 || count > MAX_SUBSCRIPTIONS {
        return Ok(INVALID);
    }
    let memory = memory(&mut caller)?;
    let length = u32::try_from(SUBSCRIPTION_BYTES)? * count;
    let Some(bytes) = range(from, length).and_then(|range| memory.data(&caller).get(range)) else {
        return Ok(FAULT);
    };
    // The subscriptions are decoded before the sleep: the guest's memory is not borrowed meanwhile.
    let all = bytes.chunks_exact(SUBSCRIPTION_BYTES).map(subscription);
    let Some(all) = all.collect::<Option<Vec<_>>>() else {
        return Ok(INVALID);
    };
    // A subscription to a descriptor is due at once.
    let first = all.iter().map(|one| one.wait.unwrap_or_default()).min();
    let first = first.unwrap_or_default();
    // The time limit of the request drops this future, and thereby ends a longer sleep.
    tokio::time::sleep(first).await;
    let due = all
        .iter()
        .filter(|one| one.wait.unwrap_or_default() <= first);
    let mut events = Vec::new();
    for one in due {
        // An event has the user data at offset 0, the error number at 8 and the kind at 10.
        let mut event = [0; EVENT_BYTES];
        if let (Some(target), Some(user_data)) = (event.get_mut(..8), one.user_data.get(..)) {
            target.copy_from_slice(user_data);
        }
        let errno = if one.wait.is_some() {
            SUCCESS
        } else {
            BAD_DESCRIPTOR
        };
        if let Some(bytes) = event.get_mut(8..11) {
            bytes.copy_from_slice(&[u8::try_from(errno)?, 0, one.kind]);
        }
        events.extend_from_slice(&event);
    }
    let number = u32::try_from(events.len() / EVENT_BYTES)?;
    match put(&mut caller, to, &events)? {
        SUCCESS => put(&mut caller, at, &number.to_le_bytes()),
        failed => Ok(failed),
    }
}
