//! What the gateway asks of whoever owns the sandboxes.

use std::future::Future;
use thiserror::Error;
use tokio::net::UnixStream;

/// Whoever owns the sandboxes.
pub trait Sandboxes: Clone + Send + Sync + 'static {
    /// What a client needs to reach a sandbox; none if there is no such sandbox, or it was killed. Called for every request: cheap, in memory.
    fn find(&self, id: &str) -> Option<Access>;

    /// The sandbox whose agent's access token fits. Called for links to files only: linear in the sandboxes.
    /// Where it always finds none there are no links that name no sandbox.
    fn find_by_token(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let _ = fits;
        None
    }

    /// Waits until signed links to a sandbox, which are good now, open nothing any more.
    fn links_closed(&self, id: &str) -> impl Future<Output = ()> + Send {
        let _ = id;
        std::future::pending()
    }

    /// Counts one more request or stream to a sandbox with this access, until what is returned is dropped; or says, for clients,
    /// why there may be no more.
    fn begin(&self, access: &Access) -> Result<ExchangePermit, String> {
        let _ = access;
        Ok(Box::new(()))
    }

    /// Why a sandbox that could not be reached does not run, once what is under way with it has been decided; none if it runs.
    fn why_gone(&self, id: &str) -> impl Future<Output = Option<OpenError>> + Send {
        let _ = id;
        async { None }
    }

    /// A stream to TCP `port` in the guest (the agent's own port included), after waking the sandbox if it may be woken.
    fn open(
        &self,
        id: &str,
        port: u16,
    ) -> impl Future<Output = Result<UnixStream, OpenError>> + Send;
}

/// One request or stream, counted until this is dropped.
pub type ExchangePermit = Box<dyn std::any::Any + Send + Sync>;

/// What a client needs to reach a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// Demanded as `E2B-Traffic-Access-Token` on every port but the agent's, which checks a token of its own. None: open to all.
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
    /// It was killed, or never was.
    #[error("no such sandbox")]
    NotFound,
    /// It is paused and may not be woken, or broken.
    #[error("the sandbox is not running")]
    NotRunning,
    /// Nothing listens on the port.
    #[error("the port is not open")]
    PortClosed,
    /// It may be woken, but whoever made it has as much as they may have; the text is shown to clients.
    #[error("{0}")]
    Limit(String),
    /// Anything else; the text is shown to clients.
    #[error("{0}")]
    Unavailable(String),
}
