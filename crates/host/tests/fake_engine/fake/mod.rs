//! An engine whose guests are a line of text, and whose every step can be made to fail or to hang.
#![allow(dead_code, clippy::unwrap_used)]

use jiffy_engine::{
    AfterSnapshot, BootMode, BootReport, Capabilities, ConnectionLog, ConnectionProtocol,
    ConnectionRecord, ConnectionRecords, Engine, EngineDescription, EngineError, ExitReason, Guest,
    GuestHandle, GuestUsage, KeptGuest, SandboxIdentity, SandboxSize, SnapshotTimes,
    UnassignedGuest, VerifiedSnapshot,
};
use jiffy_host::{
    CreateSpec, HostFigures, HostOptions, HostReader, SandboxSettings, SandboxSource, Sandboxes,
};
use jiffy_proto::agent::SiteSettings;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;

/// An engine beside the default one.
pub const OTHER: &str = "other";

/// A generator that needs no crate and can be repeated (xorshift, Marsaglia 2003).
pub struct Dice(pub u64);

impl Dice {
    pub fn throw(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }

    pub fn pick<'a, T>(&mut self, among: &'a [T]) -> Option<&'a T> {
        (!among.is_empty()).then(|| &among[self.throw(among.len())])
    }
}

/// Running guests, and failures to come.
#[derive(Default)]
pub struct World {
    guests: Mutex<Vec<Arc<Body>>>,
    failing: Mutex<BTreeSet<&'static str>>,
    hanging: Mutex<BTreeSet<&'static str>>,
    /// Seed of how often each step gives way to other tasks; zero: never.
    pub jitter: AtomicU64,
    pub boots: Mutex<usize>,
    pub restores: Mutex<usize>,
    pub version: Mutex<u32>,
    pub learned: Mutex<Vec<String>>,
    /// Rehearsals that began.
    pub rehearsed: Mutex<usize>,
    pub warmed: Mutex<Vec<String>>,
    pub sealed: Mutex<BTreeSet<String>>,
    /// Snapshots that need the files of no other.
    pub merged: Mutex<BTreeSet<String>>,
    /// Count of requests for that.
    pub asked: Mutex<usize>,
    /// Count of its looks for what was not finished.
    pub gc_runs: Mutex<usize>,
    /// Snapshots that were taken with [`OTHER`].
    pub of_other: Mutex<BTreeSet<String>>,
    /// Snapshots whose files it was told to remove.
    pub removed: Mutex<Vec<String>>,
}

/// A guest's inside.
pub struct Body {
    pub sandbox_identity: Mutex<SandboxIdentity>,
    pub memory: Mutex<String>,
    cpu_us: AtomicU64,
    engine: &'static str,
    /// Latest snapshot it lies on, as it sees it.
    pub parent: Mutex<Option<String>>,
    /// Snapshot of it that is complete, or was to be, when its daemon died.
    undecided: Mutex<Option<String>>,
    kept: AtomicBool,
    end: watch::Sender<Option<ExitReason>>,
}

impl World {
    pub fn fail(&self, step: &'static str) {
        self.failing.lock().unwrap().insert(step);
    }

    pub fn hang(&self, step: &'static str) {
        self.hanging.lock().unwrap().insert(step);
    }

    pub fn mend(&self) {
        self.failing.lock().unwrap().clear();
        self.hanging.lock().unwrap().clear();
    }

    async fn step(&self, step: &'static str) -> Result<(), EngineError> {
        let mut dice = Dice(self.jitter.load(Ordering::Relaxed));
        if dice.0 != 0 {
            let times = dice.throw(6);
            self.jitter.store(dice.0, Ordering::Relaxed);
            for _ in 0..times {
                tokio::task::yield_now().await;
            }
        }
        if self.hanging.lock().unwrap().contains(step) {
            std::future::pending::<()>().await;
        }
        if self.failing.lock().unwrap().contains(step) {
            return Err(EngineError::failed(format!("{step} was made to fail")));
        }
        Ok(())
    }

