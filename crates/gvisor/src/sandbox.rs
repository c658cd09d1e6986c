//! One sandbox: how it comes up, is reached, is written down, and ends.

use crate::error::GvisorError;
use crate::helper::{Helper, HelperRequest, SentrySpec};
use crate::sentry_process::SentryProcess;
use crate::snapshot_store::{GvisorManifest, SnapshotStore};
use jiffy_agent_client::Greeting;
use jiffy_engine::{BootMode, BootReport, ExitReason, GuestUsage, ProcessInstance, SandboxSize};
use jiffy_proto::agent::{
    ENVD_PORT, GVISOR_DISK_MIB, GVISOR_DNS, GVISOR_IMAGES, HELLO_PORT, Hello, Identity, TCP_PORT,
};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder};
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream as BlockingStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::net::UnixStream;

/// Time from asking for a sandbox to its agent's greeting.
const BOOT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to say how a sandbox ended.
const EXIT_STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Most of a console that is shown.
const CONSOLE_TAIL_BYTES: usize = 16 * 1024;
/// Memory that gVisor's kernel needs besides the guest's, in bytes.
const OVERHEAD_BYTES: u64 = 64 << 20;
/// Threads and processes that the kernel and the guest's programs are made of.
const MAX_TASKS: u64 = 4096;

/// Everything that a sandbox is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSpec {
    /// Its id in the helper; as long as all others.
    pub id: String,
    /// EROFS image with the agent.
    pub base: PathBuf,
    /// Images of the root file system, the lowest first.
    pub images: Vec<PathBuf>,
    /// Resources.
    pub size: SandboxSize,
    /// Name under which its snapshots remember what it was made of.
    pub template: String,
    /// Network namespace with its card.
    pub namespace: Option<PathBuf>,
    /// Name servers that it asks.
    pub dns: Vec<IpAddr>,
}

/// A snapshot, and what it is restored onto.
#[derive(Debug, Clone)]
pub struct RestoreSpec {
    /// As it was booted, with another id.
    pub boot: BootSpec,
    /// Manifest of the snapshot.
    pub manifest: GvisorManifest,
}

/// Specification of a sandbox that is to be adopted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptSpec {
    /// As it was booted.
    pub boot: BootSpec,
    /// Mark of its process.
    pub mark: ProcessInstance,
    /// Report of its boot.
    pub report: BootReport,
}

/// State that a sandbox that is coming up and one that is there have in common. Dropping it ends
/// the sandbox, unless it is kept.
#[derive(Debug)]
struct SandboxBody {
    helper: Helper,
    spec: BootSpec,
    directory: PathBuf,
    process: Arc<SentryProcess>,
    kept: AtomicBool,
    /// True once this process ended it.
    stopped: AtomicBool,
    /// It was removed, and nothing is left to do. Held by whoever removes it.
    removed: tokio::sync::Mutex<bool>,
}

impl Drop for SandboxBody {
    fn drop(&mut self) {
        let left = !*self.removed.get_mut();
        // One that somebody began to remove, or that has ended, is not kept any more.
        let over = self.stopped.load(Ordering::Acquire) || self.process.has_ended();
        let kept = self.kept.load(Ordering::Acquire) && !over;
        if kept || !left {
            return;
        }
        self.process.kill();
        self.helper.tell(&self.spec.id, HelperRequest::Destroy);
    }
}

/// A sandbox whose agent has greeted and is nobody yet.
#[derive(Debug)]
pub struct UnassignedSandbox {
    body: SandboxBody,
    greeting: Greeting,
    mode: BootMode,
    asked: Instant,
    /// Microseconds until the process ran, and until the agent greeted.
    made_us: u64,
    greeted_us: u64,
}

/// A sandbox whose agent has answered. Dropping it ends it, unless it is kept.
#[derive(Debug)]
pub struct Sandbox {
    body: SandboxBody,
    report: BootReport,
    /// While it stands the agent knows that somebody is there; one that was adopted knows nobody.
    _greeting: Option<UnixStream>,
    /// One snapshot at a time.
    saving: tokio::sync::Mutex<()>,
}

