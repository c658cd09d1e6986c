//! [`WebhookConnector`]: opens the connections to the servers of webhooks. The same rules apply as
//! to functions: the public internet, and the address ranges of `--allow-private`.

use jiffy_function_manager::egress::{EgressSettings, HostConnector};
use jiffy_webhooks::{Connect, Connecting, Connection};

/// Connects to the servers of webhooks.
#[derive(Debug)]
pub struct WebhookConnector(HostConnector);

impl WebhookConnector {
    /// Creates a connector with the rules of functions.
    pub fn new(settings: EgressSettings) -> anyhow::Result<Self> {
        Ok(Self(HostConnector::open(settings)?))
    }
}

impl Connect for WebhookConnector {
    fn connect<'a>(&'a self, host: &'a str, port: u16, is_tls: bool) -> Connecting<'a> {
        Box::pin(async move {
            let connected = self.0.connect(host, port, is_tls).await;
            let stream: Box<dyn Connection> = Box::new(connected.map_err(|e| e.to_string())?);
            Ok(stream)
        })
    }
}