    /// Guests that run, by id; those that wait have none.
    pub fn running(&self) -> Vec<String> {
        let guests = self.guests.lock().unwrap();
        let live = guests.iter().filter(|b| b.end.borrow().is_none());
        live.map(|b| b.sandbox_identity.lock().unwrap().id.clone())
            .collect()
    }

    /// The one running guest of a sandbox.
    pub fn body(&self, id: &str) -> Arc<Body> {
        let guests = self.guests.lock().unwrap();
        let mut found = guests
            .iter()
            .filter(|b| b.end.borrow().is_none() && b.sandbox_identity.lock().unwrap().id == id);
        let body = found.next().unwrap_or_else(|| panic!("{id} does not run"));
        assert!(found.next().is_none(), "{id} runs twice");
        body.clone()
    }

    pub fn write(&self, id: &str, text: &str) {
        *self.body(id).memory.lock().unwrap() = text.to_owned();
    }

    pub fn read(&self, id: &str) -> String {
        self.body(id).memory.lock().unwrap().clone()
    }

    /// A guest that ends by itself.
    pub fn panic_guest(&self, id: &str) {
        let message = "gone".to_owned();
        let end = ExitReason::GuestPanic { message };
        self.body(id).end.send_replace(Some(end));
    }

    fn new_body(&self, engine: &'static str, memory: String) -> Arc<Body> {
        let body = Arc::new(Body {
            engine,
            sandbox_identity: Mutex::default(),
            memory: Mutex::new(memory),
            cpu_us: AtomicU64::default(),
            parent: Mutex::default(),
            undecided: Mutex::default(),
            kept: AtomicBool::default(),
            end: watch::channel(None).0,
        });
        self.guests.lock().unwrap().push(body.clone());
        body
    }
}

pub struct FakeEngine {
    pub world: Arc<World>,
    pub dir: PathBuf,
    writing: Mutex<BTreeSet<String>>,
}

pub struct UnassignedFakeGuest(Arc<World>, Option<Arc<Body>>);
pub struct FakeGuest(Arc<Body>, Arc<World>);

impl Drop for UnassignedFakeGuest {
    fn drop(&mut self) {
        if let Some(body) = self.1.take() {
            body.end.send_replace(Some(ExitReason::Requested));
        }
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        if !self.0.kept.load(Ordering::Relaxed) {
            self.0.end.send_replace(Some(ExitReason::Requested));
        }
    }
}

impl Body {
    fn lives(&self) -> bool {
        self.end.borrow().is_none()
    }

    fn stop(&self) {
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(ExitReason::Requested);
            first
        });
    }
}

impl FakeEngine {
    fn names(&self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let names = fs::read_dir(&self.dir).unwrap().flatten();
        let names = names.map(|e| e.file_name().into_string().unwrap());
        names.filter(|name| wanted(name)).collect()
    }

    /// True if a file is one that this engine is writing.
    fn writes(&self, name: &str) -> bool {
        self.writing.lock().unwrap().contains(name)
    }
}

impl Engine for FakeEngine {
    type Guest = FakeGuest;
    type UnassignedGuest = UnassignedFakeGuest;

    fn engines(&self) -> Vec<EngineDescription> {
        let engine = |name: &str, default, why: Option<&str>| EngineDescription {
            name: name.to_owned(),
            version: None,
            usable: why.is_none(),
            why: why.map(str::to_owned),
            default,
            capabilities: Capabilities {
                snapshot: true,
                rollback: true,
                ..Capabilities::default()
            },
        };
        vec![
            engine("fake", true, Some("it is made up")),
            engine(OTHER, false, None),
            engine("absent", false, Some("it is not there")),
        ]
    }

