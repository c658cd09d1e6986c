//! `jiffy-vmm` process controlled by a test.
//!
//! A *spare* is a VMM process that the daemon starts in advance for the next guest.

mod controllers;

use super::files::{FdList, OpenSnapshot, SnapshotTarget, file};
use super::guest_image::GuestImage;
use super::test_fetcher::LazyFiles;
use super::vmm_process::{kvm, spawn, vsock};
use jiffy_proto::agent::HELLO_PORT;
use jiffy_proto::channel::Channel;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::snapshot::{
    AfterSnapshot, CapturedSnapshot, DiskFreeze, LaterPages, MemorySource, PopulateMoment,
    RestoreConfig, SnapshotConfig, SnapshotReport,
};
use jiffy_proto::vm::{DiskConfig, DiskLimits, Event, FdIndex, Request, VmConfig};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::{Duration, Instant};

pub const DISK_BYTES: u64 = 64 << 20;
const COMMAND_PORT: u32 = 5000;
/// Indexes of [`TestVm::status`]: last record, loops of the first thread, and greetings.
pub const LAST_RECORD: usize = 1;
pub const LOOPS: usize = 2;
pub const GREETINGS: usize = 4;
/// Id of all snapshots in these tests.
pub const SNAPSHOT_ID: &str = "next";

pub struct TestVm {
    pub channel: Channel,
    pub child: Child,
    console: ConsoleRing,
    /// Snapshot from which the VM was restored, and the overlay to which it writes.
    pub origin: OpenSnapshot,
    pub overlay: File,
    /// Overlay to which the VM wrote before it was adopted.
    former: Option<File>,
    base: File,
    /// Maximum size of the next snapshots, in bytes.
    pub max_bytes: Option<u64>,
    /// True if the next snapshots are captured.
    pub captures: bool,
    pub disk_only: bool,
    /// Captured snapshot that the VM reported when it was adopted.
    pub captured: Option<Box<CapturedSnapshot>>,
    /// Held open: if it were closed, the guest would send a new greeting.
    pub greeting: Option<UnixStream>,
}

