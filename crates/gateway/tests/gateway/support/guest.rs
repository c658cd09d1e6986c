//! Guests that are programs of the test, reached over socket pairs as real ones are over vsock.

use axum::Router;
use axum::response::Response;
use axum::routing::any;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use jiffy_gateway::{OpenError, SandboxAccess, Sandboxes};
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
    known: Arc<Mutex<HashMap<String, SandboxAccess>>>,
    ports: Arc<Mutex<HashMap<(String, u16), Server>>>,
    /// Error that every opening returns.
    trouble: Arc<Mutex<Option<OpenError>>>,
    stalled: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
    closed: Arc<tokio::sync::Notify>,
}

impl Guests {
    /// One sandbox with a web server on a port.
    pub fn one(id: &str, port: u16, router: Router) -> Self {
        let guests = Self::default();
        guests.add(id, SandboxAccess::default());
        guests.web(id, port, router);
        guests
    }

    /// One sandbox with a program on a port that is given the bare stream.
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

    pub fn add(&self, id: &str, access: SandboxAccess) {
        self.known.lock().unwrap().insert(id.to_owned(), access);
    }

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

    /// The sandbox is removed.
    pub fn forget(&self, id: &str) {
        self.known.lock().unwrap().remove(id);
    }

    /// Signed links to it are no longer valid.
    pub fn close_links(&self, id: &str) {
        let mut known = self.known.lock().unwrap();
        known.get_mut(id).unwrap().links_closed = true;
        drop(known);
        self.closed.notify_waiters();
    }

    pub fn trouble(&self, error: OpenError) {
        *self.trouble.lock().unwrap() = Some(error);
    }

    /// From now on openings neither succeed nor fail.
    pub fn stall(&self) {
        self.stalled.store(true, Ordering::SeqCst);
    }

    /// Connections opened so far.
    pub fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }

    /// Connections whose programs still run.
    pub fn open_now(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Sandboxes for Guests {
    type Stream = UnixStream;

    fn find(&self, id: &str) -> Option<SandboxAccess> {
        self.known.lock().unwrap().get(id).cloned()
    }

    async fn links_closed(&self, id: &str) {
        loop {
            let closed = self.closed.notified();
            tokio::pin!(closed);
            closed.as_mut().enable();
            let known = self.known.lock().unwrap().get(id).cloned();
            if known.is_none_or(|access| access.links_closed) {
                return;
            }
            closed.await;
        }
    }

    async fn why_gone(&self, id: &str) -> Option<OpenError> {
        let known = self.known.lock().unwrap().contains_key(id);
        (!known).then_some(OpenError::NotFound)
    }

    fn find_by_token(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let known = self.known.lock().unwrap();
        // The token of each sandbox is its id, reversed.
        known
            .keys()
            .find(|id| fits(&id.chars().rev().collect::<String>()))
            .cloned()
    }

    async fn open(&self, id: &str, port: u16) -> Result<UnixStream, OpenError> {
        if let Some(error) = self.trouble.lock().unwrap().clone() {
            return Err(error);
        }
        if self.stalled.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let key = (id.to_owned(), port);
        let server = self.ports.lock().unwrap().get(&key).cloned();
        let server = server.ok_or(OpenError::PortClosed)?;
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.opened.fetch_add(1, Ordering::SeqCst);
        self.open.fetch_add(1, Ordering::SeqCst);
        let running = Running(Arc::clone(&self.open));
        tokio::spawn(async move {
            server(theirs).await;
            drop(running);
        });
        Ok(ours)
    }
}

/// A guest that sends one answer of the test.
pub fn answering(answer: impl Fn() -> Response + Clone + Send + Sync + 'static) -> Router {
    Router::new().fallback(any(move || {
        let answer = answer();
        async move { answer }
    }))
}
