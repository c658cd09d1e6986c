//! Guests of the fake engine, whose memory is a text.
//!
//! A *draft* is the file of an incomplete snapshot. Its name starts with a dot.

use super::OTHER;
use super::files::FakeFiles;
use super::world::Body;
use async_trait::async_trait;
use jiffy_engine_api::{
    AfterSnapshot, BootMode, BootReport, ConnectionLog, ConnectionProtocol, ConnectionRecord,
    ConnectionRecords, EngineError, ExitReason, Guest, GuestHandle, GuestUsage, RollbackCommit,
    RollbackFailure, SandboxIdentity, SnapshotRequest, SnapshotTimes, UnassignedGuest,
};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::FoldedLayers;
use jiffy_sandbox_manager::HostReader;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Guest without an identity. Contains `None` once the identity was assigned.
pub struct UnassignedFakeGuest(pub(super) Arc<FakeFiles>, pub(super) Option<Arc<Body>>);

/// Guest with an identity. Exits when it is dropped, unless it was detached.
pub struct FakeGuest(pub(super) Arc<Body>, pub(super) Arc<FakeFiles>);

impl Drop for UnassignedFakeGuest {
    fn drop(&mut self) {
        if let Some(body) = self.1.take() {
            body.end.send_replace(Some(ExitReason::Requested));
        }
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        if !self.0.detached.load(Ordering::Relaxed) {
            self.0.end.send_replace(Some(ExitReason::Requested));
        }
    }
}

#[async_trait]
impl UnassignedGuest for UnassignedFakeGuest {
    fn is_waiting(&self) -> bool {
        self.1.as_ref().is_some_and(|b| b.end.borrow().is_none())
    }

    async fn rehearse(&mut self, _: &SiteSettings) -> Result<(), EngineError> {
        *self.0.world.rehearsed.lock().unwrap() += 1;
        self.0.world.step("rehearse").await
    }

    async fn assign_identity(
        mut self: Box<Self>,
        sandbox_identity: &SandboxIdentity,
    ) -> Result<Arc<dyn Guest>, EngineError> {
        self.0.world.step("assign").await?;
        let body = self.1.take().unwrap();
        *body.sandbox_identity.lock().unwrap() = sandbox_identity.clone();
        Ok(Arc::new(FakeGuest(body, self.0.clone())))
    }
}

impl FakeGuest {
    /// Writes the file of a snapshot, and stops the guest if `then` requires it.
    async fn store(
        &self,
        id: &str,
        memory: String,
        then: AfterSnapshot,
    ) -> Result<SnapshotTimes, EngineError> {
        fs::write(self.1.dir.join(id), memory).map_err(EngineError::failed)?;
        if self.0.engine == OTHER {
            self.1.world.of_other.lock().unwrap().insert(id.to_owned());
        }
        // The draft of an earlier daemon may have been collected.
        let _ = fs::remove_file(self.1.dir.join(format!(".{id}")));
        self.1.world.step("snapshot-named").await?;
        *self.0.undecided.lock().unwrap() = None;
        let former = self.0.parent.lock().unwrap().replace(id.to_owned());
        if let Some(former) = former {
            let mut parents = self.1.world.parents.lock().unwrap();
            parents.insert(id.to_owned(), former);
        }
        if then == AfterSnapshot::Stop {
            self.halt().await;
        }
        self.1.world.step("snapshot-complete").await?;
        Ok(SnapshotTimes::default())
    }
}