impl AdoptSpec {
    /// Ends the process that isolates it, without its helper; whether there was one. Must be called
    /// inside a tokio runtime.
    pub fn end(&self) -> bool {
        let process = SentryProcess::watch(self.mark.pid);
        let own = process.ok().filter(|process| process.mark == self.mark);
        own.as_ref().map(SentryProcess::kill).is_some()
    }
}

impl BootSpec {
    /// Returns the environment that the agent is started with.
    fn environment(&self) -> Vec<String> {
        let dns: Vec<String> = self.dns.iter().map(IpAddr::to_string).collect();
        vec![
            format!("{GVISOR_IMAGES}={}", self.images.len()),
            format!("{GVISOR_DISK_MIB}={}", self.size.disk_mib),
            format!("{GVISOR_DNS}={}", dns.join(",")),
        ]
    }
}

fn us(from: Instant) -> u64 {
    u64::try_from(from.elapsed().as_micros()).unwrap_or(u64::MAX)
}

impl SandboxBody {
    /// Has the process made that will isolate the sandbox. If whoever asked does not wait for it
    /// any more it ends.
    async fn make(helper: &Helper, spec: &BootSpec) -> Result<Self, GvisorError> {
        let making = tokio::spawn(Self::make_now(helper.clone(), spec.clone()));
        let made = making.await;
        made.map_err(|e| GvisorError::Process(io::Error::other(e)))?
    }

    async fn make_now(helper: Helper, spec: BootSpec) -> Result<Self, GvisorError> {
        let directory = helper.directory().join(&spec.id);
        DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .map_err(GvisorError::file(&directory))?;
        let sandbox = SentrySpec {
            directory: directory.clone(),
            base: spec.base.clone(),
            images: spec.images.clone(),
            env: spec.environment(),
            namespace: spec.namespace.clone(),
            cgroup: helper
                .limited()
                .then(|| format!("/jiffy-gvisor/{}", spec.id)),
            memory_bytes: u64::from(spec.size.memory_mib) << 20,
            overhead_bytes: OVERHEAD_BYTES,
            vcpus: spec.size.vcpus.into(),
            tasks: MAX_TASKS,
        };
        let made = helper
            .ask(&spec.id, &HelperRequest::Create { sandbox })
            .await;
        let process = match made.and_then(|(reply, _)| SentryProcess::watch(reply.pid)) {
            Ok(process) => process,
            Err(e) => {
                // It may be there all the same: a helper that was killed could not tell. What
                // cannot be removed now keeps its directory, by which the next daemon finds it.
                if let Err(left) = helper.ask(&spec.id, &HelperRequest::Destroy).await {
                    tracing::warn!("removing what sandbox {} left: {left}", spec.id);
                }
                return Err(e);
            }
        };
        Ok(Self {
            helper,
            spec,
            directory,
            process: Arc::new(process),
            kept: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            removed: tokio::sync::Mutex::default(),
        })
    }

    async fn ask(&self, ask: &HelperRequest) -> Result<crate::helper::Reply, GvisorError> {
        Ok(self.helper.ask(&self.spec.id, ask).await?.0)
    }

    /// Opens a stream to `port` of the agent.
    async fn connect(&self, port: u32) -> Result<UnixStream, GvisorError> {
        let known = [HELLO_PORT, ENVD_PORT, TCP_PORT].contains(&port);
        let Some(port) = u16::try_from(port).ok().filter(|_| known) else {
            // As a refused connection reads: its other end goes at once.
            let closed = UnixStream::pair().map(|(stream, _)| stream);
            return closed.map_err(GvisorError::Process);
        };
        let ask = HelperRequest::Connect { port };
        let asked = self.helper.ask(&self.spec.id, &ask);
        let (_, fds) = tokio::time::timeout(CONNECT_TIMEOUT, asked)
            .await
            .map_err(|_| self.late(CONNECT_TIMEOUT))??;
        let fd = fds.into_iter().next();
        let fd = fd.ok_or(GvisorError::Gone("connect to the guest agent"))?;
        let opened = || {
            let stream = BlockingStream::from(fd);
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        };
        opened().map_err(GvisorError::Process)
    }

