//! A record of what every guest reached, or tried to.
//!
//! Who tells: the kernel's connection tracking of the slot when a connection is gone, and of those that are open when somebody asks; the
//! slot's table for packets that it refused; our own name server and proxy for what they were asked. Nothing stands in the way of a
//! packet, and a guest that makes more of them than are read loses lines of its own record, which are counted.

mod flow;
mod forget;
mod netlink;
mod record;
mod refused;
mod ring;
#[cfg(test)]
mod told_tests;

pub(crate) use forget::forget;
use netlink::Socket;
pub(crate) use record::{Carried, Record};
pub(crate) use refused::statement;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

/// After what the kernel told was taken up, time until the next look: what a flood costs is bounded by what fits the sockets meanwhile.
const REST: Duration = Duration::from_millis(100);

/// What the kernel of this host does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Blind {
    connections: bool,
    bytes: bool,
    refusals: bool,
}

impl Blind {
    /// Or does not, because the table does not.
    fn or_refusals(self, untold: bool) -> Self {
        Self {
            refusals: self.refusals || untold,
            ..self
        }
    }

    fn words(self) -> Vec<&'static str> {
        let all = [
            (self.connections, "connections"),
            (self.bytes, "bytes"),
            (self.refusals, "refusals"),
        ];
        all.into_iter().filter(|w| w.0).map(|w| w.1).collect()
    }
}

/// Where the kernel tells what happens in a slot. A kernel that cannot leaves a sandbox its network, and its record says so.
#[derive(Debug)]
pub(crate) struct Sockets {
    flows: Option<Socket>,
    refused: Option<Socket>,
    blind: Blind,
}

impl Sockets {
    /// In the network namespace of this thread, whose table is in force.
    pub fn open() -> Self {
        let here = |what: &str, socket: io::Result<Socket>| {
            let failed = |e: &io::Error| tracing::debug!("no record of {what}: {e}");
            socket.inspect_err(failed).ok()
        };
        let bytes = !flow::count();
        let flows = here("connections", flow::listen());
        let refused = here("refused packets", refused::listen());
        let blind = Blind {
            connections: flows.is_none(),
            bytes,
            refusals: refused.is_none(),
        };
        Self {
            flows,
            refused,
            blind,
        }
    }

    /// Without any.
    #[cfg(test)]
    pub fn none() -> Self {
        Self {
            flows: None,
            refused: None,
            blind: Blind::default(),
        }
    }
}

/// Takes up what the kernel tells of one slot, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch(Vec<AbortHandle>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl Watch {
    /// Begins. Must be called inside a tokio runtime.
    pub fn start(sockets: &Sockets, record: &Arc<Record>) -> io::Result<Self> {
        let all = [&sockets.flows, &sockets.refused];
        let tasks = all.into_iter().flatten().map(|socket| {
            // SAFETY: an `OwnedFd` stays open and the same until its last owner is gone, and the `AsyncFd` is one of them.
            let ear =
                unsafe { AsyncFd::register_with_interest(socket.0.clone(), Interest::READABLE)? };
            Ok(tokio::spawn(listen(ear, record.clone())).abort_handle())
        });
        tasks.collect::<io::Result<_>>().map(Self)
    }
}

async fn listen(ear: AsyncFd<Arc<OwnedFd>>, record: Arc<Record>) {
    while let Ok(mut heard) = ear.readable().await {
        if !record.take_up() {
            heard.clear_ready();
        }
        drop(heard);
        tokio::time::sleep(REST).await;
    }
}
