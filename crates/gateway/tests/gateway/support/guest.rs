//! Guests that are tasks of the test, reached over socket pairs like real guests over vsock.
//!
//! Each sandbox is an entry with rights of access, and each server in a sandbox is a program that
//! runs as a task for each connection to its port. A test can also let connections fail or wait,
//! and count them.

use axum::Router;
use axum::response::Response;
use axum::routing::any;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use jiffy_gateway::{OpenError, SandboxAccess, SandboxUse, Sandboxes};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::net::UnixStream;

type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;
type Server = Arc<dyn Fn(UnixStream) -> Serving + Send + Sync>;

/// Sandboxes and the servers in them.
#[derive(Clone, Default)]
pub struct Guests {
    sandboxes: Arc<Mutex<HashMap<String, SandboxAccess>>>,
    ports: Arc<Mutex<HashMap<(String, u16), Server>>>,
    /// Error that every attempt to open returns.
    open_error: Arc<Mutex<Option<OpenError>>>,
    /// True if attempts to open wait forever.
    stalled: Arc<AtomicBool>,
    /// Number of connections opened so far.
    opened: Arc<AtomicUsize>,
    /// Number of connections whose programs still run.
    open: Arc<AtomicUsize>,
    /// Number of requests that use the sandboxes.
    in_use: Arc<AtomicUsize>,
    /// Number of requests that have used the sandboxes.
    uses: Arc<AtomicUsize>,
    /// Notified when links are revoked.
    links_changed: Arc<tokio::sync::Notify>,
}

impl Guests {
    /// Returns a single sandbox with a web server on a port.
    pub fn one(id: &str, port: u16, router: Router) -> Self {
        let guests = Self::default();
        guests.add(id, SandboxAccess::default());
        guests.web(id, port, router);
        guests
    }

    /// Returns a single sandbox with a program on a port that handles the raw stream.
    pub fn raw<F>(
        id: &str,
        port: u16,
        program: impl Fn(UnixStream) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let guests = Self::default();
        guests.add(id, SandboxAccess::default());
        guests.program(id, port, program);
        guests
    }

    /// Adds a sandbox with these rights of access.
    pub fn add(&self, id: &str, access: SandboxAccess) {
        self.sandboxes.lock().unwrap().insert(id.to_owned(), access);
    }

    /// Serves HTTP at a port of a sandbox.
    pub fn web(&self, id: &str, port: u16, router: Router) {
        self.program(id, port, move |stream| {
            let service = TowerToHyperService::new(router.clone());
            async move {
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades()
                    .await;
            }
        });
    }

    /// Runs `program` for each connection to a port of a sandbox.
    pub fn program<F>(
        &self,
        id: &str,
        port: u16,
        program: impl Fn(UnixStream) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let server: Server = Arc::new(move |stream| Box::pin(program(stream)));
        self.ports
            .lock()
            .unwrap()
            .insert((id.to_owned(), port), server);
    }

    /// Removes the sandbox.
    pub fn remove_sandbox(&self, id: &str) {
        self.sandboxes.lock().unwrap().remove(id);
    }

    /// Revokes the signed links to the sandbox.
    pub fn revoke_links(&self, id: &str) {
        let mut sandboxes = self.sandboxes.lock().unwrap();
        sandboxes.get_mut(id).unwrap().links_revoked = true;
        drop(sandboxes);
        self.links_changed.notify_waiters();
    }

    /// Lets later attempts to open a connection fail.
    pub fn set_open_error(&self, error: OpenError) {
        *self.open_error.lock().unwrap() = Some(error);
    }

    /// Lets later attempts to open wait forever.
    pub fn stall(&self) {
        self.stalled.store(true, Ordering::SeqCst);
    }

    /// Returns the number of connections opened so far.
    pub fn opened_count(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }

    /// Returns the number of requests that use the sandboxes.
    pub fn use_count(&self) -> usize {
        self.in_use.load(Ordering::SeqCst)
    }

    /// Returns the number of requests that have used the sandboxes.
    pub fn all_uses(&self) -> usize {
        self.uses.load(Ordering::SeqCst)
    }

    /// Returns the number of connections whose programs still run.
    pub fn open_count(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

/// Increments a count until it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Sandboxes for Guests {
    type Stream = UnixStream;

    fn find(&self, id: &str) -> Option<SandboxAccess> {
        let access = self.sandboxes.lock().unwrap().get(id).cloned()?;
        Some(SandboxAccess {
            counts_uses: true,
            ..access
        })
    }

    fn begin_use(&self, _: &str, _: u16) -> SandboxUse {
        self.uses.fetch_add(1, Ordering::SeqCst);
        Box::new(Counted::new(&self.in_use))
    }

    async fn links_revoked(&self, id: &str) {
        loop {
            let closed = self.links_changed.notified();
            tokio::pin!(closed);
            closed.as_mut().enable();
            let sandboxes = self.sandboxes.lock().unwrap().get(id).cloned();
            if sandboxes.is_none_or(|access| access.links_revoked) {
                return;
            }
            closed.await;
        }
    }

    async fn not_running_reason(&self, id: &str) -> Option<OpenError> {
        let sandboxes = self.sandboxes.lock().unwrap().contains_key(id);
        (!sandboxes).then_some(OpenError::NotFound)
    }

    fn find_by_token(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let sandboxes = self.sandboxes.lock().unwrap();
        // The token of each sandbox is its reversed id.
        sandboxes
            .keys()
            .find(|id| fits(&id.chars().rev().collect::<String>()))
            .cloned()
    }

    async fn open(&self, id: &str, port: u16) -> Result<UnixStream, OpenError> {
        if let Some(error) = self.open_error.lock().unwrap().clone() {
            return Err(error);
        }
        if self.stalled.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let key = (id.to_owned(), port);
        let server = self
            .ports
            .lock()
            .unwrap()
            .get(&key)
            .cloned()
            .ok_or(OpenError::PortClosed)?;
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.opened.fetch_add(1, Ordering::SeqCst);
        let running = Counted::new(&self.open);
        tokio::spawn(async move {
            server(theirs).await;
            drop(running);
        });
        Ok(ours)
    }
}

/// Returns a guest that sends a fixed response.
pub fn answering(answer: impl Fn() -> Response + Clone + Send + Sync + 'static) -> Router {
    Router::new().fallback(any(move || {
        let answer = answer();
        async move { answer }
    }))
}
