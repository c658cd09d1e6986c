//! State shared by all connections of a gateway.

use crate::admission::ConnectionAdmission;
use crate::config::GatewayConfig;
use crate::counters::GatewayCounters;
use crate::pool::GuestConnectionPool;
use crate::preview_link::LinkSigner;
use std::sync::Arc;

/// State shared by all connections.
#[derive(Debug)]
pub(crate) struct GatewayState<S> {
    pub(crate) config: GatewayConfig,
    pub(crate) sandboxes: S,
    pub(crate) signer: Option<LinkSigner>,
    pub(crate) counters: Arc<GatewayCounters>,
    pub(crate) pool: Arc<GuestConnectionPool>,
    pub(crate) admission: Arc<ConnectionAdmission>,
}