    /// Hears the agent's greeting.
    async fn greet(&self) -> Result<Greeting, GvisorError> {
        let stream = self.connect(HELLO_PORT).await?;
        let heard = tokio::time::timeout(BOOT_TIMEOUT, Greeting::receive(stream)).await;
        heard
            .map_err(|_| self.late(BOOT_TIMEOUT))?
            .map_err(|source| GvisorError::Greeting {
                source,
                console: self.console_tail(),
            })
    }

    fn late(&self, limit: Duration) -> GvisorError {
        GvisorError::Timeout {
            limit_s: limit.as_secs(),
            console: self.console_tail(),
        }
    }

    fn console_tail(&self) -> String {
        let bytes = fs::read(self.directory.join("console.log")).unwrap_or_default();
        let tail = &bytes[bytes.len().saturating_sub(CONSOLE_TAIL_BYTES)..];
        let clean = |c: char| (c == '\n' || c == '\t' || !c.is_control()).then_some(c);
        String::from_utf8_lossy(tail)
            .chars()
            .filter_map(clean)
            .collect()
    }

    /// Ends it without asking, and returns when nothing is left of it.
    async fn remove(&self) {
        self.stopped.store(true, Ordering::Release);
        let mut removed = self.removed.lock().await;
        if *removed {
            return;
        }
        self.process.kill();
        self.process.ended().await;
        if let Err(e) = self.ask(&HelperRequest::Destroy).await {
            tracing::warn!("removing what sandbox {} left: {e}", self.spec.id);
        }
        *removed = true;
    }

    async fn ended(&self) -> ExitReason {
        self.process.ended().await;
        if self.stopped.load(Ordering::Acquire) {
            return ExitReason::Requested;
        }
        let asked = self.ask(&HelperRequest::Ended);
        let verdict = tokio::time::timeout(EXIT_STATUS_TIMEOUT, asked).await;
        if self.stopped.load(Ordering::Acquire) {
            return ExitReason::Requested;
        }
        match verdict {
            Ok(Ok(reply)) if reply.out_of_memory => ExitReason::GuestOutOfMemory {
                message: format!(
                    "its programs and the files it wrote needed more than {} MiB",
                    self.spec.size.memory_mib
                ),
            },
            Ok(Ok(reply)) if reply.exit.is_some() => ExitReason::GuestReset,
            Ok(Ok(reply)) if reply.signal != 0 => ExitReason::VmmDied {
                status: ExitStatus::from_raw(reply.signal).to_string(),
            },
            _ => ExitReason::VmmDied {
                status: "how is not known; it may have needed more memory than it may use"
                    .to_owned(),
            },
        }
    }
}

impl UnassignedSandbox {
    /// Starts the agent in a new sandbox and returns when it has greeted.
    pub async fn boot(helper: &Helper, spec: &BootSpec) -> Result<Self, GvisorError> {
        let asked = Instant::now();
        let body = SandboxBody::make(helper, spec).await?;
        let made_us = us(asked);
        let started = body.ask(&HelperRequest::Start);
        tokio::time::timeout(BOOT_TIMEOUT, started)
            .await
            .map_err(|_| body.late(BOOT_TIMEOUT))??;
        Self::hear(body, BootMode::Cold, asked, made_us).await
    }

    /// Makes a sandbox of a snapshot and returns when its agent has greeted anew.
    pub async fn restore(
        helper: &Helper,
        store: &SnapshotStore,
        spec: &RestoreSpec,
    ) -> Result<Self, GvisorError> {
        let asked = Instant::now();
        let image = store.path(&spec.manifest.id)?;
        let body = SandboxBody::make(helper, &spec.boot).await?;
        let made_us = us(asked);
        let ask = HelperRequest::Restore { image };
        let restored = body.ask(&ask);
        tokio::time::timeout(BOOT_TIMEOUT, restored)
            .await
            .map_err(|_| body.late(BOOT_TIMEOUT))??;
        Self::hear(body, BootMode::Snapshot, asked, made_us).await
    }

