//! Passes messages between the kernel and the host's server of the volume. Unanswered requests are
//! retained: a restore of the guest or a failure of the server breaks the stream, and the next
//! stream repeats them.

use super::fuse_device::MAX_READ;
use super::lock_record::{LockRecord, locked_node, mark_init};
use super::message::{
    REPLY_HEADER, REQUEST_HEADER, drop_content, error, expects_reply, id, is_repeatable, number,
    opcode, reply,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum length of a message.
const MAX_MESSAGE: usize = MAX_READ + 4096;
/// Time without a stream after which requests fail.
const LOST_LIMIT: Duration = Duration::from_secs(30);

/// Opcodes of the FUSE protocol. Without locks, the server rejects OPEN with ENOSYS, and the kernel
/// then sends neither OPEN nor RELEASE. With locks, the kernel must send them, because RELEASE ends
/// a flock. The agent answers OPEN itself, and RELEASE and FLUSH unless they end a lock.
const OPEN: u32 = 14;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
/// First request of the kernel, by which it negotiates features with the server.
const INIT: u32 = 26;
/// Request for a lock that waits until the lock is free.
const SETLKW: u32 = 33;
/// Message that the process of another request has received a signal.
const INTERRUPT: u32 = 36;
/// Reply to OPEN (`struct fuse_open_out`): no handle, and the flag `FOPEN_KEEP_CACHE` (2), so that
/// the page cache remains valid.
const OPENED: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
/// Flag of a RELEASE that ends the flock of its owner.
const RELEASE_FLOCK: u32 = 2;
/// `FUSE_POSIX_LOCKS`: the server manages the locks of `fcntl`.
const POSIX_LOCKS: u32 = 1 << 1;
/// `FUSE_FLOCK_LOCKS`: the server manages the locks of `flock`.
const FLOCK_LOCKS: u32 = 1 << 10;
/// Flags of INIT with which locks of this sandbox exclude other sandboxes.
const LOCK_FLAGS: u32 = POSIX_LOCKS | FLOCK_LOCKS;

/// Messages of one mount.
pub(super) struct Pump {
    device: File,
    /// Held while a message is written to the stream.
    link: Mutex<Link>,
    /// Notified when a stream is attached.
    attached: Condvar,
    /// Unanswered requests, by id. Locked after `link`.
    pending: Mutex<BTreeMap<u64, Pending>>,
    /// Locks of the guest's processes. Locked after `link`.
    locks: Mutex<LockRecord>,
    /// Sender for the thread that delivers locks.
    grants: Mutex<Option<Sender<Grant>>>,
    /// True if locks also exclude other sandboxes. The server must manage such locks, which
    /// servers of earlier versions do not.
    has_locks: AtomicBool,
}

/// Lock that the host has granted.
struct Grant {
    /// Number of the locked file.
    node: u64,
    /// Reply for the kernel.
    reply: Vec<u8>,
}

/// Receiver of a reply.
enum Receiver {
    /// The kernel.
    Kernel,
    /// The kernel, after the cached content of this node was dropped.
    KernelAfterDrop(u64),
    /// The agent, which has recorded the reply.
    Agent,
}

/// Unanswered request.
struct Pending {
    message: Vec<u8>,
    /// True if the host may have received the request.
    was_sent: bool,
    /// True if the process that made the request received a signal.
    is_interrupted: bool,
}

/// Stream to the host.
#[derive(Default)]
struct Link {
    /// `None` while no stream is attached.
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

impl Pump {
    /// Creates the pump of a mount without a stream.
    pub(super) fn new(device: File) -> Self {
        Self {
            device,
            link: Mutex::default(),
            attached: Condvar::new(),
            pending: Mutex::default(),
            locks: Mutex::default(),
            grants: Mutex::default(),
            has_locks: AtomicBool::default(),
        }
    }

    /// Locks the record of file locks.
    fn locks(&self) -> MutexGuard<'_, LockRecord> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the stream.
    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the unanswered requests.
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
                Ok(length) => self.send(buffer.get_mut(..length).unwrap_or_default()),
                // ENOENT: the request was interrupted before it was read.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::ENOENT)) => {}
                // ENODEV: the mount was removed.
                Err(_) => break,
            }
        }
        let mut link = self.link();
        link.is_unmounted = true;
        // The shutdown ends the thread that passes replies.
        if let Some(stream) = link.stream.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.attached.notify_all();
    }

    /// Sends a request to the host, or answers it.
    fn send(&self, request: &mut [u8]) {
        if opcode(request) == INIT {
            mark_init(request);
        }
        let expects_reply = expects_reply(request);
        let mut link = self.link();
        if link.is_lost {
            if expects_reply {
                self.fail(id(request), libc::EIO);
            }
            return;
        }
        if self.has_locks.load(Ordering::Relaxed) && self.answer(request) {
            return;
        }
        if opcode(request) == INTERRUPT {
            self.interrupt(request, link.stream.is_some());
        }
        if expects_reply {
            let pending = Pending {
                message: request.to_vec(),
                was_sent: link.stream.is_some(),
                is_interrupted: false,
            };
            self.pending().insert(id(request), pending);
        }
        // Without a stream, the request is sent when one is attached. The thread that passes
        // replies notices a failure.
        if let Some(stream) = &mut link.stream {
            let _ = stream.write_all(request);
        }
    }

    /// Answers a request that the host does not need. Returns false if the host needs the request.
    fn answer(&self, request: &[u8]) -> bool {
        let mut locks = self.locks();
        if locks.is_denied(request) {
            self.fail(id(request), libc::EIO);
            return true;
        }
        // `release_flags` of `struct fuse_release_in`.
        let flags = || number(request, REQUEST_HEADER + 12).map_or(0, u32::from_le_bytes);
        let body: &[u8] = match opcode(request) {
            OPEN => &OPENED,
            FLUSH if !locks.closed(request) => &[],
            RELEASE if flags() & RELEASE_FLOCK == 0 || !locks.released(request) => &[],
            _ => return false,
        };
        // Ignore the error: the request may have been interrupted.
        let _ = (&self.device).write(&reply(id(request), 0, body));
        true
    }

    /// Handles a signal for the process that made a request. The host ends a wait for a lock; if no
    /// host is connected (`is_attached` is false), the request fails here. The caller holds `link`.
    fn interrupt(&self, interrupt: &[u8], is_attached: bool) {
        let target = number(interrupt, REQUEST_HEADER).map_or(0, u64::from_le_bytes);
        let mut pending = self.pending();
        let Some(request) = pending.get_mut(&target) else {
            return;
        };
        request.is_interrupted = true;
        if !is_attached && opcode(&request.message) == SETLKW {
            pending.remove(&target);
            self.fail(target, libc::EINTR);
        }
    }

    /// Lets a request fail.
    fn fail(&self, id: u64, errno: i32) {
        // Ignore the error: the request may have been interrupted.
        let _ = (&self.device).write_all(&reply(id, -errno, &[]));
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
        // The requests are repeated on a thread of their own: the host may have to send replies
        // before it accepts all requests.
        let this = self.clone();
        let thread = std::thread::Builder::new().name("volume".to_owned());
        let thread = thread.stack_size(super::STACK_BYTES);
        let repeating = thread.spawn(move || this.repeat(generation, &unanswered));
        if repeating.is_ok() {
            // An error ends the stream like its normal end.
            let _ = self.pass_each(&reader, generation);
        }
        // The shutdown also ends a write that waits for the host.
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
                self.fail(*id, libc::EIO);
            }
        }
        Ok(())
    }

    /// Makes `stream` the stream of the mount. Returns its generation, and the ids of the
    /// unanswered requests, each with whether an earlier stream has carried the request. Reclaims
    /// (requests for the locks that the guest already holds) precede all other requests.
    fn attach(&self, stream: UnixStream, server: u64) -> (u64, Vec<(u64, bool)>) {
        let mut link = self.link();
        if let Some(previous) = link.stream.replace(stream) {
            let _ = previous.shutdown(Shutdown::Both);
        }
        link.server = server;
        link.generation += 1;
        link.is_lost = false;
        let mut locks = self.locks();
        let reclaims = locks.reclaim(link.generation);
        if let Some(stream) = &mut link.stream {
            // There are at most 1,024 locks, and their messages fit into the buffers of the stream.
            // The thread that passes replies notices a failure.
            let _ = stream.write_all(&reclaims);
        }
        self.attached.notify_all();
        // `locks` is still held. A concurrent reply of the previous stream is therefore recorded
        // either before the reclaims and this list are created, or after both.
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
            let request = self
                .pending()
                .get(id)
                .map(|request| (request.message.clone(), request.is_interrupted));
            let Some((message, is_interrupted)) = request else {
                continue;
            };
            let errno = match opcode(&message) {
                // The host has lost the interrupt.
                SETLKW if is_interrupted => Some(libc::EINTR),
                _ if *was_sent && !is_repeatable(&message) => Some(libc::EIO),
                _ => None,
            };
            if let Some(errno) = errno {
                self.pending().remove(id);
                self.fail(*id, errno);
                continue;
            }
            let mut link = self.link();
            if link.generation != generation {
                return;
            }
            if let Some(stream) = &mut link.stream {
                // Ignore the error: the request remains pending and is repeated on the next stream.
                let _ = stream.write_all(&message);
            }
        }
    }

    /// Reads the replies of the host from `stream`, and passes each to the kernel or to a waiting
    /// task of the agent. A message starts with its length in 4 bytes. Returns when the stream ends
    /// or fails.
    fn pass_each(self: &Arc<Self>, mut stream: &UnixStream, generation: u64) -> io::Result<()> {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let mut length = [0; 4];
            stream.read_exact(&mut length)?;
            let total = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
            let message = buffer.get_mut(..total).filter(|_| total >= REPLY_HEADER);
            let message = message.ok_or(io::ErrorKind::InvalidData)?;
            let (start, rest) = message.split_at_mut(length.len());
            start.copy_from_slice(&length);
            stream.read_exact(rest)?;
            let message = &*message;
            match self.receiver(message, generation) {
                Receiver::Kernel => {
                    // Ignore the error: the request may have been interrupted, or failed before.
                    let _ = (&self.device).write(message);
                }
                Receiver::KernelAfterDrop(node) => self.deliver(Grant {
                    node,
                    reply: message.to_vec(),
                }),
                Receiver::Agent => {}
            }
        }
    }

    /// Removes the request of a reply, and records its effect on locks before the process of the
    /// guest continues. Returns the receiver of the reply.
    fn receiver(&self, reply: &[u8], generation: u64) -> Receiver {
        let mut locks = self.locks();
        if locks.reclaimed(id(reply), error(reply), generation) {
            return Receiver::Agent;
        }
        let mut pending = self.pending();
        let Some(request) = pending.remove(&id(reply)) else {
            return Receiver::Kernel;
        };
        if !locks.replied(&request.message, error(reply), generation) {
            // The stream has ended, and the lock with it. The next stream repeats the request.
            pending.insert(id(reply), request);
            return Receiver::Agent;
        }
        // `flags` of `struct fuse_init_out`, after the version and `max_readahead`.
        let flags = number(reply, REPLY_HEADER + 12).map_or(0, u32::from_le_bytes);
        if opcode(&request.message) == INIT && flags & LOCK_FLAGS == LOCK_FLAGS {
            self.has_locks.store(true, Ordering::Relaxed);
        }
        match locked_node(&request.message) {
            Some(node) if error(reply) == 0 => Receiver::KernelAfterDrop(node),
            _ => Receiver::Kernel,
        }
    }

    /// Delivers a lock after the kernel has dropped the cached content of the file: the former
    /// holder of the lock, in another sandbox, may have changed the file. A thread of its own does
    /// this, because the kernel waits for reads of the file that are in progress, and the calling
    /// thread passes their replies.
    fn deliver(self: &Arc<Self>, grant: Grant) {
        let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = grants.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Grant>();
            // The thread ends with the mount.
            let this = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name("volume".to_owned());
            let thread = thread.stack_size(super::STACK_BYTES);
            // Without a thread, the channel is closed, which is noticed below.
            let _ = thread.spawn(move || {
                for grant in receiver {
                    let Some(this) = this.upgrade() else { return };
                    // Ignore both errors: the kernel may have forgotten the file or the request.
                    let _ = (&this.device).write(&drop_content(grant.node));
                    let _ = (&this.device).write(&grant.reply);
                }
            });
            sender
        });
        if let Err(e) = sender.send(grant) {
            // The process must not believe that it has current content.
            self.fail(id(&e.0.reply), libc::EIO);
            *grants = None;
        }
    }
}
