//! An engine whose guests are a line of text, and whose every step can be made to fail or to hang.
#![allow(dead_code, clippy::unwrap_used)]

use jiffy_engine::{
    AfterSnapshot, Arrival, BootMode, BootReport, Engine, EngineError, Guest, Persona, SandboxEnd,
    SandboxSize, SnapshotTimes,
};
use jiffy_host::{CreateSpec, Options, Sandboxes, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// What runs, and what is to go wrong.
#[derive(Default)]
pub struct World {
    guests: Mutex<Vec<Arc<Body>>>,
    failing: Mutex<BTreeSet<&'static str>>,
    hanging: Mutex<BTreeSet<&'static str>>,
    pub boots: Mutex<usize>,
    pub restores: Mutex<usize>,
    pub version: Mutex<u32>,
}

/// A guest's inside.
pub struct Body {
    pub persona: Mutex<Persona>,
    pub memory: Mutex<String>,
    end: watch::Sender<Option<SandboxEnd>>,
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
        live.map(|b| b.persona.lock().unwrap().id.clone()).collect()
    }

    /// The one running guest of a sandbox.
    pub fn body(&self, id: &str) -> Arc<Body> {
        let guests = self.guests.lock().unwrap();
        let mut found = guests
            .iter()
            .filter(|b| b.end.borrow().is_none() && b.persona.lock().unwrap().id == id);
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
        let end = SandboxEnd::GuestPanic { message };
        self.body(id).end.send_replace(Some(end));
    }

    fn new_body(&self, memory: String) -> Arc<Body> {
        let body = Arc::new(Body {
            persona: Mutex::default(),
            memory: Mutex::new(memory),
            end: watch::channel(None).0,
        });
        self.guests.lock().unwrap().push(body.clone());
        body
    }
}

pub struct FakeEngine {
    pub world: Arc<World>,
    pub dir: PathBuf,
}

pub struct FakeArrival(Arc<World>, Option<Arc<Body>>);
pub struct FakeGuest(Arc<Body>);

impl Drop for FakeArrival {
    fn drop(&mut self) {
        if let Some(body) = self.1.take() {
            body.end.send_replace(Some(SandboxEnd::Requested));
        }
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        self.0.end.send_replace(Some(SandboxEnd::Requested));
    }
}

impl Engine for FakeEngine {
    type Guest = FakeGuest;
    type Arrival = FakeArrival;

    async fn fingerprint(&self, template: &str, size: SandboxSize) -> Result<String, EngineError> {
        self.world.step("fingerprint").await?;
        let version = *self.world.version.lock().unwrap();
        Ok(format!("{template}{version}m{}", size.memory_mib))
    }

    async fn boot(&self, template: &str, _: SandboxSize) -> Result<FakeArrival, EngineError> {
        *self.world.boots.lock().unwrap() += 1;
        self.world.step("boot").await?;
        let body = self.world.new_body(format!("fresh {template}"));
        Ok(FakeArrival(self.world.clone(), Some(body)))
    }

    async fn restore(&self, _: &str, id: &str) -> Result<FakeArrival, EngineError> {
        *self.world.restores.lock().unwrap() += 1;
        self.world.step("restore").await?;
        let memory = fs::read_to_string(self.dir.join(id)).map_err(EngineError::failed)?;
        let body = self.world.new_body(memory);
        Ok(FakeArrival(self.world.clone(), Some(body)))
    }

    async fn snapshot(
        &self,
        guest: &FakeGuest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
    ) -> Result<SnapshotTimes, EngineError> {
        if let Some(parent) = parent {
            assert!(self.dir.join(parent).exists(), "parent {parent} is gone");
        }
        fs::write(self.dir.join(format!(".{id}")), "half").unwrap();
        self.world.step("snapshot").await?;
        let memory = guest.0.memory.lock().unwrap().clone();
        fs::write(self.dir.join(id), memory).unwrap();
        fs::remove_file(self.dir.join(format!(".{id}"))).unwrap();
        if then == AfterSnapshot::Stop {
            guest.stop().await;
        }
        self.world.step("snapshot-complete").await?;
        Ok(SnapshotTimes::default())
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.dir).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.starts_with('.') {
                fs::remove_file(self.dir.join(name)).unwrap();
            } else {
                ids.push(name);
            }
        }
        Ok(ids)
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        fs::remove_file(self.dir.join(id)).map_err(EngineError::failed)
    }
}

impl Arrival for FakeArrival {
    type Guest = FakeGuest;

    fn waits(&self) -> bool {
        self.1.as_ref().is_some_and(|b| b.end.borrow().is_none())
    }

    async fn welcome(mut self, persona: &Persona) -> Result<FakeGuest, EngineError> {
        self.0.step("welcome").await?;
        let body = self.1.take().unwrap();
        *body.persona.lock().unwrap() = persona.clone();
        Ok(FakeGuest(body))
    }
}

impl Guest for FakeGuest {
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

    async fn connect(&self, _: u32) -> io::Result<UnixStream> {
        UnixStream::pair().map(|pair| pair.0)
    }

    async fn ended(&self) -> SandboxEnd {
        let mut end = self.0.end.subscribe();
        let end = end.wait_for(Option::is_some).await.unwrap();
        end.clone().unwrap()
    }

    fn console_tail(&self) -> String {
        String::new()
    }

    async fn stop(&self) {
        self.0.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(SandboxEnd::Requested);
            first
        });
    }
}

/// A data directory with a world.
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub world: Arc<World>,
}

impl Bench {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("snapshots")).unwrap();
        Self {
            dir,
            world: Arc::default(),
        }
    }

    pub fn open(&self) -> Sandboxes<FakeEngine> {
        self.open_with(Options::default())
    }

    pub fn open_with(&self, options: Options) -> Sandboxes<FakeEngine> {
        let engine = FakeEngine {
            world: self.world.clone(),
            dir: self.files(),
        };
        Sandboxes::open(engine, &self.dir.path().join("state.db"), options).unwrap()
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

    /// Runs `work` in a runtime of its own that is then torn down as a killed process is: nothing in it goes on.
    pub fn doomed<F: Future<Output = ()>>(&self, work: F) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(work);
        runtime.shutdown_background();
    }
}

/// A sandbox of template `base`.
pub fn base() -> CreateSpec {
    CreateSpec {
        source: Source::Template("base".into()),
        size: None,
        env: BTreeMap::new(),
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
