//! Boot of a guest, from process 1 until the sandbox accepts requests.

pub mod clone_renewal;
pub mod cmdline;
pub mod connection_reset;
pub mod environment;
pub mod generation;
pub mod greeting;
pub mod gvisor;
pub mod identity;
pub mod ipv4;
mod ipv6;
pub mod microvm;
pub mod mount;
pub mod root;
pub mod site;
mod sysctl;

use tokio::sync::watch;

/// Engine of the sandbox. It determines which steps of boot and identity the agent performs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestEngine {
    /// A virtual machine with a kernel of its own.
    MicroVm,
    /// gVisor. It sets the clock, randomness and network itself, and resets connections during a
    /// restore.
    Gvisor,
}

/// Runs `work` until it completes or all connections are reset. The agent resets them if this guest
/// becomes a clone: its connections then belong to the sandbox of which the snapshot was taken.
async fn until_reset(mut reset: watch::Receiver<()>, work: impl Future<Output = ()>) {
    reset.mark_unchanged();
    tokio::select! {
        () = work => {}
        _ = reset.changed() => {}
    }
}
