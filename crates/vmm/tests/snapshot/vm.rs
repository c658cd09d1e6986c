//! A `jiffy-vmm` process, driven as the host drives it.

use super::guest::Guest;
use jiffy_proto::agent::HELLO_PORT;
use jiffy_proto::channel::Channel;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::snapshot::{
    AfterSnapshot, DiskFreeze, LayerFiles, MemorySource, RestoreConfig, SnapshotConfig,
    SnapshotReport,
};
use jiffy_proto::vm::{
    CONTROL_FD, DiskConfig, DiskLimits, Event, FdIndex, PROTOCOL, Request, VmConfig, VsockConfig,
};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

pub const DISK: u64 = 64 << 20;
const COMMAND_PORT: u32 = 5000;

pub fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// A snapshot: open files, oldest layer first.
#[derive(Default)]
pub struct Snapshot {
    pub state: Option<File>,
    pub memory: Vec<(File, File)>,
    pub disk: Vec<(File, File)>,
    pub report: SnapshotReport,
}

impl Snapshot {
    pub fn share(&self) -> Self {
        let copy = |list: &[(File, File)]| {
            let copy = |f: &File| f.try_clone().unwrap();
            list.iter().map(|(a, b)| (copy(a), copy(b))).collect()
        };
        Self {
            state: self.state.as_ref().map(|f| f.try_clone().unwrap()),
            memory: copy(&self.memory),
            disk: copy(&self.disk),
            report: self.report.clone(),
        }
    }
}

/// What a snapshot is written to.
pub struct Target {
    pub state: File,
    pub memory: File,
    /// `memory` past the page cache.
    pub direct: Option<File>,
    pub index: File,
    pub overlay: File,
    pub disk_index: File,
}

impl Target {
    pub fn new() -> Self {
        Self::to(file())
    }

    /// Files of which the one for memory is given.
    pub fn to(memory: File) -> Self {
        let mut direct = File::options();
        direct.write(true).custom_flags(libc::O_DIRECT);
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        Self {
            state: file(),
            direct: direct.open(path).ok(),
            memory,
            index: file(),
            overlay: file(),
            disk_index: file(),
        }
    }
}

pub struct Vm {
    channel: Channel,
    pub child: Child,
    console: ConsoleRing,
    /// What it was restored from, and where it writes now.
    origin: Snapshot,
    overlay: File,
    /// Where it wrote before it was adopted.
    former: Option<File>,
    base: File,
    /// Most bytes of its next snapshots.
    pub max_bytes: Option<u64>,
    /// Held: its closing tells the guest to greet again.
    greeting: Option<UnixStream>,
}

enum Source<'a> {
    Plain(MemorySource),
    WorkingSet(&'a File),
}

struct Fds<'a>(Vec<BorrowedFd<'a>>);

impl<'a> Fds<'a> {
    fn add(&mut self, fd: &'a impl AsFd) -> FdIndex {
        self.0.push(fd.as_fd());
        FdIndex(u8::try_from(self.0.len() - 1).unwrap())
    }

    fn layers(&mut self, list: &'a [(File, File)]) -> Vec<LayerFiles> {
        list.iter()
            .map(|(file, index)| LayerFiles {
                file: self.add(file),
                index: self.add(index),
            })
            .collect()
    }
}

fn kvm() -> File {
    let device = File::options().read(true).write(true).open("/dev/kvm");
    device.unwrap()
}

fn spawn() -> (Channel, Child) {
    let (channel, theirs) = Channel::pair().unwrap();
    let raw = theirs.as_raw_fd();
    let program = env!("CARGO_BIN_EXE_jiffy-vmm");
    let mut command = Command::new(program);
    // SAFETY: only system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            if raw == CONTROL_FD {
                libc::fcntl(raw, libc::F_SETFD, 0);
            } else {
                libc::dup2(raw, CONTROL_FD);
            }
            Ok(())
        })
    };
    let child = command.spawn().unwrap();
    (channel, child)
}

fn vsock() -> VsockConfig {
    VsockConfig {
        guest_cid: 3,
        host_ports: vec![HELLO_PORT],
    }
}

impl Vm {
    pub fn boot(guest: &Guest, vcpus: u8, memory_mib: u32, words: &str) -> Self {
        Self::boot_on(file(), guest, vcpus, memory_mib, words)
    }

