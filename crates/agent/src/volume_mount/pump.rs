//! Passes messages between the kernel and the host. Requests without a reply are retained, because
//! a restore or a failure of the host's server breaks the stream.

use super::fuse_device::MAX_READ;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum length of a message.
const MAX_MESSAGE: usize = MAX_READ + 4096;
/// Length of the header of a request, and of the header of a reply.
const REQUEST_HEADER: usize = 40;
const REPLY_HEADER: usize = 16;
/// Time without a stream after which requests fail.
const LOST_LIMIT: Duration = Duration::from_secs(30);

/// Requests without replies: FORGET, INTERRUPT and BATCH_FORGET.
const WITHOUT_REPLY: [u32; 3] = [2, 36, 42];
/// Requests that must not be executed twice: SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK,
/// CREATE, RENAME2 and TMPFILE. The host may have executed one before the stream broke.
const ONCE: [u32; 10] = [6, 8, 9, 10, 11, 12, 13, 35, 45, 51];
/// WRITE, which must not be executed twice at the end of a file.
const WRITE: u32 = 16;

/// Messages of one mount.
pub(super) struct Pump {
    device: File,
    /// Held while a message is written to the stream.
    link: Mutex<Link>,
    /// Notified when a stream is attached.
    attached: Condvar,
    /// Requests without a reply, by id. Locked after `link`.
    pending: Mutex<BTreeMap<u64, Pending>>,
}

/// Request without a reply.
struct Pending {
    message: Vec<u8>,
    /// True if the host may have received the request.
    was_sent: bool,
}

/// Stream to the host.
#[derive(Default)]
struct Link {
    stream: Option<UnixStream>,
    /// Number of the server that answers.
    server: u64,
    /// Number of streams so far.
    generation: u64,
    /// True if requests fail because no stream was attached in time.
    is_lost: bool,
    /// True if the kernel has removed the mount.
    is_unmounted: bool,
}

