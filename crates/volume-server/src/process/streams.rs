//! Threads that answer the requests of sessions.
//!
//! A *session* serves one client of the volume: the kernel of a guest, or the daemon. It reads FUSE
//! requests from a stream, and writes the replies.

use super::control::image_reply;
use crate::locks::LateReply;
use crate::session::{
    MAX_MESSAGE, Session, SessionRights, is_ordered, late_message, request_length,
};
use crate::volume::Volume;
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Maximum number of sessions of a volume.
const MAX_SESSIONS: usize = 512;
/// Threads of a guest's session. Further requests wait in the stream.
const GUEST_THREADS: usize = 4;
/// Size of the stack of a thread in bytes. Messages are on the heap.
const STACK_BYTES: usize = 512 << 10;
/// Timeout for the last requests of a session that is replaced.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Sessions of a volume.
#[derive(Debug, Clone)]
pub(super) struct Streams {
    volume: Arc<Volume>,
    /// Number of open streams.
    count: Arc<AtomicUsize>,
    /// Last session of each mount.
    mounts: Arc<Mutex<HashMap<u64, Weak<Served>>>>,
}

/// One session and its stream. The last thread drops it.
#[derive(Debug)]
struct Served {
    session: Session,
    stream: UnixStream,
    /// Locked while a request is read.
    reading: Mutex<()>,
    /// Locked while a reply is written.
    writing: Mutex<()>,
    /// Number of open streams of the volume.
    count: Arc<AtomicUsize>,
    /// Locked for reading while a request is executed.
    execution: RwLock<()>,
    /// True if a later session of the same mount replaces this one.
    is_replaced: AtomicBool,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Streams {
    pub(super) fn new(volume: Arc<Volume>) -> Self {
        Self {
            volume,
            count: Arc::default(),
            mounts: Arc::default(),
        }
    }

    /// Returns the number of sessions.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Records that the process ends without sessions.
    pub(super) fn finish(&self) {
        self.volume.locks().finish();
    }

    /// Writes an image to a file, and then the result to `connection`, on a thread of its own.
    pub(super) fn write_image(&self, image: File, mut connection: UnixStream) {
        // The image counts like a session, so that the process does not exit.
        self.count.fetch_add(1, Ordering::Relaxed);
        let (volume, count) = (self.volume.clone(), self.count.clone());
        let thread = std::thread::Builder::new().name("image".to_owned());
        let started = thread.spawn(move || {
            let written = volume.write_image(&image);
            let reply = image_reply(written.map(|summary| summary.bytes));
            // Ignore the error: the daemon may have been stopped.
            let _ = connection.write_all(&reply);
            count.fetch_sub(1, Ordering::Relaxed);
        });
        // Without a thread, the connection is closed, which the daemon reports.
        if started.is_err() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Serves a session on `stream`. Ends the previous session of the same `mount`.
    pub(super) fn start(
        &self,
        stream: UnixStream,
        rights: SessionRights,
        mount: Option<u64>,
    ) -> io::Result<()> {
        let mut mounts = self.mounts.lock();
        mounts.retain(|_, served| served.strong_count() > 0);
        let previous = mount.and_then(|mount| mounts.get(&mount)?.upgrade());
        if let Some(previous) = previous {
            previous.end()?;
        }
        if self.count() >= MAX_SESSIONS {
            return Err(io::Error::other("the volume has too many sessions"));
        }
        stream.set_nonblocking(false)?;
        self.count.fetch_add(1, Ordering::Relaxed);
        let served = Arc::new(Served {
            session: Session::new(self.volume.clone(), rights),
            stream,
            reading: Mutex::default(),
            writing: Mutex::default(),
            count: self.count.clone(),
            execution: RwLock::default(),
            is_replaced: AtomicBool::default(),
        });
        if let Some(mount) = mount {
            mounts.insert(mount, Arc::downgrade(&served));
        }
        let started = served.start_threads(rights.is_daemon);
        if started.is_err() {
            // The end of the stream ends the threads that have started.
            served.end_stream();
            served.session.end_locks();
        }
        started
    }
}

impl Served {
    /// Starts the threads that serve a client: one for the daemon, several for a guest.
    fn start_threads(self: &Arc<Self>, is_daemon: bool) -> io::Result<()> {
        let spawn = |work: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name("session".to_owned());
            thread.stack_size(STACK_BYTES).spawn(work).map(|_| ())
        };
        for _ in 0..if is_daemon { 1 } else { GUEST_THREADS } {
            let this = self.clone();
            spawn(Box::new(move || this.run()))?;
        }
        // The daemon locks nothing.
        if let Some(late) = self.session.late_replies().filter(|_| !is_daemon) {
            let this = self.clone();
            spawn(Box::new(move || this.send_late(&late)))?;
        }
        Ok(())
    }

    /// Sends replies to requests that waited for a lock, until the session ends.
    fn send_late(&self, late: &Receiver<LateReply>) {
        for reply in late {
            let _writing = self.writing.lock();
            // Ignore the error: the other threads end with the stream.
            let _ = (&self.stream).write_all(&late_message(reply));
            self.session.late_delivered();
        }
    }

    /// Answers requests until the stream ends.
    fn run(&self) {
        let (mut request, mut reply) = (Vec::new(), Vec::new());
        if let Err(e) = self.answer_all(&mut request, &mut reply)
            && e.kind() != io::ErrorKind::UnexpectedEof
        {
            tracing::debug!(error = %e, "a session of the volume ended");
        }
        // The other threads of the session stop as well.
        self.end_stream();
        self.session.end_locks();
    }

    /// Ends reads and writes of the stream.
    fn end_stream(&self) {
        // Ignore the error: the client may have closed the stream.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Answers requests until the stream ends or a new stream replaces it.
    fn answer_all(&self, request: &mut Vec<u8>, reply: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let reading = self.reading.lock();
            read_request(&self.stream, request)?;
            // Requests for locks are executed before the next request is read.
            let reading = is_ordered(request).then_some(reading);
            let has_reply = {
                let _execution = self.execution.read();
                if self.is_replaced.load(Ordering::Acquire) {
                    return Ok(());
                }
                self.session.answer(request, reply)?
            };
            drop(reading);
            if has_reply {
                let _writing = self.writing.lock();
                (&self.stream).write_all(reply)?;
            }
        }
    }

    /// Ends the session, because a later session repeats its requests. When this function returns,
    /// no request of the session is executed any longer, also none that the stream still contains:
    /// a late write would replace newer data.
    fn end(&self) -> io::Result<()> {
        self.is_replaced.store(true, Ordering::Release);
        self.end_stream();
        let _execution = self
            .execution
            .try_write_for(REPLACE_TIMEOUT)
            .ok_or(io::ErrorKind::TimedOut)?;
        // The client requests its locks again in the later session.
        self.session.end_locks();
        Ok(())
    }
}

/// Reads a request, which begins with its length.
fn read_request(mut stream: &UnixStream, request: &mut Vec<u8>) -> io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let total = request_length(&length).ok_or(io::ErrorKind::InvalidData)?;
    debug_assert!(total <= MAX_MESSAGE);
    request.clear();
    request.extend_from_slice(&length);
    request.resize(total, 0);
    let rest = request.get_mut(length.len()..);
    stream.read_exact(rest.ok_or(io::ErrorKind::InvalidData)?)
}
