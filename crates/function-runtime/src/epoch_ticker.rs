//! Thread that increments the engine's epoch at regular intervals. Guests yield when the epoch
//! changes. The thread sleeps while no guest runs.
//!
//! A *guest* is an instance of a function's module. A *fiber* is a stack of its own on which a
//! guest can yield to other requests.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;
use wasmtime::{Engine, UpdateDeadline};

/// Length of an epoch. A guest on a fiber yields when its epoch ends.
const EPOCH: Duration = Duration::from_millis(1);
/// Number of epochs without a guest after which the thread sleeps.
const IDLE_EPOCHS: u32 = 50;

/// Lets a guest yield at the end of an epoch, and run for another epoch afterwards.
///
/// The guest's task becomes ready again only after its worker has run all other ready tasks, at
/// most the runtime's event interval (61), and has read from its connections. A guest that only
/// woke its own task would be polled 61 times, for an epoch each, before a new request is read.
pub(crate) fn yield_to_runtime() -> UpdateDeadline {
    UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now()))
}

/// State that guests share with the thread.
#[derive(Debug, Default)]
struct TickerState {
    /// Number of running guests.
    guests: AtomicUsize,
    /// True while the thread waits for a guest.
    sleeping: AtomicBool,
}

/// Handle of the thread.
#[derive(Debug, Clone)]
pub struct EpochTicker {
    state: Arc<TickerState>,
    thread: Thread,
}

/// Counts a guest as running until this value is dropped.
#[derive(Debug)]
pub struct RunningGuest(Arc<TickerState>);

impl EpochTicker {
    /// Starts the thread.
    pub fn start(engine: &Engine) -> io::Result<Self> {
        let state = Arc::new(TickerState::default());
        let (thread_state, engine) = (state.clone(), engine.clone());
        let tick = move || tick(&thread_state, &engine);
        let thread = thread::Builder::new()
            .name("epochs".to_owned())
            .spawn(tick)?;
        Ok(Self {
            state,
            thread: thread.thread().clone(),
        })
    }

    /// Counts a guest as running until the returned value is dropped. Wakes the thread if it
    /// sleeps.
    #[must_use]
    pub fn enter(&self) -> RunningGuest {
        // `SeqCst`, like in `tick`: either this load sees `sleeping`, or the thread sees the guest.
        self.state.guests.fetch_add(1, Ordering::SeqCst);
        if self.state.sleeping.load(Ordering::SeqCst) {
            self.thread.unpark();
        }
        RunningGuest(self.state.clone())
    }
}

impl Drop for RunningGuest {
    fn drop(&mut self) {
        self.0.guests.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Main loop of the thread. Sleeps after [`IDLE_EPOCHS`] without a guest, until a guest unparks it.
fn tick(state: &TickerState, engine: &Engine) {
    let mut idle = 0;
    loop {
        thread::sleep(EPOCH);
        engine.increment_epoch();
        idle = match state.guests.load(Ordering::SeqCst) {
            0 => idle + 1,
            _ => 0,
        };
        if idle >= IDLE_EPOCHS {
            state.sleeping.store(true, Ordering::SeqCst);
            // This load sees a guest that entered earlier. A guest that enters later unparks the
            // thread.
            while state.guests.load(Ordering::SeqCst) == 0 {
                // `park` may return without a reason, hence the loop.
                thread::park();
            }
            state.sleeping.store(false, Ordering::SeqCst);
            idle = 0;
        }
    }
}
