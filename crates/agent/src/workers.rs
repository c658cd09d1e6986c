//! Threads for calls that may wait for a file system.
//!
//! A file system may never answer, for example a FUSE file system whose server hangs. Therefore the
//! event loop makes no call that depends on a path of the sandbox. A worker thread makes the call,
//! and the caller waits for the result. If the call makes no progress for the *patience* of its
//! class, the caller stops waiting. A thread that waits in such a call cannot be interrupted: it is
//! *stuck* until the file system answers or is unmounted. The number of stuck threads is limited,
//! and other calls continue on other threads.
//!
//! A call that transfers data is *suspended* while it waits for its client
//! ([`Progress::wait_for_client`]). The patience does not apply during this time.

mod error;
mod job;
mod mount_table;
mod worker_body;

pub use error::CallError;
pub use job::Progress;
pub use worker_body::{ChunkSource, WorkerBody};

use job::{JobRecord, NOT_STARTED, SUSPENDED};
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Class of a call. Each class has separate limits, so that stuck calls of one class do not block
/// the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallClass {
    /// Calls on files and directories.
    Files,
    /// Creation of a process.
    Start,
    /// Archives and other operations on whole directory trees.
    Archive,
    /// Steps of applying an identity. The host waits for them.
    Identity,
}

impl CallClass {
    /// Maximum number of calls that run at the same time, excluding stuck calls.
    const fn max_active(self) -> usize {
        match self {
            Self::Files | Self::Start | Self::Archive => 4,
            Self::Identity => 2,
        }
    }

    /// Maximum number of threads, including stuck threads.
    const fn max_threads(self) -> usize {
        match self {
            Self::Files => 16,
            Self::Start | Self::Archive | Self::Identity => 8,
        }
    }

    /// Time without progress after which a call counts as stuck.
    const fn patience(self) -> Duration {
        match self {
            Self::Files | Self::Start => Duration::from_secs(15),
            Self::Archive => Duration::from_secs(60),
            // All steps together must complete in the 30 s for which the host waits.
            Self::Identity => Duration::from_secs(3),
        }
    }
}

/// Maximum number of calls that wait for a thread, over all classes.
const MAX_WAITING: usize = 1024;
/// Maximum time that a call waits for a thread.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which the caller checks a running call, and time until the first check of a call
/// that a thread may take at once.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the caller of a call that no thread has taken checks whether a running call
/// became stuck. Stuck calls do not count as active, so a queued call may then run.
const QUEUE_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of stuck calls on one file system. Further calls on it fail immediately.
const MAX_STUCK_PER_FILE_SYSTEM: usize = 2;
/// Number of threads that do not exit when idle, so that most calls do not create a thread.
const MIN_THREADS: usize = 1;
/// Time after which an idle thread exits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Stack size of a worker thread in bytes.
const STACK_BYTES: usize = 256 * 1024;

/// Pool of worker threads. Clones refer to the same threads.
#[derive(Clone)]
pub struct Workers(Arc<Pool>);

/// Threads for blocking calls, and the calls.
struct Pool {
    /// Origin of all times that are stored in milliseconds.
    epoch: Instant,
    /// Patience with all calls. If `None`, the patience of each class.
    patience: Option<Duration>,
    state: Mutex<PoolState>,
    /// Notified when a task is ready.
    ready: Condvar,
}

/// Calls of a pool by their state.
#[derive(Default)]
struct PoolState {
    /// Tasks that a thread may take.
    ready: VecDeque<Task>,
    /// Tasks that exceed the limits of their class.
    waiting: VecDeque<Task>,
    /// Calls in `ready`, and calls that threads execute.
    running: Vec<Arc<JobRecord>>,
    /// Number of threads.
    threads: usize,
    /// Number of threads that wait for a task.
    idle: usize,
}

/// Call that no thread executes yet.
struct Task {
    record: Arc<JobRecord>,
    work: Box<dyn FnOnce(&Progress) + Send>,
    /// Closed if the caller no longer waits. Receives a value when the work is complete.
    done: oneshot::Sender<()>,
}

impl Workers {
    /// Creates a pool with its permanent thread. `patience` replaces the patience of all classes.
    pub fn new(patience: Option<Duration>) -> io::Result<Self> {
        let pool = Arc::new(Pool {
            epoch: Instant::now(),
            patience,
            state: Mutex::default(),
            ready: Condvar::new(),
        });
        Pool::add_thread(&pool, &mut lock(&pool.state))?;
        Ok(Self(pool))
    }

    /// Returns the number of stuck calls.
    pub fn stuck(&self) -> usize {
        let now = self.0.now_ms();
        let state = lock(&self.0.state);
        state.running.iter().filter(|r| r.is_stuck(now)).count()
    }

