//! Fetcher in the test's process: it copies chunks from complete layers to incomplete layers.
//!
//! A *fetcher* serves the requests of a VMM for chunks of memory that are missing in the layers
//! from which its guest was restored.

use super::files::{FdList, OpenSnapshot, file};
use jiffy_proto::fetch::{FetchAnswer, FetchOutcome, FetchRequest, REQUEST_BYTES};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use jiffy_proto::snapshot::{LazyConfig, LazyLayer};
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect, listen, recv,
    send, socket,
};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// Descriptors for a lazy restore.
pub struct LazyFiles {
    userfaultfd: File,
    listener: OwnedFd,
    present: Vec<File>,
    timeout: Duration,
    dir: TempDir,
}

impl LazyFiles {
    /// Adds the descriptors to `fds`, and returns the configuration of the restore.
    pub fn config<'a>(&'a self, fds: &mut FdList<'a>) -> LazyConfig {
        LazyConfig {
            userfaultfd: fds.add(&self.userfaultfd),
            listener: fds.add(&self.listener),
            layers: (0..)
                .zip(&self.present)
                .map(|(layer, present)| LazyLayer {
                    layer,
                    present: fds.add(present),
                })
                .collect(),
            timeout_ms: u64::try_from(self.timeout.as_millis()).unwrap(),
        }
    }
}

/// Reply to all requests from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// With the chunk, after this time.
    Answer(Duration),
    /// Not at all.
    Silent,
    /// With a failure.
    Fail,
}

/// Store with complete layers, and a cache in which they are incomplete.
pub struct TestStore {
    whole: Vec<File>,
    pub cached: OpenSnapshot,
    mode: (Mutex<Mode>, Condvar),
    /// Number of requests so far.
    pub request_count: AtomicU64,
}

impl TestStore {
    /// Creates a store with `snapshot`, whose memory is not cached.
    pub fn new(snapshot: &OpenSnapshot) -> Arc<Self> {
        let mut cached = snapshot.share();
        let whole = std::mem::take(&mut cached.memory).into_iter();
        let (whole, memory) = whole
            .map(|(whole, index)| {
                let hole = file();
                hole.set_len(whole.metadata().unwrap().len()).unwrap();
                (whole, (hole, index))
            })
            .unzip();
        cached.memory = memory;
        Arc::new(Self {
            whole,
            cached,
            mode: (Mutex::new(Mode::Answer(Duration::ZERO)), Condvar::new()),
            request_count: AtomicU64::new(0),
        })
    }

    /// Sets the mode, also for requests that are waiting.
    pub fn set_mode(&self, mode: Mode) {
        *self.mode.0.lock().unwrap() = mode;
        self.mode.1.notify_all();
    }

    /// Returns the number of stored chunks of all layers.
    pub fn chunks(&self) -> u64 {
        let stored = |(_, index): &(File, File)| read_index(index).stored.count();
        self.cached.memory.iter().map(stored).sum()
    }

    /// Copies one chunk to the cache.
    fn fetch(&self, request: FetchRequest) {
        let layer = usize::try_from(request.layer).unwrap();
        let mut chunk = vec![0; usize::try_from(MEMORY_CHUNK).unwrap()];
        let at = request.chunk * u64::from(MEMORY_CHUNK);
        self.whole[layer].read_exact_at(&mut chunk, at).unwrap();
        self.cached.memory[layer]
            .0
            .write_all_at(&chunk, at)
            .unwrap();
    }

    /// Returns the files for a restore of `snapshot`, whose first layers are in this store. Every
    /// `present`-th chunk of each layer is cached first, or none if `present` is 0.
    pub fn lazy_files(&self, present: u64, timeout: Duration) -> Option<LazyFiles> {
        let userfaultfd = File::open("/dev/userfaultfd").ok()?;
        let dir = tempfile::tempdir().unwrap();
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        let address = UnixAddr::new(&dir.path().join("fetch")).unwrap();
        bind(listener.as_raw_fd(), &address).unwrap();
        listen(&listener, Backlog::new(4).unwrap()).unwrap();
        let sets = (0..).zip(&self.cached.memory).map(|(layer, (_, index))| {
            let mut index = read_index(index);
            for (number, chunk) in (1..).zip(index.stored.clone().iter()) {
                if present != 0 && number % present == 0 {
                    self.fetch(FetchRequest { layer, chunk });
                } else {
                    index.stored.remove(chunk);
                }
            }
            let set = file();
            set.write_all_at(&index.encode(), 0).unwrap();
            set
        });
        Some(LazyFiles {
            userfaultfd,
            listener,
            present: sets.collect(),
            timeout,
            dir,
        })
    }

    /// Serves a VM on a thread until the connection is closed.
    pub fn serve(self: &Arc<Self>, files: &LazyFiles) -> FetcherLink {
        let flags = SockFlag::SOCK_CLOEXEC;
        let link = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        let address = UnixAddr::new(&files.dir.path().join("fetch")).unwrap();
        connect(link.as_raw_fd(), &address).unwrap();
        let link = Arc::new(link);
        let (store, ours) = (self.clone(), link.clone());
        thread::spawn(move || {
            loop {
                let mut message = [0; REQUEST_BYTES];
                let Ok(length @ 1..) = recv(ours.as_raw_fd(), &mut message, MsgFlags::empty())
                else {
                    return;
                };
                let request = FetchRequest::decode(&message[..length]).unwrap();
                store.request_count.fetch_add(1, Ordering::Relaxed);
                let (store, link) = (store.clone(), ours.clone());
                thread::spawn(move || store.answer(request, &link));
            }
        });
        FetcherLink(link)
    }

    /// Answers a request according to the mode. Waits while the mode is [`Mode::Silent`].
    fn answer(&self, request: FetchRequest, link: &OwnedFd) {
        let mode = self.mode.0.lock().unwrap();
        let silent = |mode: &mut Mode| *mode == Mode::Silent;
        let mode = *self.mode.1.wait_while(mode, silent).unwrap();
        let outcome = match mode {
            Mode::Fail => FetchOutcome::Failed("503".to_owned()),
            Mode::Silent => unreachable!(),
            Mode::Answer(delay) => {
                thread::sleep(delay);
                self.fetch(request);
                FetchOutcome::Present
            }
        };
        let answer = FetchAnswer { request, outcome }.encode();
        // Ignore the error: the VM may have exited.
        let _ = send(link.as_raw_fd(), &answer, MsgFlags::MSG_NOSIGNAL);
    }
}

/// Reads the index of a layer.
fn read_index(file: &File) -> LayerIndex {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    LayerIndex::decode_any(&bytes).unwrap()
}

/// Connection between the fetcher and one VM.
pub struct FetcherLink(Arc<OwnedFd>);

impl FetcherLink {
    /// Closes the connection, like a fetcher that exits.
    pub fn cut(&self) {
        // SAFETY: a system call without pointer arguments on an open descriptor.
        unsafe { libc::shutdown(self.0.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

impl Drop for FetcherLink {
    fn drop(&mut self) {
        self.cut();
    }
}