    async fn hear(
        body: SandboxBody,
        mode: BootMode,
        asked: Instant,
        made_us: u64,
    ) -> Result<Self, GvisorError> {
        let greeting = body.greet().await?;
        Ok(Self {
            body,
            greeting,
            mode,
            asked,
            made_us,
            greeted_us: us(asked),
        })
    }

    /// True if it still waits; one that has ended does not.
    pub fn waits(&self) -> bool {
        !self.body.process.has_ended()
    }

    /// Returns its agent's hello.
    pub fn hello(&self) -> &Hello {
        &self.greeting.hello
    }

    /// Tells the agent who it is and returns when that is in force.
    pub async fn welcome(self, identity: &Identity) -> Result<Sandbox, GvisorError> {
        let Self {
            body,
            greeting,
            mode,
            made_us,
            greeted_us,
            asked,
        } = self;
        let welcomed = Instant::now();
        let hello = greeting.hello.clone();
        let answered = tokio::time::timeout(BOOT_TIMEOUT, greeting.answer(identity)).await;
        let (stream, _) = answered
            .map_err(|_| body.late(BOOT_TIMEOUT))?
            .map_err(|source| GvisorError::Greeting {
                source,
                console: body.console_tail(),
            })?;
        let init_us = match mode {
            BootMode::Cold => hello.hello_us.saturating_sub(hello.init_us),
            _ => 0,
        };
        let before = greeted_us.saturating_sub(made_us);
        let report = BootReport {
            mode,
            vmm_us: made_us,
            kernel_us: before.saturating_sub(init_us),
            init_us: init_us.min(before),
            agent_us: us(welcomed),
            total_us: us(asked),
        };
        Ok(Sandbox {
            body,
            report,
            _greeting: Some(stream),
            saving: tokio::sync::Mutex::default(),
        })
    }
}

impl Sandbox {
    /// By what [`Self::adopt`] finds it.
    pub fn adopt_spec(&self) -> AdoptSpec {
        AdoptSpec {
            boot: self.body.spec.clone(),
            mark: self.body.process.mark.clone(),
            report: self.report,
        }
    }

    /// Takes over a sandbox that an earlier process kept. One that cannot be is ended and removed.
    pub async fn adopt(helper: &Helper, spec: AdoptSpec) -> Result<Self, GvisorError> {
        let id = spec.boot.id.clone();
        let adopted = Self::take_over(helper, spec).await;
        if adopted.is_err() {
            helper.tell(&id, HelperRequest::Destroy);
        }
        adopted
    }

    async fn take_over(helper: &Helper, spec: AdoptSpec) -> Result<Self, GvisorError> {
        let process = SentryProcess::watch(spec.mark.pid)?;
        if process.mark != spec.mark {
            return Err(GvisorError::Process(io::ErrorKind::NotFound.into()));
        }
        let body = SandboxBody {
            helper: helper.clone(),
            directory: helper.directory().join(&spec.boot.id),
            process: Arc::new(process),
            kept: AtomicBool::new(true),
            stopped: AtomicBool::new(false),
            removed: tokio::sync::Mutex::default(),
            spec: spec.boot,
        };
        body.ask(&HelperRequest::Load).await?;
        Ok(Self {
            body,
            report: spec.report,
            _greeting: None,
            saving: tokio::sync::Mutex::default(),
        })
    }