    /// Runs `work` on a worker thread. `what` names the operation and its object in errors, for
    /// example "cannot list '/tmp'". If the returned future is dropped, `work` continues to run.
    ///
    /// # Errors
    /// The call is stuck, too many calls are stuck or queued, or an internal error aborted the
    /// call.
    pub async fn run<T: Send + 'static>(
        &self,
        class: CallClass,
        what: impl Into<String>,
        work: impl FnOnce(&Progress) -> T + Send + 'static,
    ) -> Result<T, CallError> {
        // A shared slot passes the result, so that `drive` does not depend on the type of the
        // result.
        let slot = Arc::new(Mutex::new(None));
        let result = Arc::clone(&slot);
        let work = Box::new(move |progress: &Progress| *lock(&result) = Some(work(progress)));
        let what = self.drive(class, what.into(), work).await?;
        // The slot is empty if no thread could be created, or if the work panicked.
        let value = lock(&slot).take();
        value.ok_or(CallError::Failed { what })
    }

    /// Runs `work` until it completes. This function is not generic, so that the program contains
    /// only one copy of it.
    async fn drive(
        &self,
        class: CallClass,
        what: String,
        work: Box<dyn FnOnce(&Progress) + Send>,
    ) -> Result<String, CallError> {
        let patience = self.0.patience.unwrap_or(class.patience());
        let (done, mut result) = oneshot::channel();
        let record = Arc::new(JobRecord {
            class,
            patience,
            what,
            path: Mutex::default(),
            progress_ms: AtomicU64::new(NOT_STARTED),
        });
        let task = Task {
            record: Arc::clone(&record),
            work,
            done,
        };
        let mut pause = if self.0.submit(task)? {
            patience.min(CHECK_INTERVAL)
        } else {
            QUEUE_INTERVAL
        };
        let began = Instant::now();
        loop {
            match timeout(pause, &mut result).await {
                // If no thread can run a task, its channel is closed and there is no value.
                Ok(_) => return Ok(record.what.clone()),
                Err(_elapsed) => pause = self.0.next_pause(&record, began)?,
            }
        }
    }

    /// Same as [`Self::run`] for work that returns a `Result`.
    pub async fn attempt<T: Send + 'static, E: From<CallError> + Send + 'static>(
        &self,
        class: CallClass,
        what: impl Into<String>,
        work: impl FnOnce(&Progress) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        self.run(class, what, work).await?
    }
}

impl Pool {
    /// Returns the time since `epoch` in milliseconds.
    fn now_ms(&self) -> u64 {
        // The fallback differs from the special values of `JobRecord::progress_ms`.
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(SUSPENDED - 1)
    }

    /// Queues a task. Returns whether a thread may run it immediately.
    fn submit(self: &Arc<Self>, task: Task) -> Result<bool, CallError> {
        let class = task.record.class;
        // The calls are counted and the task is queued under one lock, so that concurrent
        // submissions cannot exceed a limit.
        let mut state = lock(&self.state);
        let (active, stuck) = state.count(class, self.now_ms());
        if stuck >= class.max_threads() {
            return Err(CallError::Exhausted {
                what: task.record.what.clone(),
                stuck,
            });
        }
        if state.waiting.len() >= MAX_WAITING {
            return Err(CallError::Busy {
                what: task.record.what.clone(),
            });
        }
        let may_run = active < class.max_active() && active + stuck < class.max_threads();
        if may_run {
            self.make_ready(&mut state, task);
        } else {
            state.waiting.push_back(task);
        }
        Ok(may_run)
    }

    /// Hands a task to an idle thread, or to a new one.
    fn make_ready(self: &Arc<Self>, state: &mut PoolState, task: Task) {
        state.running.push(Arc::clone(&task.record));
        state.ready.push_back(task);
        // Each idle thread takes one ready task. If there are more ready tasks, another thread is
        // created. If this fails, the task remains queued until a busy thread takes it.
        if state.ready.len() <= state.idle {
            self.ready.notify_one();
        } else if Self::add_thread(self, state).is_err() && state.threads == 0 {
            // No thread would run the task. The closed channel notifies its caller.
            if let Some(task) = state.ready.pop_back() {
                state.running.retain(|r| !Arc::ptr_eq(r, &task.record));
            }
        }
    }

