//! Ports of this host that are forwarded to a guest while its command runs.

use crate::cli::Publication;
use crate::sandbox::forward::{PortOpener, forward, listen};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Listening sockets of this host with the ports of the guest.
pub struct Listeners(Vec<(TcpListener, u16)>);

/// Forwarded ports. Forwarding stops when this value is closed or dropped.
pub struct Published {
    tasks: JoinSet<()>,
    stop: watch::Sender<bool>,
}

impl Published {
    /// Stops accepting connections, and waits until open connections have transferred their data,
    /// or until the drain timeout of [`forward`] expires.
    pub async fn close(mut self) {
        self.stop.send_replace(true);
        while self.tasks.join_next().await.is_some() {}
    }
}

impl Listeners {
    /// Binds to all `ports`. Prints ports that the system selected on standard error.
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

    /// Forwards connections to a guest, including connections that are already waiting.
    pub fn forward_to(self, opener: &PortOpener) -> Published {
        let mut tasks = JoinSet::new();
        let (stop, stopped) = watch::channel(false);
        for (listener, port) in self.0 {
            let mut stopped = stopped.clone();
            let stop = async move {
                // A dropped sender also stops the forwarding.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            tasks.spawn(forward(listener, opener.clone(), port, stop));
        }
        Published { tasks, stop }
    }
}
