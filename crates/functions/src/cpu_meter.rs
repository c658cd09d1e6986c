//! Processor time of a guest: its future's polls, by the clock of the thread that polls.

use crate::fault::RequestFault;
use nix::time::{ClockId, clock_gettime};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

/// Use of resources by one request.
#[derive(Debug, Default)]
pub(crate) struct RequestUsage {
    cpu_ns: AtomicU64,
    /// Growth of memory or of a table was refused.
    pub(crate) growth_refused: AtomicBool,
    /// The guest was ended, or failed. Set before its store is dropped, which ends the body of its
    /// response as if it were complete.
    pub(crate) ended_early: AtomicBool,
    /// A growth was refused because the tenant's memory is used up.
    pub(crate) tenant_memory_short: AtomicBool,
}

impl RequestUsage {
    /// Processor time so far.
    pub(crate) fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }

    /// Returns what a guest's failure is to its client.
    pub(crate) fn fault(&self, error: &wasmtime::Error) -> RequestFault {
        if error
            .downcast_ref::<wasmtime::PoolConcurrencyLimitError>()
            .is_some()
            || self.tenant_memory_short.load(Ordering::Relaxed)
        {
            return RequestFault::HostBusy;
        }
        let detail = format!("{error:#}").chars().take(2000).collect();
        match self.growth_refused.load(Ordering::Relaxed) {
            true => RequestFault::Memory(detail),
            false => RequestFault::Trap(detail),
        }
    }
}

/// Guest whose processor time is limited. An epoch's end makes it yield, so that it is looked at
/// every few milliseconds.
pub(crate) struct MeteredGuest<F> {
    guest: Pin<Box<F>>,
    usage: Arc<RequestUsage>,
    limit: Duration,
}

impl<F> MeteredGuest<F> {
    pub(crate) fn new(guest: F, usage: Arc<RequestUsage>, limit: Duration) -> Self {
        Self {
            guest: Box::pin(guest),
            usage,
            limit,
        }
    }
}

fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

impl<F: Future<Output = Result<T, RequestFault>>, T> Future for MeteredGuest<F> {
    type Output = Result<T, RequestFault>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let before = thread_cpu();
        let polled = self.guest.as_mut().poll(context);
        let spent = thread_cpu().saturating_sub(before);
        let spent = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        self.usage.cpu_ns.fetch_add(spent, Ordering::Relaxed);
        match polled {
            Poll::Pending if self.usage.cpu() > self.limit => {
                self.usage.ended_early.store(true, Ordering::Release);
                Poll::Ready(Err(RequestFault::Cpu))
            }
            polled => polled,
        }
    }
}