    /// Moves queued tasks to the ready tasks until the limits are reached.
    fn admit_waiting(self: &Arc<Self>, state: &mut PoolState) {
        let now = self.now_ms();
        let mut index = 0;
        while let Some(task) = state.waiting.get(index) {
            let class = task.record.class;
            let (active, stuck) = state.count(class, now);
            if active >= class.max_active() || active + stuck >= class.max_threads() {
                index += 1;
            } else if let Some(task) = state.waiting.remove(index) {
                self.make_ready(state, task);
            }
        }
    }

    /// Returns the time until the caller of a call must check again.
    fn next_pause(
        self: &Arc<Self>,
        record: &Arc<JobRecord>,
        began: Instant,
    ) -> Result<Duration, CallError> {
        let patience = record.patience;
        // Relaxed suffices: the value is only compared with the clock. Results are passed through a
        // mutex and a channel.
        match record.progress_ms.load(Ordering::Relaxed) {
            // The call waits for its client, which may take any time.
            SUSPENDED => Ok(CHECK_INTERVAL),
            NOT_STARTED if began.elapsed() >= QUEUE_TIMEOUT => {
                let mut state = lock(&self.state);
                state.waiting.retain(|t| !Arc::ptr_eq(&t.record, record));
                Err(CallError::Busy {
                    what: record.what.clone(),
                })
            }
            NOT_STARTED => {
                // A running call may have become stuck since the last check, so that another call
                // may run.
                let mut state = lock(&self.state);
                self.admit_waiting(&mut state);
                // A notified thread may not have run yet. Notify another idle thread, which may
                // take the task earlier. If no idle thread remains, the notification has no effect.
                if !state.ready.is_empty() && state.idle > 0 {
                    self.ready.notify_one();
                }
                Ok(QUEUE_INTERVAL)
            }
            progress => {
                let quiet = Duration::from_millis(self.now_ms().saturating_sub(progress));
                if quiet < patience {
                    let remaining = (patience - quiet).max(Duration::from_millis(1));
                    return Ok(remaining.min(CHECK_INTERVAL));
                }
                let what = &record.what;
                let seconds = patience.as_secs();
                eprintln!("jiffy-agent: {what}: the file system did not answer within {seconds} s");
                Err(CallError::NoAnswer {
                    what: what.clone(),
                    patience,
                })
            }
        }
    }

    /// Returns the paths of the stuck calls.
    fn stuck_paths(&self) -> Vec<PathBuf> {
        let now = self.now_ms();
        let state = lock(&self.state);
        let stuck = state.running.iter().filter(|r| r.is_stuck(now));
        stuck.filter_map(|r| lock(&r.path).clone()).collect()
    }

    /// Starts one more worker. The caller holds the lock of the pool.
    fn add_thread(pool: &Arc<Self>, state: &mut PoolState) -> io::Result<()> {
        let own = Arc::clone(pool);
        std::thread::Builder::new()
            .name("worker".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || own.work())?;
        state.threads += 1;
        Ok(())
    }

    /// Main loop of a thread.
    fn work(self: Arc<Self>) {
        while let Some(Task { record, work, done }) = self.next_task() {
            let progress = Progress {
                pool: Arc::clone(&self),
                record,
            };
            progress.advance();
            // The caller may have stopped waiting while the task was queued.
            if !done.is_closed() {
                work(&progress);
            }
            let mut state = lock(&self.state);
            state.running.retain(|r| !Arc::ptr_eq(r, &progress.record));
            self.admit_waiting(&mut state);
            drop(state);
            // Notify the caller last, so that its call is not counted as running when it has
            // received the result.
            let _ = done.send(());
        }
    }

    /// Returns the next task, or `None` if the thread must exit.
    fn next_task(&self) -> Option<Task> {
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.ready.pop_front() {
                return Some(task);
            }
            state.idle += 1;
            let has_timeout = state.threads > MIN_THREADS;
            let mut timed_out = false;
            state = if has_timeout {
                let waited = self.ready.wait_timeout(state, IDLE_TIMEOUT);
                let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                timed_out = waited.timed_out();
                state
            } else {
                // Waits without a timeout, so that an idle sandbox does not wake up.
                self.ready
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner)
            };
            state.idle -= 1;
            if timed_out && state.ready.is_empty() && state.threads > MIN_THREADS {
                state.threads -= 1;
                return None;
            }
        }
    }
}

impl PoolState {
    /// Returns the numbers of active and of stuck calls of a class.
    fn count(&self, class: CallClass, now_ms: u64) -> (usize, usize) {
        let mut counts = (0, 0);
        for record in self.running.iter().filter(|r| r.class == class) {
            if record.is_stuck(now_ms) {
                counts.1 += 1
            } else {
                counts.0 += 1
            }
        }
        counts
    }
}

/// Locks a mutex. In each critical section the data is valid at every step, so a poisoned mutex is
/// usable.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