    /// The same with the file that takes what the guest writes.
    pub fn boot_on(overlay: File, guest: &Guest, vcpus: u8, memory_mib: u32, words: &str) -> Self {
        let (channel, child) = spawn();
        let console = ConsoleRing::create().unwrap();
        let (kvm, base) = (kvm(), file());
        base.set_len(DISK).unwrap();
        let kernel = File::open(&guest.kernel).unwrap();
        let initrd = File::open(&guest.initrd).unwrap();
        let mut fds = Fds(Vec::new());
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
            console: {
                fds.0.push(console.fd());
                FdIndex(u8::try_from(fds.0.len() - 1).unwrap())
            },
        };
        channel
            .send(&Request::Start(Box::new(config)), &fds.0)
            .unwrap();
        drop(fds);
        let mut vm = Self {
            channel,
            child,
            console,
            origin: Snapshot::default(),
            overlay,
            former: None,
            max_bytes: None,
            base,
            greeting: None,
        };
        vm.greet();
        vm
    }

    pub fn restore(snapshot: Snapshot, base: &File, source: MemorySource) -> Self {
        let mut vm = Self::start_from(snapshot, base, source);
        vm.greet();
        vm
    }

    /// Restores with the chunks of `set`, an index, read at once.
    pub fn restore_with(snapshot: Snapshot, base: &File, set: &File) -> Self {
        let mut vm = Self::start(snapshot, base, Source::WorkingSet(set));
        vm.greet();
        vm
    }

    /// As `restore`, without waiting for the guest.
    pub fn start_from(snapshot: Snapshot, base: &File, source: MemorySource) -> Self {
        Self::start(snapshot, base, Source::Plain(source))
    }

    fn start(snapshot: Snapshot, base: &File, source: Source<'_>) -> Self {
        let (channel, child) = spawn();
        let console = ConsoleRing::create().unwrap();
        let (kvm, overlay) = (kvm(), file());
        let base = base.try_clone().unwrap();
        let mut fds = Fds(Vec::new());
        let config = RestoreConfig {
            kvm: fds.add(&kvm),
            state: fds.add(snapshot.state.as_ref().unwrap()),
            memory: fds.layers(&snapshot.memory),
            source: match source {
                Source::Plain(source) => source,
                Source::WorkingSet(set) => MemorySource::Copy {
                    working_set: Some(fds.add(set)),
                },
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

    /// The next event within a limit.
    pub fn event(&self) -> (Event, Vec<OwnedFd>) {
        let mut poll = libc::pollfd {
            fd: self.channel.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd, for the time of the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 30_000) };
        assert_eq!(
            ready,
            1,
            "no event within 30 s; console: {}",
            self.console()
        );
        self.channel.recv().unwrap()
    }

    /// Waits for an event that `pick` takes; a stop or a device failure is none that anybody waits for.
    pub fn wait<T>(&mut self, mut pick: impl FnMut(Event) -> Result<T, Event>) -> T {
        loop {
            let (event, fds) = self.event();
            if let Event::GuestConnect { port: HELLO_PORT } = event {
                let stream = UnixStream::from(fds.into_iter().next().unwrap());
                self.answer(stream);
                continue;
            }
            match pick(event) {
                Ok(value) => return value,
                Err(Event::Started(_)) => {}
                Err(other) => panic!("{other:?}; console: {}", self.console()),
            }
        }
    }

    fn greet(&mut self) {
        while self.greeting.is_none() {
            match self.event() {
                (Event::GuestConnect { port: HELLO_PORT }, fds) => {
                    self.answer(UnixStream::from(fds.into_iter().next().unwrap()));
                }
                (Event::Started(_), _) => {}
                (other, _) => panic!("{other:?}; console: {}", self.console()),
            }
        }
    }

    /// Makes the VM outlive its controller. Later ones arrive at `path`.
    pub fn keep(&mut self, path: &Path) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let request = Request::Keep {
            listener: FdIndex(0),
            log: None,
            greeting: Some(FdIndex(1)),
        };
        let greeting = self.greeting.take().unwrap();
        let fds = [listener.as_fd(), greeting.as_fd()];
        self.channel.send(&request, &fds).unwrap();
        self.wait(|event| match event {
            Event::Kept => Ok(()),
            other => Err(other),
        });
    }

    /// Leaves the VM alone.
    pub fn desert(&mut self) {
        self.channel = Channel::pair().unwrap().0;
    }

    /// Comes back as another controller: whether the guest runs, and the snapshot that is undecided. Takes over what the VM has.
    pub fn adopt(&mut self, path: &Path) -> (bool, Option<String>) {
        let flags = SockFlag::SOCK_CLOEXEC;
        let next = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        connect(next.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        self.channel = Channel::new(next);
        self.former = Some(self.overlay.try_clone().unwrap());
        self.recall()
    }

    fn recall(&mut self) -> (bool, Option<String>) {
        self.send(&Request::Recall);
        loop {
            match self.event() {
                (
                    Event::Recalled {
                        protocol: PROTOCOL,
                        running,
                        undecided,
                        console: FdIndex(0),
                        overlays,
                    },
                    mut fds,
                ) => {
                    assert_eq!(overlays, [FdIndex(1)]);
                    self.overlay = File::from(fds.pop().unwrap());
                    self.console = ConsoleRing::open(fds.pop().unwrap()).unwrap();
                    return (running, undecided);
                }
                // What its former controller asked for.
                (Event::SnapshotFailed { .. }, _) => {}
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    /// The snapshot to `target` of an earlier controller is what the VM lies on now.
    pub fn took(&mut self, target: Target) {
        self.origin.state = Some(target.state);
        self.origin.memory.push((target.memory, target.index));
        let frozen = self.former.take().unwrap();
        self.origin.disk.push((frozen, target.disk_index));
    }

    /// Says whether the last snapshot happened.
    pub fn settle(&mut self, happened: bool) {
        self.send(&Request::Settle { happened });
        let failure = self.wait(|event| match event {
            Event::Settled { failure } => Ok(failure),
            other => Err(other),
        });
        assert_eq!(failure, None);
        assert_eq!(self.recall().1, None);
    }

    fn answer(&mut self, stream: UnixStream) {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        // A connection that a snapshot cut is followed by another.
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

    /// Sends a command to the guest and returns its answer.
    pub fn ask(&mut self, command: &str) -> String {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let request = Request::Connect { port: COMMAND_PORT };
        self.channel.send(&request, &[theirs.as_fd()]).unwrap();
        drop(theirs);
        ours.set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        (&ours)
            .write_all(format!("{command}\n").as_bytes())
            .unwrap();
        let mut line = String::new();
        let result = BufReader::new(ours).read_line(&mut line);
        assert!(
            result.is_ok() && !line.is_empty(),
            "{command}: {result:?}; console: {}",
            self.console()
        );
        line.trim_end().to_owned()
    }

    /// (failures, sequence, loops of two computers, greetings)
    pub fn status(&mut self) -> Vec<u64> {
        let words = self.ask("status");
        words.split(' ').map(|w| w.parse().unwrap()).collect()
    }

    /// Fails unless everything the guest knows of is as it must be, and goes on.
    pub fn verify(&mut self) {
        let answer = self.ask("verify");
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
            if now[1] > before[1] && now[2] > before[2] {
                break;
            }
            assert!(Instant::now() < limit, "the guest stands still: {now:?}");
        }
    }

    /// The chunks that are present, as an index, and their number.
    pub fn working_set(&mut self) -> (File, u64) {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.child.id())).unwrap();
        let set = file();
        let mut fds = Fds(Vec::new());
        let request = Request::WorkingSet {
            index: fds.add(&set),
            pagemap: fds.add(&pagemap),
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

    pub fn ask_snapshot(&self, target: &Target, then: AfterSnapshot) {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.child.id())).unwrap();
        let mut fds = Fds(Vec::new());
        let config = SnapshotConfig {
            id: "next".to_owned(),
            state: fds.add(&target.state),
            memory: fds.add(&target.memory),
            direct: target.direct.as_ref().map(|file| fds.add(file)),
            index: fds.add(&target.index),
            pagemap: Some(fds.add(&pagemap)),
            disks: vec![DiskFreeze {
                overlay: fds.add(&target.overlay),
                index: fds.add(&target.disk_index),
            }],
            then,
            max_bytes: self.max_bytes,
        };
        self.channel
            .send(&Request::Snapshot(config), &fds.0)
            .unwrap();
    }

    pub fn outcome(&mut self) -> Result<SnapshotReport, String> {
        self.wait(|event| match event {
            Event::Snapshotted(report) => Ok(Ok(report)),
            Event::SnapshotFailed { reason, .. } => Ok(Err(reason)),
            other => Err(other),
        })
    }

    pub fn snapshot_to(&mut self, target: Target, then: AfterSnapshot) -> Result<Snapshot, String> {
        self.ask_snapshot(&target, then);
        self.snapshotted(target)
    }

    /// Waits for the snapshot that was asked for.
    pub fn snapshotted(&mut self, target: Target) -> Result<Snapshot, String> {
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

    pub fn snapshot(&mut self, then: AfterSnapshot) -> Snapshot {
        self.snapshot_to(Target::new(), then).unwrap()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
