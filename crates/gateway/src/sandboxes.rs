//! [`Sandboxes`]: the gateway's interface to the sandboxes of this host. The daemon implements it.
//!
//! A *permit* counts towards a limit until it is dropped.

use std::future::Future;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};

/// Sandboxes that a gateway serves.
pub trait Sandboxes: Clone + Send + Sync + 'static {
    /// Stream into a guest.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Returns the access settings of a sandbox. `None` if the sandbox does not exist or was
    /// killed. Called for every request, so it must be fast.
    fn find(&self, id: &str) -> Option<SandboxAccess>;

    /// Returns the sandbox whose agent's access token satisfies `fits`. The duration is linear in
    /// the number of sandboxes, so it is called only for links to files. The default implementation
    /// returns `None`: then every link must name its sandbox.
    fn find_by_token(&self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let _ = fits;
        None
    }

    /// Waits until the signed links to a sandbox that are valid now are revoked.
    fn links_revoked(&self, id: &str) -> impl Future<Output = ()> + Send {
        let _ = id;
        std::future::pending()
    }

    /// Counts a request or stream to a sandbox with this access until the permit is dropped.
    ///
    /// # Errors
    /// The reason, for clients, if the limit is reached.
    fn begin(&self, access: &SandboxAccess) -> Result<ExchangePermit, String> {
        let _ = access;
        Ok(Box::new(()))
    }

    /// Counts a request to `port` of a sandbox as use of the sandbox until the value is dropped.
    /// Called after the checks of the client's access, if the sandbox counts its uses.
    fn begin_use(&self, id: &str, port: u16) -> SandboxUse {
        let _ = (id, port);
        Box::new(())
    }

    /// Waits for pending operations on an unreachable sandbox, such as a pause. Returns the reason
    /// why the sandbox is not running. `None` if it is running.
    fn not_running_reason(&self, id: &str) -> impl Future<Output = Option<OpenError>> + Send {
        let _ = id;
        async { None }
    }

    /// Opens a stream to TCP `port` in the guest, including the agent's port. Resumes the sandbox
    /// if permitted.
    fn open(
        &self,
        id: &str,
        port: u16,
    ) -> impl Future<Output = Result<Self::Stream, OpenError>> + Send;
}

/// Permit of a request or stream. Dropping this value releases it.
pub type ExchangePermit = Box<dyn std::any::Any + Send + Sync>;

/// Use of a sandbox by a request. Dropping this value ends it.
pub type SandboxUse = Box<dyn std::any::Any + Send + Sync>;

/// Access settings of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxAccess {
    /// Token required as `E2B-Traffic-Access-Token` on every port except the agent's, which checks
    /// its own token. `None` if access is public.
    pub traffic_token: Option<String>,
    /// `Host` header sent to the guest instead of the client's. `${PORT}` is replaced by the port.
    pub mask_request_host: Option<String>,
    /// Ports whose servers use TLS. Their certificates are not verified.
    pub https_ports: Vec<u16>,
    /// True if signed links are revoked, because the API key of the sandbox is no longer valid.
    pub links_revoked: bool,
    /// API key that owns the sandbox. `None` if the host's owner does.
    pub owner: Option<String>,
    /// True if requests count as uses of the sandbox ([`Sandboxes::begin_use`]), because the
    /// sandbox has an idle timeout.
    pub counts_uses: bool,
}

/// Reason why a stream into a sandbox cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The sandbox was killed or never existed.
    #[error("no such sandbox")]
    NotFound,
    /// The sandbox is paused and must not be resumed, or is broken.
    #[error("the sandbox is not running")]
    NotRunning,
    /// No server listens on the port.
    #[error("the port is not open")]
    PortClosed,
    /// The sandbox could be resumed, but its owner's quota is exhausted. The text is shown to
    /// clients.
    #[error("{0}")]
    Limit(String),
    /// Any other error. The text is shown to clients.
    #[error("{0}")]
    Unavailable(String),
}
