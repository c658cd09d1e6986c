//! Whether whoever builds may have one more sandbox.

use jiffy_engine::SandboxSize;
use std::pin::Pin;

/// Room for a sandbox; kept until that runs, or will not.
pub type Room = Box<dyn Send>;
/// A refusal says which limit is reached, and what to do.
pub type Admitted<'a> = Pin<Box<dyn Future<Output = Result<Room, String>> + Send + 'a>>;

/// Knows the limits of owners.
pub trait Door: Send + Sync + 'static {
    /// Room for a sandbox of `owner`.
    fn admit<'a>(&'a self, owner: &'a str, size: SandboxSize) -> Admitted<'a>;
}
