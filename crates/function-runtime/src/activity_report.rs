//! Reports of a tenant's process to the daemon whether a direct connection is idle or busy with a
//! request. The daemon counts only busy connections against the limits of the key.
//!
//! A *tenant* is one owner of functions. A *direct* connection is passed from the daemon to the
//! process of the tenant, which then serves its requests without the gateway.
//!
//! The pauses between the requests of a busy connection last fractions of a millisecond. A change
//! is reported only after it has lasted for [`SETTLE_TIME`], so that short requests and short
//! pauses cause no messages.

use crate::head_timeout::InFlightRequests;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// Minimum duration of a change before it is reported.
const SETTLE_TIME: Duration = Duration::from_millis(20);

/// Current and last reported state of a connection.
pub(crate) struct ActivityReport<F> {
    in_flight: InFlightRequests,
    /// Sends a report. Returns false if the report must be retried.
    report: F,
    /// State that was reported last.
    reported_busy: bool,
    /// Time since which the current state differs from the reported state.
    differs_since: Option<Instant>,
    /// Timer until a changed state is reported.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<F: FnMut(bool) -> bool + Unpin> ActivityReport<F> {
    /// Creates the reporter of a new connection. A new connection counts as busy.
    pub(crate) fn new(in_flight: InFlightRequests, report: F) -> Self {
        Self {
            in_flight,
            report,
            reported_busy: true,
            differs_since: None,
            timer: None,
        }
    }

    /// Compares the states and reports a change that has lasted long enough. Must be called
    /// whenever the connection's task is polled, after the connection itself. Never returns
    /// `Ready`.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let is_busy = !self.in_flight.is_idle();
            if is_busy == self.reported_busy {
                self.differs_since = None;
                return Poll::Pending;
            }
            let now = Instant::now();
            let since = *self.differs_since.get_or_insert(now);
            if now >= since + SETTLE_TIME {
                if (self.report)(is_busy) {
                    self.reported_busy = is_busy
                } else {
                    // The socket's buffer is full: retry after `SETTLE_TIME`.
                    self.differs_since = Some(now)
                }
                continue;
            }
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(sleep_until(since + SETTLE_TIME)));
            // A timer that an earlier change started keeps running: resetting the timer for each
            // request would cost a system call.
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            timer.as_mut().reset(since + SETTLE_TIME);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::future::poll_fn;
    use std::rc::Rc;
    use tokio::time::sleep;

    #[tokio::test(start_paused = true)]
    async fn only_changes_that_persist_are_reported() {
        let (in_flight, reports) = (
            InFlightRequests::default(),
            Rc::new(RefCell::new(Vec::new())),
        );
        let sink = reports.clone();
        let tries = Rc::new(RefCell::new(1));
        let mut report = ActivityReport::new(in_flight.clone(), move |is_busy| {
            // Each report fails at its first attempt, and is repeated.
            *tries.borrow_mut() += 1;
            let sent = *tries.borrow() % 2 == 1;
            sink.borrow_mut().extend(sent.then_some(is_busy));
            sent
        });
        let mut run = async |time: Duration| {
            tokio::select! {
                biased;
                () = poll_fn(|context| report.poll(context)) => {}
                () = sleep(time) => {}
            }
        };
        let short = SETTLE_TIME / 4;
        for _ in 0..20 {
            let request = in_flight.enter();
            run(short).await;
            drop(request);
            run(short).await;
        }
        assert!(reports.borrow().is_empty(), "short pauses");
        run(SETTLE_TIME * 3).await;
        assert_eq!(*reports.borrow(), [false]);
        for _ in 0..20 {
            let request = in_flight.enter();
            run(short).await;
            drop(request);
            run(short).await;
        }
        assert_eq!(*reports.borrow(), [false], "short requests");
        let request = in_flight.enter();
        run(SETTLE_TIME * 3).await;
        assert_eq!(*reports.borrow(), [false, true]);
        drop(request);
        run(SETTLE_TIME * 3).await;
        assert_eq!(*reports.borrow(), [false, true, false]);
    }
}