    async fn fingerprint(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, EngineError> {
        self.world.step("fingerprint").await?;
        let version = *self.world.version.lock().unwrap();
        let engine = engine.unwrap_or_default();
        Ok(format!("{template}{version}m{}{engine}", size.memory_mib))
    }

    async fn boot(
        &self,
        engine: Option<&str>,
        template: &str,
        _: SandboxSize,
    ) -> Result<UnassignedFakeGuest, EngineError> {
        *self.world.boots.lock().unwrap() += 1;
        self.world.step("boot").await?;
        let engine = match engine {
            Some(name) => {
                assert_eq!(name, OTHER);
                OTHER
            }
            None => "fake",
        };
        let body = self.world.new_body(engine, format!("fresh {template}"));
        Ok(UnassignedFakeGuest(self.world.clone(), Some(body)))
    }

    async fn restore(&self, _: &str, id: &str) -> Result<UnassignedFakeGuest, EngineError> {
        *self.world.restores.lock().unwrap() += 1;
        self.world.step("restore").await?;
        let memory = fs::read_to_string(self.dir.join(id)).map_err(EngineError::failed)?;
        let engine = match self.world.of_other.lock().unwrap().contains(id) {
            true => OTHER,
            false => "fake",
        };
        let body = self.world.new_body(engine, memory);
        *body.parent.lock().unwrap() = Some(id.to_owned());
        Ok(UnassignedFakeGuest(self.world.clone(), Some(body)))
    }

    async fn adopt(&self, orphan: &KeptGuest) -> Result<FakeGuest, EngineError> {
        let at: usize = orphan.handle.0.parse().map_err(EngineError::failed)?;
        let body = self.world.guests.lock().unwrap()[at].clone();
        if let Err(e) = self.world.step("adopt").await {
            body.stop();
            return Err(e);
        }
        if !body.lives() {
            return Err(EngineError::failed("it ended"));
        }
        if let Some(id) = body.undecided.lock().unwrap().take()
            && self.snapshots()?.contains(&id)
        {
            *body.parent.lock().unwrap() = Some(id);
        }
        assert_eq!(*body.parent.lock().unwrap(), orphan.snapshot);
        Ok(FakeGuest(body, self.world.clone()))
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        let guests = self.world.guests.lock().unwrap().clone();
        let others = guests.iter().enumerate().filter(|(at, body)| {
            let handle = GuestHandle(at.to_string());
            body.lives() && body.kept.load(Ordering::Relaxed) && !known.contains(&handle)
        });
        Ok(others.map(|(_, body)| body.stop()).count())
    }

    async fn snapshot(
        &self,
        guest: &FakeGuest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
    ) -> Result<SnapshotTimes, EngineError> {
        if let Some(parent) = parent {
            assert!(self.dir.join(parent).exists(), "parent {parent} is gone");
        }
        assert_eq!(guest.0.parent.lock().unwrap().as_deref(), parent);
        let half = format!(".{id}");
        self.writing.lock().unwrap().insert(half.clone());
        fs::write(self.dir.join(half), "half").map_err(EngineError::failed)?;
        *guest.0.undecided.lock().unwrap() = Some(id.to_owned());
        self.world.step("snapshot").await?;
        let memory = guest.0.memory.lock().unwrap().clone();
        let needed = memory.len() as u64;
        if let Some(most) = max_bytes.filter(|most| needed > *most) {
            fs::remove_file(self.dir.join(format!(".{id}"))).unwrap();
            *guest.0.undecided.lock().unwrap() = None;
            return Err(EngineError::SnapshotTooLarge { needed, most });
        }
        fs::write(self.dir.join(id), memory).map_err(EngineError::failed)?;
        if guest.0.engine == OTHER {
            self.world.of_other.lock().unwrap().insert(id.to_owned());
        }
        fs::remove_file(self.dir.join(format!(".{id}"))).unwrap();
        self.world.step("snapshot-named").await?;
        *guest.0.undecided.lock().unwrap() = None;
        *guest.0.parent.lock().unwrap() = Some(id.to_owned());
        if then == AfterSnapshot::Stop {
            guest.stop().await;
        }
        self.world.step("snapshot-complete").await?;
        Ok(SnapshotTimes::default())
    }

    async fn record_working_set(
        &self,
        _: &str,
        id: &str,
        _: &SiteSettings,
    ) -> Result<(), EngineError> {
        self.world.step("learn").await?;
        self.world.learned.lock().unwrap().push(id.to_owned());
        Ok(())
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        assert!(self.dir.join(id).exists(), "{id} is gone");
        self.world.warmed.lock().unwrap().push(id.to_owned());
        Ok(())
    }

    fn write_checksums(&self, id: &str) -> Result<(), EngineError> {
        fs::read(self.dir.join(id)).map_err(EngineError::failed)?;
        self.world.sealed.lock().unwrap().insert(id.to_owned());
        Ok(())
    }

    fn verify(&self, _: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        Err(EngineError::Unsupported {
            engine: "fake",
            what: "verify snapshots",
            instead: Some("the engine microvm"),
        })
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        Ok(self.names(|name| !name.starts_with('.')))
    }

    fn gc(&self) -> Result<usize, EngineError> {
        let left = self.names(|name| name.starts_with('.') && !self.writes(name));
        for name in &left {
            fs::remove_file(self.dir.join(name)).unwrap();
        }
        *self.world.gc_runs.lock().unwrap() += 1;
        Ok(left.len())
    }

    fn is_independent(&self, id: &str) -> bool {
        *self.world.asked.lock().unwrap() += 1;
        self.world.merged.lock().unwrap().contains(id)
    }

    fn snapshot_size(&self, id: &str) -> Option<u64> {
        fs::metadata(self.dir.join(id)).map(|m| m.len()).ok()
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        if self.world.hanging.lock().unwrap().contains("remove") {
            return Err(EngineError::failed("it is in use"));
        }
        self.world.removed.lock().unwrap().push(id.to_owned());
        match fs::remove_file(self.dir.join(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(EngineError::failed(e)),
            _ => Ok(()),
        }
    }
}

impl UnassignedGuest for UnassignedFakeGuest {
    type Guest = FakeGuest;

    fn is_waiting(&self) -> bool {
        self.1.as_ref().is_some_and(|b| b.end.borrow().is_none())
    }

    async fn rehearse(self, _: &SiteSettings) -> Result<Self, EngineError> {
        *self.0.rehearsed.lock().unwrap() += 1;
        self.0.step("rehearse").await?;
        Ok(self)
    }

    async fn assign_identity(
        mut self,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<FakeGuest, EngineError> {
        self.0.step("welcome").await?;
        let body = self.1.take().unwrap();
        *body.sandbox_identity.lock().unwrap() = sandbox_identity.clone();
        Ok(FakeGuest(body, self.0.clone()))
    }
}

impl Guest for FakeGuest {
    fn engine(&self) -> &'static str {
        self.0.engine
    }

    async fn keep(&self) -> Result<GuestHandle, EngineError> {
        self.1.step("keep").await?;
        self.0.kept.store(true, Ordering::Relaxed);
        self.1.step("kept").await?;
        let guests = self.1.guests.lock().unwrap();
        let at = guests.iter().position(|b| Arc::ptr_eq(b, &self.0)).unwrap();
        Ok(GuestHandle(at.to_string()))
    }

    fn report(&self) -> BootReport {
        BootReport {
            mode: BootMode::Cold,
            vmm_us: 0,
            kernel_us: 0,
            init_us: 0,
            agent_us: 0,
            total_us: 0,
        }
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn usage(&self) -> Option<GuestUsage> {
        let cpu_us = self.0.cpu_us.fetch_add(1000, Ordering::Relaxed);
        Some(GuestUsage {
            cpu_us,
            memory_bytes: 3 << 20,
            disk_bytes: Some(8192),
            net_bytes: Some((100, 200)),
        })
    }

    /// Listens and answers 204 to whatever it is sent, unless `answer` fails: then it hangs up.
    async fn connect(&self, _: u32) -> io::Result<UnixStream> {
        let (near, mut far) = UnixStream::pair()?;
        if self.1.step("answer").await.is_ok() {
            tokio::spawn(async move {
                let mut request = [0; 1024];
                let _ = far.read(&mut request).await;
                let _ = far.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
            });
        }
        Ok(near)
    }

    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        Some(Arc::new(Reached))
    }

    async fn ended(&self) -> ExitReason {
        let mut end = self.0.end.subscribe();
        let end = end.wait_for(Option::is_some).await.unwrap();
        end.clone().unwrap()
    }

    fn console_tail(&self) -> String {
        "guest is up\n".to_owned()
    }

    async fn stop(&self) {
        self.0.stop();
        // It is gone; what it left is not.
        let _ = self.1.step("stop").await;
    }
}

/// Every guest reaches one address.
struct Reached;

impl ConnectionLog for Reached {
    fn read(&self) -> ConnectionRecords {
        let connection = ConnectionRecord {
            at_ms: 1_000,
            protocol: ConnectionProtocol::Tcp,
            address: Some([192, 0, 2, 1].into()),
            port: Some(443),
            host: Some("a.example".to_owned()),
            question: None,
            bytes: Some((10, 20)),
            refused: None,
            times: 1,
        };
        ConnectionRecords {
            since_ms: Some(1),
            list: vec![connection],
            ..ConnectionRecords::default()
        }
    }
}

/// A host that is never short of anything.
#[derive(Debug)]
pub struct Plenty;

impl HostReader for Plenty {
    fn read(&self) -> HostFigures {
        HostFigures::default()
    }
}

/// A data directory with a world.
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub world: Arc<World>,
}

impl Bench {
    pub fn new() -> Self {
        Self::in_dir(tempfile::tempdir().unwrap())
    }

