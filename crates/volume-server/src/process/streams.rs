//! Threads that answer the requests of sessions.

use crate::session::{MAX_MESSAGE, Session, SessionRights, request_length};
use crate::volume::Volume;
use parking_lot::Mutex;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of sessions of a volume.
const MAX_SESSIONS: usize = 512;
/// Threads of a guest's session. Further requests wait in the stream.
const GUEST_THREADS: usize = 4;

/// Sessions of a volume.
#[derive(Debug, Clone)]
pub(super) struct Streams {
    volume: Arc<Volume>,
    count: Arc<AtomicUsize>,
}

/// One session and its stream. The last thread drops it.
struct Served {
    session: Session,
    reader: Mutex<UnixStream>,
    writer: Mutex<UnixStream>,
    count: Arc<AtomicUsize>,
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
        }
    }

    /// Returns the number of sessions.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Serves a session on `stream`.
    pub(super) fn start(&self, stream: UnixStream, rights: SessionRights) -> io::Result<()> {
        if self.count() >= MAX_SESSIONS {
            return Err(io::Error::other("the volume has too many sessions"));
        }
        stream.set_nonblocking(false)?;
        let writer = stream.try_clone()?;
        self.count.fetch_add(1, Ordering::Relaxed);
        let served = Arc::new(Served {
            session: Session::new(self.volume.clone(), rights),
            reader: Mutex::new(stream),
            writer: Mutex::new(writer),
            count: self.count.clone(),
        });
        let threads = if rights.is_daemon { 1 } else { GUEST_THREADS };
        for _ in 0..threads {
            let served = served.clone();
            let thread = std::thread::Builder::new().name("session".to_owned());
            thread.spawn(move || served.run())?;
        }
        Ok(())
    }
}

impl Served {
    /// Answers requests until the stream ends.
    fn run(&self) {
        let (mut request, mut reply) = (Vec::new(), Vec::new());
        if let Err(e) = self.answer_all(&mut request, &mut reply)
            && e.kind() != io::ErrorKind::UnexpectedEof
        {
            tracing::debug!(error = %e, "a session of the volume ended");
        }
        // The other threads of the session stop as well.
        let _ = self.writer.lock().shutdown(Shutdown::Both);
    }

    fn answer_all(&self, request: &mut Vec<u8>, reply: &mut Vec<u8>) -> io::Result<()> {
        loop {
            read_request(&mut self.reader.lock(), request)?;
            let has_reply = self.session.answer(request, reply)?;
            if has_reply {
                self.writer.lock().write_all(reply)?;
            }
        }
    }
}

/// Reads a request, which begins with its length.
fn read_request(stream: &mut UnixStream, request: &mut Vec<u8>) -> io::Result<()> {
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
