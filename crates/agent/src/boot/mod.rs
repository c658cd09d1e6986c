//! From the kernel's first program to a sandbox that answers.

pub mod clone;
pub mod cmdline;
pub mod connections;
pub mod environment;
pub mod generation;
pub mod greeting;
pub mod gvisor;
pub mod identity;
pub mod microvm;
pub mod mount;
pub mod net;
mod net6;
pub mod root;
mod settings;
pub mod site;

use tokio::sync::watch;

/// What isolates the sandbox, and so what there is to be done in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// A virtual machine with a kernel of its own.
    MicroVm,
    /// gVisor: clock, randomness and network are its own business, and it resets connections when it restores.
    Gvisor,
}

/// Does `work` until it is done or all connections are reset.
async fn until_reset(mut reset: watch::Receiver<()>, work: impl Future<Output = ()>) {
    reset.mark_unchanged();
    tokio::select! {
        () = work => {}
        _ = reset.changed() => {}
    }
}
