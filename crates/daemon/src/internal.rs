//! Connections of sandboxes and functions to the API of this daemon. No listener accepts these
//! connections: the network and the functions transfer them to the gateway through a queue within
//! the daemon.

use jiffy_gateway::InternalConnection;
use jiffy_proto::internal::{ControlPlaneConnector, InternalOrigin};
use std::any::Any;
use std::os::unix::net::UnixStream;
use tokio::sync::mpsc;

/// Maximum number of connections that wait for the gateway. Further connections are rejected.
const MAX_QUEUED_CONNECTIONS: usize = 256;

/// Transfers connections to the gateway.
#[derive(Debug)]
struct GatewayConnector(mpsc::Sender<InternalConnection>);

impl ControlPlaneConnector for GatewayConnector {
    fn connect(
        &self,
        origin: InternalOrigin,
        stream: UnixStream,
        permit: Box<dyn Any + Send + Sync>,
    ) -> bool {
        let connection = InternalConnection {
            origin,
            stream,
            permit,
        };
        self.0.try_send(connection).is_ok()
    }
}

/// Creates a connector, and the queue from which the gateway accepts its connections.
pub fn connector() -> (
    impl ControlPlaneConnector + 'static,
    mpsc::Receiver<InternalConnection>,
) {
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CONNECTIONS);
    (GatewayConnector(sender), receiver)
}
