//! Processor time of a guest, summed over the polls of its future.
//!
//! An *epoch* is a short interval, counted by the thread in `epoch_ticker`. A guest usually runs on
//! a *fiber*, a stack of its own, and yields to other requests when an epoch ends. A *worker* is a
//! thread that runs guests.
//!
//! Reading a thread's processor time is a system call, which takes half a microsecond on a virtual
//! machine. Polls of at most [`MAX_UNREAD`] are therefore measured with the monotonic clock, which
//! counts too much only if another thread used the processor in the meantime.

use crate::fault::RequestFault;
use nix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Maximum processor time of `jiffy_buf` and of `jiffy_out`, which run on a worker's own stack and
/// cannot yield.
pub(crate) const MAX_BUSY_TIME: Duration = Duration::from_millis(10);
/// Maximum number of characters of an error of Wasmtime.
const MAX_ERROR_CHARS: usize = 2000;

/// Error: `jiffy_buf` or `jiffy_out` exceeded [`MAX_BUSY_TIME`].
#[derive(Debug, thiserror::Error)]
#[error("jiffy_buf or jiffy_out ran for more than {} ms", MAX_BUSY_TIME.as_millis())]
pub(crate) struct BusyTooLong;

/// Resource use of a request.
#[derive(Debug, Default)]
pub(crate) struct RequestUsage {
    cpu_ns: AtomicU64,
    /// True if a growth of memory or of a table was denied.
    pub(crate) growth_refused: AtomicBool,
    /// True if the guest was terminated or failed. Set before the guest's store is dropped:
    /// dropping the store ends the response body as if the body were complete.
    pub(crate) ended_early: AtomicBool,
    /// True if a growth was denied because the tenant's memory budget is exhausted.
    pub(crate) tenant_memory_short: AtomicBool,
}

impl RequestUsage {
    /// Resets the state of a discarded attempt, except for its processor time.
    pub(crate) fn reset_attempt(&self) {
        self.growth_refused.store(false, Ordering::Relaxed);
        self.tenant_memory_short.store(false, Ordering::Relaxed);
    }

    /// Returns the processor time so far.
    pub(crate) fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }

    /// Returns the fault that the client receives for a failure of the guest.
    pub(crate) fn fault(&self, error: &wasmtime::Error) -> RequestFault {
        // Other requests occupy the resources: the client may retry.
        if error
            .downcast_ref::<wasmtime::PoolConcurrencyLimitError>()
            .is_some()
            || self.tenant_memory_short.load(Ordering::Relaxed)
        {
            return RequestFault::HostBusy;
        }
        if error.downcast_ref::<BusyTooLong>().is_some() {
            return RequestFault::Cpu;
        }
        // Error texts can contain long names from the module.
        let detail = format!("{error:#}").chars().take(MAX_ERROR_CHARS).collect();
        if self.growth_refused.load(Ordering::Relaxed) {
            RequestFault::Memory(detail)
        } else {
            RequestFault::Trap(detail)
        }
    }
}

/// Guest with a limit of its processor time. The guest yields at the end of each epoch, so that the
/// limit is checked every few milliseconds.
pub(crate) struct MeteredGuest<'a, F> {
    guest: Pin<&'a mut F>,
    usage: &'a RequestUsage,
    limit: Duration,
}

impl<'a, F> MeteredGuest<'a, F> {
    pub(crate) fn new(guest: Pin<&'a mut F>, usage: &'a RequestUsage, limit: Duration) -> Self {
        Self {
            guest,
            usage,
            limit,
        }
    }
}

/// Returns the processor time of this thread.
pub(crate) fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Maximum duration of a poll that is measured with the monotonic clock. Also the maximum age of a
/// reading of the thread's clock that is reused for the next poll.
const MAX_UNREAD: Duration = Duration::from_millis(1);

thread_local! {
    /// Last reading of the thread's clock, and the time of the reading.
    static LAST_READING: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// Start of a poll.
struct PollStart {
    at: Instant,
    /// Processor time of the thread at the start, read at most [`MAX_UNREAD`] earlier.
    cpu: Duration,
}

impl PollStart {
    /// Reads the processor time of the thread. A recent reading is reused, because each reading is
    /// a system call.
    fn now() -> Self {
        let at = Instant::now();
        let is_recent = |(read, _): &(Instant, _)| at.duration_since(*read) <= MAX_UNREAD;
        let cpu = match LAST_READING.get().filter(is_recent) {
            Some((_, cpu)) => cpu,
            None => read_at(at),
        };
        Self { at, cpu }
    }

    /// Returns the processor time since the start.
    fn spent(&self) -> Duration {
        let now = Instant::now();
        let elapsed = now.duration_since(self.at);
        if elapsed <= MAX_UNREAD {
            elapsed
        } else {
            // `self.cpu` may have been read before the start: the difference may exceed the elapsed
            // time.
            read_at(now).saturating_sub(self.cpu).min(elapsed)
        }
    }
}

fn read_at(now: Instant) -> Duration {
    let cpu = thread_cpu();
    LAST_READING.set(Some((now, cpu)));
    cpu
}

impl<F: Future<Output = Result<T, RequestFault>>, T> Future for MeteredGuest<'_, F> {
    type Output = Result<T, RequestFault>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let start = PollStart::now();
        let polled = self.guest.as_mut().poll(context);
        let spent = u64::try_from(start.spent().as_nanos()).unwrap_or(u64::MAX);
        self.usage.cpu_ns.fetch_add(spent, Ordering::Relaxed);
        match polled {
            // A guest that has completed keeps its response, even beyond the limit.
            Poll::Pending if self.usage.cpu() > self.limit => {
                self.usage.ended_early.store(true, Ordering::Release);
                Poll::Ready(Err(RequestFault::Cpu))
            }
            polled => polled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_not_processor_time_and_computing_is() {
        let start = PollStart::now();
        std::thread::sleep(Duration::from_millis(50));
        assert!(start.spent() < Duration::from_millis(25));
        let start = PollStart::now();
        let before = thread_cpu();
        while thread_cpu() - before < Duration::from_millis(20) {}
        let spent = start.spent();
        assert!(spent >= Duration::from_millis(19), "{spent:?}");
    }
}
