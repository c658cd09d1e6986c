//! Guests that are a line of text.

use super::world::{Body, World};
use jiffy_engine_api::{
    BootMode, BootReport, ConnectionLog, ConnectionProtocol, ConnectionRecord, ConnectionRecords,
    EngineError, ExitReason, Guest, GuestHandle, GuestUsage, SandboxIdentity, UnassignedGuest,
};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::FoldedLayers;
use jiffy_sandbox_manager::HostReader;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

pub struct UnassignedFakeGuest(pub(super) Arc<World>, pub(super) Option<Arc<Body>>);

pub struct FakeGuest(pub(super) Arc<Body>, pub(super) Arc<World>);

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
        self.handle().await
    }

    async fn handle(&self) -> Result<GuestHandle, EngineError> {
        let guests = self.1.guests.lock().unwrap();
        let at = guests.iter().position(|b| Arc::ptr_eq(b, &self.0)).unwrap();
        Ok(GuestHandle(at.to_string()))
    }

    fn fold_layers(&self, _: &FoldedLayers) {
        let text = self.0.memory.lock().unwrap().clone();
        self.1.told_folds.lock().unwrap().push(text);
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

    async fn halt(&self) {
        self.0.stop();
        let _ = self.1.step("halt").await;
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
