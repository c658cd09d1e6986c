//! Ports of this host that lead into a guest while its command runs.

use crate::cli::Publication;
use crate::sandbox::forward::{PortOpener, forward, listen};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Ports of this host that are listened at, and those of the guest that they are for.
pub struct Listeners(Vec<(TcpListener, u16)>);

/// Ports that lead into a guest, until they are closed or this is dropped.
pub struct Published {
    work: JoinSet<()>,
    stop: watch::Sender<bool>,
}

impl Published {
    /// Accepts no more connections, and returns when those that are open have handed on what was
    /// under way.
    pub async fn close(mut self) {
        self.stop.send_replace(true);
        while self.work.join_next().await.is_some() {}
    }
}

impl Listeners {
    /// Listens at all of `ports`. One that the system chose is told on standard error.
    pub async fn open(ports: &[Publication]) -> anyhow::Result<Self> {
        let mut all = Vec::new();
        for &Publication { address, ports } in ports {
            let listener = listen(address, ports.local).await?;
            if ports.local == 0 {
                errln!("jiffy: {} -> {}", listener.local_addr()?, ports.remote);
            }
            all.push((listener, ports.remote));
        }
        Ok(Self(all))
    }

    /// Leads connections, also those that wait already, into a guest.
    pub fn forward_to(self, opener: &PortOpener) -> Published {
        let mut work = JoinSet::new();
        let (stop, stopped) = watch::channel(false);
        for (listener, port) in self.0 {
            let mut stopped = stopped.clone();
            let stop = async move {
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            work.spawn(forward(listener, opener.clone(), port, stop));
        }
        Published { work, stop }
    }
}
