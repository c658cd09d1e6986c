//! Connections from inside, on their way from where they are made to the gateway.

use jiffy_gateway::InternalConnection;
use jiffy_proto::internal::{ControlPlaneConnector, InternalOrigin};
use std::any::Any;
use std::os::unix::net::UnixStream;
use tokio::sync::mpsc;

/// Connections that wait for the gateway; further ones are refused.
const MAX_WAITING: usize = 256;

/// Hands connections to the gateway.
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

/// Makes a connector, and the end at which the gateway takes what it connects.
pub fn connector() -> (
    impl ControlPlaneConnector + 'static,
    mpsc::Receiver<InternalConnection>,
) {
    let (sender, receiver) = mpsc::channel(MAX_WAITING);
    (GatewayConnector(sender), receiver)
}