enum RestoreSource<'a> {
    Plain(MemorySource),
    WorkingSet(&'a File),
    /// Mapped, with pages that are copied after a certain moment.
    Populate(&'a File, PopulateMoment),
    Lazy(&'a LazyFiles),
}

impl TestVm {
    pub fn boot(guest: &GuestImage, vcpus: u8, memory_mib: u32, words: &str) -> Self {
        Self::boot_on(file(), guest, vcpus, memory_mib, words)
    }

    /// Boots with the given overlay.
    pub fn boot_on(
        overlay: File,
        guest: &GuestImage,
        vcpus: u8,
        memory_mib: u32,
        words: &str,
    ) -> Self {
        let (channel, child) = spawn();
        let console = ConsoleRing::create().unwrap();
        let (kvm, base) = (kvm(), file());
        base.set_len(DISK_BYTES).unwrap();
        let kernel = File::open(&guest.kernel).unwrap();
        let initrd = File::open(&guest.initrd).unwrap();
        let mut fds = FdList(Vec::new());
        let config = VmConfig {
            vcpus,
            memory_mib,
            kvm: fds.add(&kvm),
            kernel: fds.add(&kernel),
            initrd: Some(fds.add(&initrd)),
            cmdline: format!(
                "console=ttyS0 quiet loglevel=3 panic=-1 reboot=k noreplace-smp transparent_hugepage=always rdinit=/init {words}"
            ),
            disks: vec![DiskConfig::Overlay {
                base: fds.add(&base),
                overlay: fds.add(&overlay),
            }],
            disk_limits: DiskLimits::default(),
            vsock: Some(vsock()),
            net: None,
            rng: true,
            balloon: true,
            cpu_level: jiffy_proto::cpu_level::CpuLevel::default(),
            console: {
                fds.0.push(console.fd());
                FdIndex(u8::try_from(fds.0.len() - 1).unwrap())
            },
        };
        channel
            .send(&Request::Start(Box::new(config)), &fds.0)
            .unwrap();
        drop(fds);
        let vm = Self {
            channel,
            child,
            console,
            origin: OpenSnapshot::default(),
            overlay,
            former: None,
            max_bytes: None,
            captures: false,
            disk_only: false,
            captured: None,
            base,
            greeting: None,
        };
        vm.wait_until_greeted()
    }

    pub fn restore(snapshot: OpenSnapshot, base: &File, source: MemorySource) -> Self {
        Self::start_from(snapshot, base, source).wait_until_greeted()
    }

    /// Restores and reads the chunks of `set`, an index, before the start.
    pub fn restore_with(snapshot: OpenSnapshot, base: &File, set: &File) -> Self {
        Self::start(snapshot, base, RestoreSource::WorkingSet(set)).wait_until_greeted()
    }

    /// Restores with `pages`, an index, which are copied after a certain moment.
    pub fn restore_populating(
        snapshot: OpenSnapshot,
        base: &File,
        pages: &File,
        from: PopulateMoment,
    ) -> Self {
        Self::start(snapshot, base, RestoreSource::Populate(pages, from)).wait_until_greeted()
    }

    fn wait_until_greeted(mut self) -> Self {
        self.wait_for_hello();
        self
    }

    /// Same as `restore`, without waiting for the guest.
    pub fn start_from(snapshot: OpenSnapshot, base: &File, source: MemorySource) -> Self {
        Self::start(snapshot, base, RestoreSource::Plain(source))
    }

    /// Restores from incomplete layers, without waiting for the guest.
    pub fn start_lazily(snapshot: OpenSnapshot, base: &File, lazy: &LazyFiles) -> Self {
        Self::start(snapshot, base, RestoreSource::Lazy(lazy))
    }

    fn start(snapshot: OpenSnapshot, base: &File, source: RestoreSource<'_>) -> Self {
        let (channel, child) = spawn();
        if matches!(source, RestoreSource::Plain(MemorySource::Map)) {
            // Like a spare process of the daemon, before its guest is known.
            let kvm = kvm();
            let prepare = Request::Prepare {
                kvm: FdIndex(0),
                // Size of most guests in these tests.
                memory_mib: 256,
            };
            channel.send(&prepare, &[kvm.as_fd()]).unwrap();
        }
        let console = ConsoleRing::create().unwrap();
        let (kvm, overlay) = (kvm(), file());
        let base = base.try_clone().unwrap();
        let mut fds = FdList(Vec::new());
        let config = RestoreConfig {
            kvm: fds.add(&kvm),
            state: fds.add(snapshot.state.as_ref().unwrap()),
            memory: fds.layers(&snapshot.memory),
            source: match source {
                RestoreSource::Plain(source) => source,
                RestoreSource::Lazy(_) | RestoreSource::Populate(..) => MemorySource::Map,
                RestoreSource::WorkingSet(set) => MemorySource::Copy {
                    working_set: Some(fds.add(set)),
                },
            },
            populate: None,
            populate_later: match source {
                RestoreSource::Populate(pages, from) => Some(LaterPages {
                    pages: fds.add(pages),
                    from,
                }),
                _ => None,
            },
            disks: vec![DiskConfig::Layered {
                base: fds.add(&base),
                layers: fds.layers(&snapshot.disk),
                overlay: fds.add(&overlay),
            }],
            disk_limits: DiskLimits::default(),
            vsock: Some(vsock()),
            net: None,
            console: {
                fds.0.push(console.fd());
                FdIndex(u8::try_from(fds.0.len() - 1).unwrap())
            },
            paused: false,
            lazy: match source {
                RestoreSource::Lazy(lazy) => Some(lazy.config(&mut fds)),
                _ => None,
            },
        };
        channel
            .send(&Request::Restore(Box::new(config)), &fds.0)
            .unwrap();
        drop(fds);
        Self {
            channel,
            child,
            console,
            origin: snapshot,
            overlay,
            former: None,
            max_bytes: None,
            captures: false,
            disk_only: false,
            captured: None,
            base,
            greeting: None,
        }
    }

    pub fn base(&self) -> File {
        self.base.try_clone().unwrap()
    }

    pub fn console(&self) -> String {
        String::from_utf8_lossy(&self.console.tail()).into_owned()
    }

    /// Returns the next event, within 30 s.
    pub fn event(&self) -> (Event, Vec<OwnedFd>) {
        let mut poll = libc::pollfd {
            fd: self.channel.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd, which exists during the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 30_000) };
        assert_eq!(
            ready,
            1,
            "no event within 30 s; console: {}",
            self.console()
        );
        self.channel.recv().unwrap()
    }

    /// Waits for an event that `pick` accepts. Any other event fails the test.
    pub fn wait<T>(&mut self, mut pick: impl FnMut(Event) -> Result<T, Event>) -> T {
        loop {
            let (event, fds) = self.event();
            if let Event::GuestConnect { port: HELLO_PORT } = event {
                let stream = UnixStream::from(fds.into_iter().next().unwrap());
                self.answer_hello(stream);
                continue;
            }
            match pick(event) {
                Ok(value) => return value,
                Err(Event::Started(_)) => {}
                Err(other) => panic!("{other:?}; console: {}", self.console()),
            }
        }
    }

    pub fn wait_for_hello(&mut self) {
        while self.greeting.is_none() {
            match self.event() {
                (Event::GuestConnect { port: HELLO_PORT }, fds) => {
                    self.answer_hello(UnixStream::from(fds.into_iter().next().unwrap()));
                }
                (Event::Started(_), _) => {}
                (other, _) => panic!("{other:?}; console: {}", self.console()),
            }
        }
    }

    fn answer_hello(&mut self, stream: UnixStream) {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        // A connection that is closed by a snapshot is followed by another.
        if reader.read_line(&mut line).is_err() || line.is_empty() {
            return;
        }
        (&stream).write_all(b"{}\n").unwrap();
        line.clear();
        if reader.read_line(&mut line).is_err() || line.is_empty() {
            return;
        }
        self.greeting = Some(stream);
    }

    /// Runs a command in the guest and returns its answer.
    pub fn run_command(&mut self, command: &str) -> String {
        let ours = self.start_command(command);
        let mut line = String::new();
        let result = BufReader::new(ours).read_line(&mut line);
        assert!(
            result.is_ok() && !line.is_empty(),
            "{command}: {result:?}; console: {}",
            self.console()
        );
        line.trim_end().to_owned()
    }

    pub fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let request = Request::Connect { port: COMMAND_PORT };
        self.channel.send(&request, &[theirs.as_fd()]).unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        ours
    }

    pub fn start_command(&self, command: &str) -> UnixStream {
        let ours = self.connect();
        writeln!(&ours, "{command}").unwrap();
        ours
    }

    /// Returns five numbers: failures, the sequence number of the last record written, loops of
    /// each of two computing threads, and greetings.
    pub fn status(&mut self) -> Vec<u64> {
        let words = self.run_command("status");
        words.split(' ').map(|w| w.parse().unwrap()).collect()
    }

    /// Asserts that the guest's own checks succeed and that it makes progress.
    pub fn verify(&mut self) {
        let answer = self.run_command("verify");
        assert!(
            answer.starts_with("verified"),
            "{answer}; console: {}",
            self.console()
        );
        let before = self.status();
        assert_eq!(before[0], 0, "{}", self.console());
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            let now = self.status();
            if now[LAST_RECORD] > before[LAST_RECORD] && now[LOOPS] > before[LOOPS] {
                break;
            }
            assert!(
                Instant::now() < limit,
                "the guest makes no progress: {now:?}"
            );
        }
    }

    /// Returns the index of present chunks, and their number.
    pub fn working_set(&mut self) -> (File, u64) {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.child.id())).unwrap();
        let (set, written) = (file(), file());
        let mut fds = FdList(Vec::new());
        let request = Request::WorkingSet {
            index: fds.add(&set),
            pagemap: fds.add(&pagemap),
            written: fds.add(&written),
        };
        self.channel.send(&request, &fds.0).unwrap();
        drop(fds);
        let chunks = self.wait(|event| match event {
            Event::WorkingSet { chunks } => Ok(chunks.unwrap()),
            other => Err(other),
        });
        (set, chunks)
    }

    pub fn send(&self, request: &Request) {
        self.channel.send(request, &[]).unwrap();
    }

    pub fn pause(&mut self) -> u64 {
        self.send(&Request::Pause);
        self.wait(|event| match event {
            Event::Paused { stopped_us } => Ok(stopped_us),
            other => Err(other),
        })
    }

    pub fn resume(&mut self) {
        self.send(&Request::Resume);
        self.wait(|event| match event {
            Event::Resumed => Ok(()),
            other => Err(other),
        });
    }

    /// Requests a snapshot, without waiting for its completion.
    pub fn request_snapshot(&self, target: &SnapshotTarget, then: AfterSnapshot) {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.child.id())).unwrap();
        let mut fds = FdList(Vec::new());
        let config = SnapshotConfig {
            id: SNAPSHOT_ID.to_owned(),
            state: fds.add(&target.state),
            memory: fds.add(&target.memory),
            disk_only: self.disk_only,
            direct: target.direct.as_ref().map(|file| fds.add(file)),
            index: fds.add(&target.index),
            pagemap: Some(fds.add(&pagemap)),
            working_set: target.working_set.as_ref().map(|file| fds.add(file)),
            disks: vec![DiskFreeze {
                overlay: fds.add(&target.overlay),
                index: fds.add(&target.disk_index),
            }],
            then,
            max_bytes: self.max_bytes,
            captured: self.captures,
        };
        let request = Request::Snapshot(config);
        self.channel.send(&request, &fds.0).unwrap();
    }

    /// Starts a snapshot to `target` and waits until it is captured.
    pub fn capture(&mut self, target: &SnapshotTarget) {
        self.captures = true;
        self.request_snapshot(target, AfterSnapshot::Resume);
        self.captures = false;
        self.wait(|event| match event {
            Event::Captured { .. } => Ok(()),
            other => Err(other),
        });
    }

    /// Waits for the result of the requested snapshot.
    pub fn outcome(&mut self) -> Result<SnapshotReport, String> {
        self.wait(|event| match event {
            Event::Snapshotted(report) => Ok(Ok(report)),
            Event::SnapshotFailed { reason, .. } => Ok(Err(reason)),
            other => Err(other),
        })
    }

    pub fn snapshot_to(
        &mut self,
        target: SnapshotTarget,
        then: AfterSnapshot,
    ) -> Result<OpenSnapshot, String> {
        self.request_snapshot(&target, then);
        self.finish_snapshot(target)
    }

    /// Waits for the requested snapshot. The VM then writes to the overlay of `target`.
    pub fn finish_snapshot(&mut self, target: SnapshotTarget) -> Result<OpenSnapshot, String> {
        let report = self.outcome()?;
        let mut snapshot = self.origin.share();
        snapshot.state = Some(target.state);
        snapshot.memory.push((target.memory, target.index));
        let frozen = std::mem::replace(&mut self.overlay, target.overlay);
        snapshot.disk.push((frozen, target.disk_index));
        snapshot.report = report;
        self.origin = snapshot.share();
        Ok(snapshot)
    }

    /// Asserts that a VM restored from `snapshot` has these marks (the word in memory and the word
    /// on the disk), and verifies it.
    pub fn assert_restores(&self, snapshot: OpenSnapshot, marks: &str) {
        let mut restored = Self::restore(snapshot, &self.base(), MemorySource::Map);
        assert_eq!(restored.run_command("marks"), marks);
        restored.verify();
    }

    /// Asserts that the VM continues as if no snapshot had been taken, and that its next snapshot
    /// is complete.
    pub fn assert_no_snapshot_left(&mut self) {
        assert_eq!(self.run_command("mark two"), "ok");
        self.verify();
        let snapshot = self.snapshot(AfterSnapshot::Resume);
        assert_eq!(snapshot.memory.len(), 1);
        self.assert_restores(snapshot, "two two");
    }

    pub fn snapshot(&mut self, then: AfterSnapshot) -> OpenSnapshot {
        self.snapshot_to(SnapshotTarget::new(), then).unwrap()
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}
