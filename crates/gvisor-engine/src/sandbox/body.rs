//! [`SandboxBody`]: process and files of a gVisor sandbox, before and after its agent has received
//! the identity. The process is the *sentry*, gVisor's kernel in user space. Requests about it are
//! sent to the helper program `jiffy-gvisor`, which has created it.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *greeting* is the first message of the agent, which then
//! receives the identity of its sandbox.

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

/// Timeout of each step of a boot or restore: the helper's start or restore, the agent's greeting,
/// and the agent's confirmation of its identity.
pub(super) const BOOT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a connection to the agent.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the request for a sandbox's exit status.
const EXIT_STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of the console output in messages, in bytes.
const CONSOLE_TAIL_BYTES: usize = 16 * 1024;
/// Memory that the sentry needs in addition to the guest's memory, in bytes.
const OVERHEAD_BYTES: u64 = 64 << 20;
/// Maximum number of threads and processes of a sandbox, including the sentry's.
const MAX_TASKS: u64 = 4096;

/// Process and files of a sandbox. Dropping it terminates the sandbox, unless it is detached.
#[derive(Debug)]
pub(super) struct SandboxBody {
    /// Helper program that has created the sandbox.
    pub helper: Helper,
    pub spec: BootSpec,
    /// Directory of the sandbox's files.
    pub directory: PathBuf,
    pub process: Arc<SentryProcess>,
    /// True if the sandbox outlives this process.
    pub detached: AtomicBool,
    /// Set when this process kills the sandbox.
    pub stopped: AtomicBool,
    /// Set after the removal, even if the helper reported an error. Locked during the removal.
    pub removed: tokio::sync::Mutex<bool>,
}

impl Drop for SandboxBody {
    fn drop(&mut self) {
        let is_removed = *self.removed.get_mut();
        // A sandbox that has ended or is being removed no longer counts as detached.
        let has_ended = self.stopped.load(Ordering::Acquire) || self.process.has_ended();
        let is_detached = self.detached.load(Ordering::Acquire) && !has_ended;
        if is_detached || is_removed {
            return;
        }
        self.process.kill();
        self.helper
            .send_in_background(&self.spec.id, HelperRequest::Destroy);
    }
}

impl SandboxBody {
    /// Creates the sentry process of a new sandbox. If the future is dropped, the process is
    /// terminated after its creation.
    // The creation runs in a task of its own: cancelling it in the middle would leak the process.
    pub async fn create(helper: &Helper, spec: &BootSpec) -> Result<Self, GvisorError> {
        let creation = tokio::spawn(Self::create_now(helper.clone(), spec.clone()));
        let created = creation.await;
        created.map_err(|e| GvisorError::Host(io::Error::other(e)))?
    }

    /// Like [`Self::create`], but must run to its end.
    async fn create_now(helper: Helper, spec: BootSpec) -> Result<Self, GvisorError> {
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
        let created = helper
            .request(&spec.id, &HelperRequest::Create { sandbox })
            .await;
        let process = match created.and_then(|(reply, _)| SentryProcess::watch(reply.pid)) {
            Ok(process) => process,
            Err(e) => {
                // The sentry may exist: a helper that was killed could not reply. If it cannot be
                // removed now, the next daemon finds it by its directory.
                if let Err(error) = helper.request(&spec.id, &HelperRequest::Destroy).await {
                    tracing::warn!(sandbox_id = spec.id, %error, "cannot remove a sandbox");
                }
                return Err(e);
            }
        };
        Ok(Self {
            helper,
            spec,
            directory,
            process: Arc::new(process),
            detached: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            removed: tokio::sync::Mutex::default(),
        })
    }

    /// Sends a request about this sandbox to the helper.
    pub async fn request(&self, request: &HelperRequest) -> Result<Reply, GvisorError> {
        Ok(self.helper.request(&self.spec.id, request).await?.0)
    }