#[async_trait]
impl Guest for FakeGuest {
    fn engine(&self) -> &'static str {
        self.0.engine
    }

    async fn detach(&self) -> Result<GuestHandle, EngineError> {
        self.1.world.step("detach").await?;
        self.0.detached.store(true, Ordering::Relaxed);
        self.1.world.step("detached").await?;
        self.handle().await
    }

    async fn handle(&self) -> Result<GuestHandle, EngineError> {
        let guests = self.1.world.guests.lock().unwrap();
        let at = guests.iter().position(|b| Arc::ptr_eq(b, &self.0)).unwrap();
        Ok(GuestHandle(at.to_string()))
    }

    async fn take_snapshot(
        &self,
        request: SnapshotRequest<'_>,
    ) -> Result<SnapshotTimes, EngineError> {
        let SnapshotRequest {
            id,
            parent,
            then,
            max_bytes,
            notice,
            ..
        } = request;
        if let Some(parent) = parent {
            assert!(
                self.1.dir.join(parent).exists(),
                "parent {parent} is missing"
            );
        }
        assert_eq!(self.0.parent.lock().unwrap().as_deref(), parent);
        let draft = format!(".{id}");
        self.1.writing.lock().unwrap().insert(draft.clone());
        fs::write(self.1.dir.join(draft), "draft").map_err(EngineError::failed)?;
        *self.0.undecided.lock().unwrap() = Some(id.to_owned());
        self.1.world.step("snapshot").await?;
        let memory = self.0.memory.lock().unwrap().clone();
        let needed = memory.len() as u64;
        if let Some(most) = max_bytes.filter(|most| needed > *most) {
            fs::remove_file(self.1.dir.join(format!(".{id}"))).unwrap();
            *self.0.undecided.lock().unwrap() = None;
            return Err(EngineError::SnapshotTooLarge { needed, most });
        }
        if let Some(notice) = notice {
            *self.0.captured.lock().unwrap() = Some((id.to_owned(), memory));
            // The snapshot is captured: report this with the time for which the guest was stopped,
            // in microseconds. Its file is written afterwards.
            notice.send(7_000).unwrap();
            return self.finish_captured().await;
        }
        self.store(id, memory, then).await
    }

    async fn finish_captured(&self) -> Result<SnapshotTimes, EngineError> {
        let mut storing = self.1.world.storing_waits.subscribe();
        storing.wait_for(|waits| !waits).await.unwrap();
        self.1.world.step("store").await?;
        let captured = self.0.captured.lock().unwrap().take();
        let (id, memory) =
            captured.ok_or_else(|| EngineError::failed("no snapshot was captured"))?;
        self.store(&id, memory, AfterSnapshot::Resume).await
    }

    async fn roll_back(
        &self,
        id: &str,
        identity: &SandboxIdentity,
        commit: &mut RollbackCommit<'_>,
    ) -> Result<(), RollbackFailure> {
        let rejection = |reason: &str| RollbackFailure::Refused {
            reason: reason.to_owned(),
        };
        if !self.1.world.supports_rollback.load(Ordering::Relaxed) {
            return Err(rejection("the guest does not support it"));
        }
        if !commit() {
            return Err(rejection("the journal cannot be written"));
        }
        self.1.world.rollback_started.store(true, Ordering::Relaxed);
        let result = self.1.world.step("rollback").await;
        result.map_err(|e| rejection(&e.to_string()))?;
        let memory = fs::read_to_string(self.1.dir.join(id));
        *self.0.memory.lock().unwrap() = memory.map_err(|e| rejection(&e.to_string()))?;
        *self.0.parent.lock().unwrap() = Some(id.to_owned());
        let result = self.1.world.step("rollback-done").await;
        result.map_err(RollbackFailure::Lost)?;
        *self.0.sandbox_identity.lock().unwrap() = identity.clone();
        Ok(())
    }

    fn fold_layers(&self, _: &FoldedLayers) {
        let text = self.0.memory.lock().unwrap().clone();
        self.1.world.notified_folds.lock().unwrap().push(text);
    }

    fn may_have_hooks(&self) -> bool {
        false
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
        let is_busy = self.0.is_busy.load(Ordering::Relaxed);
        // CPU time since the last measurement, in microseconds.
        let used_us = if is_busy { 60_000_000 } else { 1000 };
        let cpu_us = self.0.cpu_us.fetch_add(used_us, Ordering::Relaxed) + used_us;
        Some(GuestUsage {
            cpu_us,
            memory_bytes: 3 << 20,
            disk_bytes: Some(8192),
            net_bytes: Some((100, 200)),
        })
    }

    /// Answers every request with the number of commands, or with 204 if there are none. Closes the
    /// connection if the step `answer` fails.
    async fn connect(&self, _: u32) -> io::Result<UnixStream> {
        let (near, mut far) = UnixStream::pair()?;
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        let answer = match self.0.commands.load(Ordering::Relaxed) {
            0 => "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
            running => {
                let body = format!(r#"{{"running":{running}}}"#);
                let length = body.len();
                format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}")
            }
        };
        if self.1.world.step("answer").await.is_ok() {
            tokio::spawn(async move {
                let mut request = [0; 1024];
                let _ = far.read(&mut request).await;
                let _ = far.write_all(answer.as_bytes()).await;
            });
        }
        Ok(near)
    }

    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        Some(Arc::new(OneConnection))
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
        // The process has exited; its resources may remain.
        let _ = self.1.world.step("stop").await;
    }

    async fn halt(&self) {
        self.0.stop();
        let _ = self.1.world.step("halt").await;
    }
}

/// Connection log with one connection.
struct OneConnection;

impl ConnectionLog for OneConnection {
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
            header_use: None,
            times: 1,
        };
        ConnectionRecords {
            since_ms: Some(1),
            list: vec![connection],
            ..ConnectionRecords::default()
        }
    }
}
