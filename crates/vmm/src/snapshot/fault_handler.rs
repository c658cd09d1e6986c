//! Thread that fills missing guest memory. It handles page faults, requests chunks from the
//! fetcher, and copies each chunk from its layer's file. The fetcher ([`jiffy_proto::fetch`])
//! downloads requested chunks into these files.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *layer* is the part of a memory or disk that one
//! snapshot stores: the content that differs from its ancestors.
//!
//! The thread accesses no guest memory itself and waits for no other thread. All other users of
//! guest memory may therefore wait for it: vCPUs, devices in the event loop, and the kernel on
//! their behalf.

use super::lazy_memory::LazyMemory;
use super::linear_memory::CHUNK_BYTES;
use crate::error::VmmError;
use crate::seccomp;
use jiffy_proto::fetch::{FetchAnswer, FetchOutcome, FetchRequest, MAX_ANSWER_BYTES};
use jiffy_proto::layer::UnitSet;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, SockFlag, accept4, recv, send};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Stack size of the thread, in bytes.
const STACK_BYTES: usize = 256 << 10;
/// Interval at which open requests are sent again or time out.
const TICK: Duration = Duration::from_millis(100);
/// Delay before a chunk that could not be fetched is requested again.
const RETRY_DELAY: Duration = Duration::from_millis(300);

/// Layer from which chunks are read.
#[derive(Debug)]
pub struct FaultLayer {
    /// The layer's file.
    pub file: File,
    /// Present chunks. `None` if all chunks are present.
    pub present: Option<UnitSet>,
}

/// Source of missing memory.
#[derive(Debug)]
pub struct FaultSource {
    /// Layers, by number.
    pub layers: Vec<FaultLayer>,
    /// Missing runs of chunks in ascending order, with the layer of each run.
    pub runs: Vec<(usize, Range<u64>)>,
    /// Socket to which the fetcher connects.
    pub listener: OwnedFd,
    /// Timeout of a guest that waits for a chunk.
    pub timeout: Duration,
}

impl FaultSource {
    /// Returns the layer with a missing chunk. `None` if no run contains the chunk.
    fn layer_of(&self, chunk: u64) -> Option<usize> {
        // The last run that starts at or before the chunk.
        let after = self.runs.partition_point(|(_, run)| run.start <= chunk);
        let (layer, run) = self.runs.get(after.checked_sub(1)?)?;
        run.contains(&chunk).then_some(*layer)
    }
}

/// Starts the confined thread. If memory cannot be completed, the thread calls `fail` and exits.
pub fn start(
    memory: Arc<LazyMemory>,
    source: FaultSource,
    fail: impl FnOnce(VmmError) + Send + 'static,
) -> Result<(), VmmError> {
    let mut handler = FaultHandler {
        memory,
        source,
        fetcher: None,
        open_requests: BTreeMap::new(),
        last_failure: None,
        content: Box::new([0; CHUNK_BYTES]),
    };
    let main = move || {
        let served = seccomp::confine_faults().and_then(|()| handler.serve());
        if let Err(e) = served {
            fail(e);
        }
    };
    let thread = Builder::new().name("faults".to_owned());
    let thread = thread.stack_size(STACK_BYTES).spawn(main);
    thread
        .map(drop)
        .map_err(|e| VmmError::host("starting the thread that fills memory", e))
}

/// Request for a chunk that the fetcher has not answered.
#[derive(Debug)]
struct OpenRequest {
    layer: usize,
    since: Instant,
    /// Time to send the request. `None` if it was sent.
    send_at: Option<Instant>,
}

/// Handles faults on missing memory, in a thread of its own.
struct FaultHandler {
    memory: Arc<LazyMemory>,
    source: FaultSource,
    fetcher: Option<OwnedFd>,
    /// Open requests, by chunk.
    open_requests: BTreeMap<u64, OpenRequest>,
    /// Reason of the fetcher's last error.
    last_failure: Option<String>,
    content: Box<[u8; CHUNK_BYTES]>,
}

/// Events of one wait.
struct Ready {
    faults: bool,
    listener: bool,
    fetcher: bool,
}