    /// Ends all sandboxes in the helper's directory but those of these ids; returns how many there
    /// were.
    pub async fn end_others(helper: &Helper, known: &[String]) -> Result<usize, GvisorError> {
        let mut ended = 0;
        let directory = helper.directory();
        for entry in fs::read_dir(directory)
            .map_err(GvisorError::file(directory))?
            .flatten()
        {
            let name = entry.file_name();
            let Some(id) = name.to_str().filter(|id| is_id(id)) else {
                continue;
            };
            if known.iter().any(|k| k == id) {
                continue;
            }
            match helper.ask(id, &HelperRequest::Destroy).await {
                Ok(_) => ended += 1,
                // Its directory stays, for the next daemon to try it again.
                Err(e) => tracing::warn!("removing what sandbox {id} left: {e}"),
            }
        }
        Ok(ended)
    }

    /// From now on it runs on when this process ends.
    pub async fn keep(&self) -> Result<(), GvisorError> {
        self.body.ask(&HelperRequest::Keep).await?;
        self.body.kept.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the report of its boot.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// The process that isolates it.
    pub fn pid(&self) -> u32 {
        self.body.process.mark.pid
    }

    /// Returns what it takes of its host.
    pub fn usage(&self) -> Option<GuestUsage> {
        Some(GuestUsage {
            cpu_us: self.body.process.cpu_us()?,
            memory_bytes: self.body.process.memory_bytes()?,
            disk_bytes: None,
            net_bytes: None,
        })
    }

    /// Opens a stream to `port` of the agent. A refused connection reads as closed.
    pub fn connect(&self, port: u32) -> impl Future<Output = Result<UnixStream, GvisorError>> + '_ {
        self.body.connect(port)
    }

    /// Writes snapshot `id`. It stands still meanwhile; streams into it survive. Returns how long
    /// it stood still and how long everything took, in microseconds.
    pub async fn snapshot(
        &self,
        store: &SnapshotStore,
        id: &str,
        resume: bool,
        max_bytes: Option<u64>,
    ) -> Result<(u64, u64), GvisorError> {
        let _turn = self.saving.lock().await;
        let began = Instant::now();
        store.expect_free(id)?;
        let draft = store.draft()?;
        let taken = self.write(store, &draft, id, resume, max_bytes).await;
        if taken.is_err() {
            let _ = fs::remove_dir_all(&draft);
        }
        Ok((taken?, us(began)))
    }

    async fn write(
        &self,
        store: &SnapshotStore,
        draft: &Path,
        id: &str,
        resume: bool,
        max_bytes: Option<u64>,
    ) -> Result<u64, GvisorError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let created_ms = now.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(0));
        let spec = &self.body.spec;
        let manifest = GvisorManifest {
            version: self.body.helper.version().await?,
            template: spec.template.clone(),
            size: spec.size,
            net: spec.namespace.is_some(),
            base: spec.base.to_string_lossy().into_owned(),
            ..GvisorManifest::new(id, created_ms)
        };
        let image = draft.to_owned();
        let reply = self
            .body
            .ask(&HelperRequest::Checkpoint { image, resume })
            .await?;
        let published = match (SnapshotStore::size_of(draft), max_bytes) {
            // The size of a checkpoint is known when it is written.
            (needed, Some(most)) if needed > most => Err(GvisorError::TooLarge { needed, most }),
            _ => store.publish(draft, &manifest),
        };
        match (published, resume) {
            (Err(e), false) => {
                // It stands still, and is all there is.
                self.body.ask(&HelperRequest::Resume).await?;
                return Err(e);
            }
            (published, _) => published?,
        }
        if !resume {
            self.body.remove().await;
        }
        Ok(reply.stopped_us)
    }

    /// True if it has ended.
    pub fn has_ended(&self) -> bool {
        self.body.process.has_ended()
    }

    /// Waits until it is gone and says why.
    pub async fn ended(&self) -> ExitReason {
        self.body.ended().await
    }

    /// Its last console output, cleaned for a terminal.
    pub fn console_tail(&self) -> String {
        self.body.console_tail()
    }

    /// Ends it, and returns when nothing of it is left.
    pub async fn stop(&self) {
        self.body.remove().await;
    }
}

/// Directories of sandboxes have ids for names.
fn is_id(name: &str) -> bool {
    name.len() == 20
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}