fn number<const N: usize>(message: &[u8], at: usize) -> Option<[u8; N]> {
    message.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn opcode(request: &[u8]) -> u32 {
    number(request, 4).map_or(0, u32::from_le_bytes)
}

fn id(message: &[u8]) -> u64 {
    number(message, 8).map_or(0, u64::from_le_bytes)
}

/// Returns whether a request may be executed twice.
fn is_repeatable(request: &[u8]) -> bool {
    // The flags of the open file follow the header, handle, offset, size, flags and lock owner.
    let is_append = || {
        let flags = number(request, REQUEST_HEADER + 32).map_or(0, i32::from_le_bytes);
        flags & libc::O_APPEND != 0
    };
    match opcode(request) {
        WRITE => !is_append(),
        other => !ONCE.contains(&other),
    }
}

impl Pump {
    pub(super) fn new(device: File) -> Self {
        Self {
            device,
            link: Mutex::default(),
            attached: Condvar::new(),
            pending: Mutex::default(),
        }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, BTreeMap<u64, Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the mount exists.
    pub(super) fn is_mounted(&self) -> bool {
        !self.link().is_unmounted
    }

    /// Returns whether the mount has a stream of this server.
    pub(super) fn is_attached(&self, server: u64) -> bool {
        let link = self.link();
        link.stream.is_some() && link.server == server
    }

    /// Passes requests of the kernel on until the mount is removed.
    pub(super) fn pass_requests(&self) {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            match (&self.device).read(&mut buffer) {
                Ok(length) => self.send(buffer.get(..length).unwrap_or_default()),
                // ENOENT: the request was interrupted before it was read.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::ENOENT)) => {}
                // ENODEV: the mount was removed.
                Err(_) => break,
            }
        }
        let mut link = self.link();
        link.is_unmounted = true;
        // Ends the thread that passes replies.
        if let Some(stream) = link.stream.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.attached.notify_all();
    }

    fn send(&self, request: &[u8]) {
        let has_reply = !WITHOUT_REPLY.contains(&opcode(request));
        let mut link = self.link();
        if link.is_lost {
            if has_reply {
                self.fail(id(request));
            }
            return;
        }
        if has_reply {
            let pending = Pending {
                message: request.to_vec(),
                was_sent: link.stream.is_some(),
            };
            self.pending().insert(id(request), pending);
        }
        // Without a stream, the request is sent when one is attached. The thread that passes
        // replies notices a failure.
        if let Some(stream) = &mut link.stream {
            let _ = stream.write_all(request);
        }
    }

    /// Lets a request fail with EIO.
    fn fail(&self, id: u64) {
        let mut reply = Vec::with_capacity(REPLY_HEADER);
        reply.extend_from_slice(&16_u32.to_le_bytes());
        reply.extend_from_slice(&(-libc::EIO).to_le_bytes());
        reply.extend_from_slice(&id.to_le_bytes());
        // Ignore the error: the request may have been interrupted.
        let _ = (&self.device).write_all(&reply);
    }

    /// Attaches a stream, sends the pending requests, and passes replies on until the stream ends.
    /// Then waits for another stream; requests fail if none is attached in time.
    pub(super) fn pass_replies(
        self: &Arc<Self>,
        stream: UnixStream,
        server: u64,
    ) -> io::Result<()> {
        let reader = stream.try_clone()?;
        let (generation, unanswered) = self.attach(stream, server);
        // On a thread of its own: the host may have to send replies before it accepts all requests.
        let this = self.clone();
        let thread = std::thread::Builder::new().name("volume".to_owned());
        let thread = thread.stack_size(super::STACK_BYTES);
        let repeating = thread.spawn(move || this.repeat(generation, &unanswered));
        if repeating.is_ok() {
            let _ = self.pass_each(&reader);
        }
        // Also ends a write that waits for the host.
        let _ = reader.shutdown(Shutdown::Both);
        let mut link = self.link();
        if link.generation != generation {
            return Ok(());
        }
        link.stream = None;
        let waited = self.attached.wait_timeout_while(link, LOST_LIMIT, |link| {
            link.generation == generation && !link.is_unmounted
        });
        let (mut link, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() && link.generation == generation {
            link.is_lost = true;
            let pending = std::mem::take(&mut *self.pending());
            for id in pending.keys() {
                self.fail(*id);
            }
        }
        Ok(())
    }

    /// Makes `stream` the stream of the mount. Returns its generation, and the ids of the requests
    /// without a reply, each with whether an earlier stream has carried the request.
    fn attach(&self, stream: UnixStream, server: u64) -> (u64, Vec<(u64, bool)>) {
        let mut link = self.link();
        if let Some(previous) = link.stream.replace(stream) {
            let _ = previous.shutdown(Shutdown::Both);
        }
        link.server = server;
        link.generation += 1;
        link.is_lost = false;
        self.attached.notify_all();
        let mut pending = self.pending();
        let unanswered = pending.iter_mut().map(|(id, request)| {
            let was_sent = std::mem::replace(&mut request.was_sent, true);
            (*id, was_sent)
        });
        (link.generation, unanswered.collect())
    }

    /// Sends requests again that the previous stream did not answer, and requests that waited for a
    /// stream.
    fn repeat(&self, generation: u64, unanswered: &[(u64, bool)]) {
        for (id, was_sent) in unanswered {
            // One message is copied at a time. The lock must not be held during the write, because
            // the host may wait until this guest has received replies.
            let message = self
                .pending()
                .get(id)
                .map(|request| request.message.clone());
            let Some(message) = message else { continue };
            if *was_sent && !is_repeatable(&message) {
                self.pending().remove(id);
                self.fail(*id);
                continue;
            }
            let mut link = self.link();
            if link.generation != generation {
                return;
            }
            if let Some(stream) = &mut link.stream {
                let _ = stream.write_all(&message);
            }
        }
    }

    fn pass_each(&self, mut stream: &UnixStream) -> io::Result<()> {
        let mut reply = vec![0; MAX_MESSAGE];
        loop {
            let mut length = [0; 4];
            stream.read_exact(&mut length)?;
            let total = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
            let message = reply.get_mut(..total).filter(|_| total >= REPLY_HEADER);
            let message = message.ok_or(io::ErrorKind::InvalidData)?;
            let (start, rest) = message.split_at_mut(length.len());
            start.copy_from_slice(&length);
            stream.read_exact(rest)?;
            self.pending().remove(&id(message));
            // Ignore the error: the request may have been interrupted, or failed before.
            let _ = (&self.device).write(message);
        }
    }
}