impl FaultHandler {
    /// Serves page faults until an error occurs.
    fn serve(&mut self) -> Result<(), VmmError> {
        loop {
            let ready = self.wait().map_err(failed("waiting for page faults"))?;
            // Accept a new fetcher before `send`, so that it receives all open requests at once.
            if ready.listener {
                self.accept();
            }
            if ready.fetcher {
                self.receive()?;
            }
            if ready.faults {
                for address in self
                    .memory
                    .faults()
                    .map_err(failed("reading page faults"))?
                {
                    self.on_fault(address)?;
                }
            }
            self.send();
            self.check_time()?;
        }
    }

    /// Waits for faults, connections and answers, or until a retry or timeout may be due.
    fn wait(&self) -> Result<Ready, Errno> {
        let mut descriptors = vec![
            PollFd::new(self.memory.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.source.listener.as_fd(), PollFlags::POLLIN),
        ];
        let fetcher = self.fetcher.as_ref();
        descriptors.extend(fetcher.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        // Without open requests, only events need attention. With open requests, retries and
        // timeouts are due at some time.
        let timeout = if self.open_requests.is_empty() {
            PollTimeout::NONE
        } else {
            PollTimeout::try_from(TICK).unwrap_or(PollTimeout::ZERO)
        };
        match poll(&mut descriptors, timeout) {
            Err(Errno::EINTR) => {}
            other => drop(other?),
        }
        let ready = |at: usize| descriptors.get(at).and_then(PollFd::any).unwrap_or(false);
        Ok(Ready {
            faults: ready(0),
            listener: ready(1),
            fetcher: ready(2),
        })
    }

    /// Accepts a new connection of the fetcher. All open requests are sent again.
    fn accept(&mut self) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let Ok(raw) = accept4(self.source.listener.as_raw_fd(), flags) else {
            return;
        };
        // SAFETY: accept4 has just created this descriptor for this process.
        let fetcher = unsafe { OwnedFd::from_raw_fd(raw) };
        self.replace_fetcher(Some(fetcher));
        // The former fetcher's answers are lost, so the new fetcher receives all requests.
        let now = Instant::now();
        for request in self.open_requests.values_mut() {
            request.send_at = Some(now);
        }
    }

    /// Replaces the connection to the fetcher, and closes the former one.
    fn replace_fetcher(&mut self, next: Option<OwnedFd>) {
        if let Some(former) = std::mem::replace(&mut self.fetcher, next) {
            // In builds with debug assertions, dropping an `OwnedFd` also calls `fcntl`, which the
            // filter of this thread forbids.
            let _ = nix::unistd::close(former);
        }
    }

    /// Handles the answers of the fetcher that have arrived.
    fn receive(&mut self) -> Result<(), VmmError> {
        loop {
            let Some(fetcher) = &self.fetcher else {
                return Ok(());
            };
            // One additional byte detects a message that is too long.
            let mut message = [0; MAX_ANSWER_BYTES + 1];
            let length = match recv(fetcher.as_raw_fd(), &mut message, MsgFlags::empty()) {
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Ok(length) => length,
                Err(_) => 0,
            };
            match FetchAnswer::decode(message.get(..length).unwrap_or_default()) {
                Ok(answer) => self.on_answer(answer)?,
                // The fetcher exited or has another version. Another connection may follow.
                Err(_) => self.replace_fetcher(None),
            }
        }
    }

    /// Handles an answer of the fetcher. Fills the chunk if the fetcher has stored it in the
    /// layer's file.
    fn on_answer(&mut self, answer: FetchAnswer) -> Result<(), VmmError> {
        if answer.outcome == FetchOutcome::Complete {
            return self.on_complete(answer.request.layer);
        }
        let chunk = answer.request.chunk;
        let Some(request) = self.open_requests.get_mut(&chunk) else {
            return Ok(());
        };
        // Ignore an answer for another layer: it does not concern this chunk.
        let layer = request.layer;
        if u32::try_from(layer) != Ok(answer.request.layer) {
            return Ok(());
        }
        match answer.outcome {
            FetchOutcome::Present => {
                self.open_requests.remove(&chunk);
                self.fill(layer, chunk)
            }
            // The request is repeated until the timeout: the store may be unreachable for a short
            // time.
            FetchOutcome::Failed(reason) => {
                request.send_at = Some(Instant::now() + RETRY_DELAY);
                self.last_failure = Some(reason);
                Ok(())
            }
            FetchOutcome::Complete => Ok(()),
        }
    }

