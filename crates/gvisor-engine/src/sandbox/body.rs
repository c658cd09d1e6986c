//! State that sandboxes with and without an identity have in common.

use super::spec::BootSpec;
use crate::error::GvisorError;
use crate::helper::{Helper, HelperRequest, Reply, SentrySpec};
use crate::sentry_process::SentryProcess;
use jiffy_agent_client::Greeting;
use jiffy_engine_api::ExitReason;
use jiffy_proto::agent::{ENVD_PORT, HELLO_PORT, TCP_PORT};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream as BlockingStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;

/// Time from asking for a sandbox to its agent's greeting.
pub(super) const BOOT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the helper to report how a sandbox ended.
const EXIT_STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Most of a console that is shown, in bytes.
const CONSOLE_TAIL_BYTES: usize = 16 * 1024;
/// Memory that gVisor's kernel needs besides the guest's, in bytes.
const OVERHEAD_BYTES: u64 = 64 << 20;
/// Most threads and processes of a sandbox, gVisor's kernel included.
const MAX_TASKS: u64 = 4096;

/// Processes and files of a sandbox. Dropping it ends the sandbox, unless it is kept.
#[derive(Debug)]
pub(super) struct SandboxBody {
    pub helper: Helper,
    pub spec: BootSpec,
    pub directory: PathBuf,
    pub process: Arc<SentryProcess>,
    /// True if it outlives this process.
    pub kept: AtomicBool,
    /// True once this process ended it.
    pub stopped: AtomicBool,
    /// True once nothing of it is left; locked during its removal.
    pub removed: tokio::sync::Mutex<bool>,
}

impl Drop for SandboxBody {
    fn drop(&mut self) {
        let left = !*self.removed.get_mut();
        // One that is being removed, or that has ended, is not kept any more.
        let over = self.stopped.load(Ordering::Acquire) || self.process.has_ended();
        let kept = self.kept.load(Ordering::Acquire) && !over;
        if kept || !left {
            return;
        }
        self.process.kill();
        self.helper.tell(&self.spec.id, HelperRequest::Destroy);
    }
}

impl SandboxBody {
    /// Has the process made that will isolate the sandbox. Ends it if this call is dropped
    /// meanwhile.
    pub async fn make(helper: &Helper, spec: &BootSpec) -> Result<Self, GvisorError> {
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

    /// Sends a request about this sandbox to the helper.
    pub async fn ask(&self, ask: &HelperRequest) -> Result<Reply, GvisorError> {
        Ok(self.helper.ask(&self.spec.id, ask).await?.0)
    }

    /// Opens a stream to `port` of the agent.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, GvisorError> {
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
            .map_err(|_| self.timed_out(CONNECT_TIMEOUT))??;
        let fd = fds.into_iter().next();
        let fd = fd.ok_or(GvisorError::Gone("connect to the guest agent"))?;
        let opened = || {
            let stream = BlockingStream::from(fd);
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        };
        opened().map_err(GvisorError::Process)
    }

    /// Receives the agent's greeting.
    pub async fn receive_greeting(&self) -> Result<Greeting, GvisorError> {
        let stream = self.connect(HELLO_PORT).await?;
        let received = tokio::time::timeout(BOOT_TIMEOUT, Greeting::receive(stream)).await;
        received
            .map_err(|_| self.timed_out(BOOT_TIMEOUT))?
            .map_err(|source| GvisorError::Greeting {
                source,
                console: self.console_tail(),
            })
    }

    /// Error of an agent that did not answer within `limit`.
    pub fn timed_out(&self, limit: Duration) -> GvisorError {
        GvisorError::Timeout {
            limit_s: limit.as_secs(),
            console: self.console_tail(),
        }
    }

    /// Last console output, cleaned for a terminal.
    pub fn console_tail(&self) -> String {
        let bytes = fs::read(self.directory.join("console.log")).unwrap_or_default();
        let tail = &bytes[bytes.len().saturating_sub(CONSOLE_TAIL_BYTES)..];
        let clean = |c: char| (c == '\n' || c == '\t' || !c.is_control()).then_some(c);
        String::from_utf8_lossy(tail)
            .chars()
            .filter_map(clean)
            .collect()
    }

    /// Kills it, and returns when no process of it runs. Its control groups and files stay until
    /// [`Self::remove`].
    pub async fn halt(&self) {
        self.stopped.store(true, Ordering::Release);
        self.process.kill();
        self.process.ended().await;
    }

    /// Kills it, and returns when nothing is left of it.
    pub async fn remove(&self) {
        self.stopped.store(true, Ordering::Release);
        let mut removed = self.removed.lock().await;
        if *removed {
            return;
        }
        self.halt().await;
        if let Err(e) = self.ask(&HelperRequest::Destroy).await {
            tracing::warn!("removing what sandbox {} left: {e}", self.spec.id);
        }
        *removed = true;
    }

    /// Waits until it has ended and returns the reason.
    pub async fn ended(&self) -> ExitReason {
        self.process.ended().await;
        if self.stopped.load(Ordering::Acquire) {
            return ExitReason::Requested;
        }
        let asked = self.ask(&HelperRequest::Ended);
        let reply = tokio::time::timeout(EXIT_STATUS_TIMEOUT, asked).await;
        if self.stopped.load(Ordering::Acquire) {
            return ExitReason::Requested;
        }
        match reply {
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