    pub fn in_dir(dir: tempfile::TempDir) -> Self {
        fs::create_dir(dir.path().join("snapshots")).unwrap();
        Self {
            dir,
            world: Arc::default(),
        }
    }

    pub async fn open(&self) -> Sandboxes<FakeEngine> {
        self.open_with(HostOptions::default()).await
    }

    /// The first time, when there is nothing to wait for.
    pub fn open_first(&self, options: HostOptions) -> Sandboxes<FakeEngine> {
        let opening = std::pin::pin!(self.open_with(options));
        let mut nobody = std::task::Context::from_waker(std::task::Waker::noop());
        match opening.poll(&mut nobody) {
            std::task::Poll::Ready(host) => host,
            std::task::Poll::Pending => panic!("there was something to wait for"),
        }
    }

    pub async fn open_with(&self, mut options: HostOptions) -> Sandboxes<FakeEngine> {
        // Nothing here depends on what this machine is busy with.
        options.reader.get_or_insert_with(|| Arc::new(Plenty));
        let engine = FakeEngine {
            world: self.world.clone(),
            dir: self.files(),
            writing: Mutex::default(),
        };
        let journal = self.dir.path().join("state.db");
        Sandboxes::open(engine, &journal, options).await.unwrap()
    }

    pub fn files(&self) -> PathBuf {
        Path::join(self.dir.path(), "snapshots")
    }

    /// Snapshot files, finished or not.
    pub fn file_names(&self) -> BTreeSet<String> {
        fs::read_dir(self.files())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// Waits until there are as many files of snapshots.
    pub async fn until_files(&self, count: usize) {
        let what = format!("{count} files, of {:?}", self.file_names());
        until(&what, || self.file_names().len() == count).await;
    }

    /// Runs `work` in a runtime of its own that is then torn down as a killed process is: nothing
    /// in it goes on.
    pub fn doomed<F: Future<Output = ()>>(&self, work: F) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(work);
        // A killed process does nothing any more when the next one starts.
        runtime.shutdown_timeout(std::time::Duration::from_secs(10));
    }
}

/// A sandbox of template `base`.
pub fn base() -> CreateSpec {
    CreateSpec {
        source: SandboxSource::Template("base".into()),
        size: None,
        env: BTreeMap::new(),
        settings: SandboxSettings::default(),
        name: None,
        engine: None,
    }
}

/// Waits until `ready`, at most 10 s.
pub async fn until(what: &str, mut ready: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if ready() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("waited in vain for {what}");
}