    /// From now on, reads all chunks of the layer from its file, including requested ones.
    fn on_complete(&mut self, layer: u32) -> Result<(), VmmError> {
        let Ok(number) = usize::try_from(layer) else {
            return Ok(());
        };
        if let Some(layer) = self.source.layers.get_mut(number) {
            layer.present = None;
        }
        let waiting = self
            .open_requests
            .iter()
            .filter(|(_, open)| open.layer == number);
        let waiting: Vec<u64> = waiting.map(|(&chunk, _)| chunk).collect();
        for chunk in waiting {
            self.open_requests.remove(&chunk);
            self.fill(number, chunk)?;
        }
        Ok(())
    }

    /// Handles a page fault. Fills the chunk if its layer's file contains the chunk, and requests
    /// the chunk from the fetcher if not.
    fn on_fault(&mut self, address: u64) -> Result<(), VmmError> {
        let chunk = self
            .memory
            .chunk_of(address)
            .ok_or_else(|| failed("serving a page fault")(Errno::EFAULT))?;
        // Another fault of the same chunk has filled it, or the guest has returned the page since.
        // If the page is present, `zero` only resumes the waiting threads.
        if !self.memory.is_missing(chunk) {
            let zeroed = self.memory.zero(address);
            return zeroed.map_err(failed("filling memory with zeroes"));
        }
        let layer = self
            .source
            .layer_of(chunk)
            .ok_or_else(|| failed("serving a page fault")(Errno::ENXIO))?;
        let present = |layer: &FaultLayer| match &layer.present {
            Some(present) => present.contains(chunk),
            None => true,
        };
        if self.source.layers.get(layer).is_some_and(present) {
            return self.fill(layer, chunk);
        }
        // A request that is open already also answers this fault.
        let now = Instant::now();
        self.open_requests.entry(chunk).or_insert(OpenRequest {
            layer,
            since: now,
            send_at: Some(now),
        });
        Ok(())
    }

    /// Copies a chunk from its layer's file, where it is present now.
    fn fill(&mut self, layer: usize, chunk: u64) -> Result<(), VmmError> {
        let reading = |e: &dyn std::fmt::Display| VmmError::host("reading a memory layer", e);
        let layer = self
            .source
            .layers
            .get(layer)
            .ok_or_else(|| reading(&Errno::ENXIO))?;
        let bytes = u64::try_from(CHUNK_BYTES).map_err(|e| reading(&e))?;
        let read = layer
            .file
            .read_exact_at(self.content.as_mut_slice(), chunk * bytes);
        read.map_err(|e| reading(&e))?;
        let filled = self.memory.fill(chunk, &self.content);
        filled.map_err(failed("filling fetched memory"))
    }

    /// Sends the requests that are due. Requests that the socket does not accept now are sent
    /// later.
    fn send(&mut self) {
        let Some(fetcher) = &self.fetcher else {
            return;
        };
        let now = Instant::now();
        for (&chunk, request) in &mut self.open_requests {
            let Ok(layer) = u32::try_from(request.layer) else {
                continue;
            };
            if request.send_at.is_some_and(|at| at <= now) {
                let message = FetchRequest { layer, chunk };
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                // The socket is full, or the fetcher exited. The request remains due.
                if send(fetcher.as_raw_fd(), &message.encode(), flags).is_err() {
                    return;
                }
                request.send_at = None;
            }
        }
    }

    /// Fails if the oldest request for memory has waited too long.
    fn check_time(&self) -> Result<(), VmmError> {
        // Only the oldest request matters: it times out first.
        let limit = self.source.timeout;
        let oldest = self
            .open_requests
            .values()
            .map(|request| request.since)
            .min();
        if oldest.is_none_or(|since| since.elapsed() < limit) {
            return Ok(());
        }
        Err(VmmError::Store {
            seconds: limit.as_secs_f64(),
            reason: match &self.last_failure {
                Some(reason) => format!(" ({reason})"),
                None => String::new(),
            },
        })
    }
}

fn failed(what: &'static str) -> impl Fn(Errno) -> VmmError {
    move |e| VmmError::host(what, e)
}