    /// Opens a stream to `port` of the agent.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, GvisorError> {
        let is_served = [HELLO_PORT, ENVD_PORT, TCP_PORT].contains(&port);
        let Some(port) = u16::try_from(port).ok().filter(|_| is_served) else {
            // Behave like a rejected connection: the other end is closed immediately.
            let closed = UnixStream::pair().map(|(stream, _)| stream);
            return closed.map_err(GvisorError::Host);
        };
        let request = HelperRequest::Connect { port };
        let request = self.helper.request(&self.spec.id, &request);
        let (_, fds) = tokio::time::timeout(CONNECT_TIMEOUT, request)
            .await
            .map_err(|_| self.timed_out(CONNECT_TIMEOUT))??;
        let fd = fds
            .into_iter()
            .next()
            .ok_or(GvisorError::Gone("connect to the guest agent"))?;
        let opened = || {
            let stream = BlockingStream::from(fd);
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        };
        opened().map_err(GvisorError::Host)
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

    /// Returns the error of an agent that did not answer within `limit`.
    pub fn timed_out(&self, limit: Duration) -> GvisorError {
        GvisorError::Timeout {
            limit_s: limit.as_secs(),
            console: self.console_tail(),
        }
    }

    /// Returns the end of the console output without control characters.
    pub fn console_tail(&self) -> String {
        let bytes = fs::read(self.directory.join("console.log")).unwrap_or_default();
        let tail = &bytes[bytes.len().saturating_sub(CONSOLE_TAIL_BYTES)..];
        // The guest writes the console. Control characters could manipulate the reader's terminal.
        let clean = |c: char| (c == '\n' || c == '\t' || !c.is_control()).then_some(c);
        String::from_utf8_lossy(tail)
            .chars()
            .filter_map(clean)
            .collect()
    }

    /// Kills the sandbox and returns when its processes have exited. Control groups and files
    /// remain until [`Self::remove`].
    pub async fn halt(&self) {
        self.stopped.store(true, Ordering::Release);
        self.process.kill();
        self.process.ended().await;
    }

    /// Kills the sandbox and returns when all of its resources are released.
    pub async fn remove(&self) {
        self.stopped.store(true, Ordering::Release);
        // A concurrent call waits until the resources are released.
        let mut removed = self.removed.lock().await;
        if *removed {
            return;
        }
        self.halt().await;
        if let Err(e) = self.request(&HelperRequest::Destroy).await {
            tracing::warn!(sandbox_id = self.spec.id, error = %e, "cannot remove a sandbox");
        }
        // The sandbox counts as removed even after an error: the directory remains, so that the
        // next daemon removes the sandbox.
        *removed = true;
    }

    /// Waits until the sandbox has ended and returns the reason.
    pub async fn ended(&self) -> ExitReason {
        self.process.ended().await;
        if self.stopped.load(Ordering::Acquire) {
            return ExitReason::Requested;
        }
        let request = self.request(&HelperRequest::Ended);
        let reply = tokio::time::timeout(EXIT_STATUS_TIMEOUT, request).await;
        // Check the flag again: another task may have stopped the sandbox during the request.
        if self.stopped.load(Ordering::Acquire) {
            return ExitReason::Requested;
        }
        match reply {
            Ok(Ok(reply)) if reply.out_of_memory => ExitReason::GuestOutOfMemory {
                message: format!(
                    "its programs and written files exceeded the limit of {} MiB",
                    self.spec.size.memory_mib
                ),
            },
            Ok(Ok(reply)) if reply.exit.is_some() => ExitReason::GuestReset,
            Ok(Ok(reply)) if reply.signal != 0 => ExitReason::VmmDied {
                status: ExitStatus::from_raw(reply.signal).to_string(),
            },
            _ => ExitReason::VmmDied {
                status: "unknown exit status; it may have exceeded its memory limit".to_owned(),
            },
        }
    }
}
