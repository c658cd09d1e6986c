//! Reports of a direct connection to the daemon: idle, or busy with a request.
//!
//! Requests of a busy connection follow each other within fractions of a millisecond. A change is
//! therefore reported once it has lasted for a while: short requests and short pauses cost no
//! message.

use crate::head_timeout::UnderWay;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// Time that a change must last.
const SETTLE_TIME: Duration = Duration::from_millis(20);

/// State of a connection as it was reported, and as it is.
pub(crate) struct ActivityReport<F> {
    under_way: UnderWay,
    /// Sends a report. Returns false if that has to be tried again.
    report: F,
    reported_busy: bool,
    /// Time since which the state differs from the reported one.
    differs_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<F: FnMut(bool) -> bool + Unpin> ActivityReport<F> {
    /// Creates the reports of a new connection, which counts as busy.
    pub(crate) fn new(under_way: UnderWay, report: F) -> Self {
        Self {
            under_way,
            report,
            reported_busy: true,
            differs_since: None,
            timer: None,
        }
    }

    /// Compares the states, and reports a change that has lasted. Called whenever the task of the
    /// connection is polled, after the connection. Never ready.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let is_busy = !self.under_way.is_idle();
            if is_busy == self.reported_busy {
                self.differs_since = None;
                return Poll::Pending;
            }
            let now = Instant::now();
            let since = *self.differs_since.get_or_insert(now);
            if now >= since + SETTLE_TIME {
                match (self.report)(is_busy) {
                    true => self.reported_busy = is_busy,
                    false => self.differs_since = Some(now),
                }
                continue;
            }
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(sleep_until(since + SETTLE_TIME)));
            // A timer of an earlier change runs on: setting one anew for each request costs a
            // system call.
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
    async fn changes_are_reported_when_they_last() {
        let (under_way, told) = (UnderWay::default(), Rc::new(RefCell::new(Vec::new())));
        let heard = told.clone();
        let tries = Rc::new(RefCell::new(1));
        let mut report = ActivityReport::new(under_way.clone(), move |is_busy| {
            // The first report of each kind does not get through.
            *tries.borrow_mut() += 1;
            let sent = *tries.borrow() % 2 == 1;
            heard.borrow_mut().extend(sent.then_some(is_busy));
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
            let request = under_way.enter();
            run(short).await;
            drop(request);
            run(short).await;
        }
        assert!(told.borrow().is_empty(), "short pauses");
        run(SETTLE_TIME * 3).await;
        assert_eq!(*told.borrow(), [false]);
        for _ in 0..20 {
            let request = under_way.enter();
            run(short).await;
            drop(request);
            run(short).await;
        }
        assert_eq!(*told.borrow(), [false], "short requests");
        let request = under_way.enter();
        run(SETTLE_TIME * 3).await;
        assert_eq!(*told.borrow(), [false, true]);
        drop(request);
        run(SETTLE_TIME * 3).await;
        assert_eq!(*told.borrow(), [false, true, false]);
    }
}
