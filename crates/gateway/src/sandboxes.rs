//! Interface to the daemon's sandboxes.

use std::future::Future;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};

/// The sandboxes that a gateway serves.
pub trait Sandboxes: Clone + Send + Sync + 'static {
    /// A stream into a guest.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Returns the access settings of a sandbox; none if there is no such sandbox, or it was
    /// killed. Called for every request: cheap, in memory.
    fn find(&self, id: &str) -> Option<SandboxAccess>;

    /// Returns the sandbox whose agent's access token fits. Called for links to files only: linear
    /// in the sandboxes. The default finds none, so that every link must name its sandbox.
    fn find_by_token(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let _ = fits;
        None
    }

    /// Waits until signed links to a sandbox, which are good now, open nothing any more.
    fn links_closed(&self, id: &str) -> impl Future<Output = ()> + Send {
        let _ = id;
        std::future::pending()
    }

    /// Counts one more request or stream to a sandbox with this access until the permit is dropped.
    ///
    /// # Errors
    /// The reason, for clients, if there may be no more.
    fn begin(&self, access: &SandboxAccess) -> Result<ExchangePermit, String> {
        let _ = access;
        Ok(Box::new(()))
    }

    /// Returns the reason why an unreachable sandbox does not run, after pending operations on it
    /// have ended; none if it runs.
    fn why_gone(&self, id: &str) -> impl Future<Output = Option<OpenError>> + Send {
        let _ = id;
        async { None }
    }

    /// Opens a stream to TCP `port` in the guest (the agent's own port included), after waking the
    /// sandbox if it may be woken.
    fn open(
        &self,
        id: &str,
        port: u16,
    ) -> impl Future<Output = Result<Self::Stream, OpenError>> + Send;
}

/// One request or stream, counted until this is dropped.
pub type ExchangePermit = Box<dyn std::any::Any + Send + Sync>;

/// Access settings of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxAccess {
    /// Required as `E2B-Traffic-Access-Token` on every port but the agent's, which checks a token
    /// of its own. None: open to all.
    pub traffic_token: Option<String>,
    /// Sent to the guest as `Host` instead of the client's; `${PORT}` stands for the port.
    pub mask_request_host: Option<String>,
    /// Signed links to it open nothing: the key that it was made with is not in force any more.
    pub links_closed: bool,
    /// API key that the sandbox belongs to; none: the host's owner.
    pub owner: Option<String>,
}

/// Why there is no stream into a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// It was killed, or never existed.
    #[error("no such sandbox")]
    NotFound,
    /// It is paused and may not be woken, or is broken.
    #[error("the sandbox is not running")]
    NotRunning,
    /// Nothing listens on the port.
    #[error("the port is not open")]
    PortClosed,
    /// It may be woken, but its creator's quota is used up; the text is shown to clients.
    #[error("{0}")]
    Limit(String),
    /// Anything else; the text is shown to clients.
    #[error("{0}")]
    Unavailable(String),
}
