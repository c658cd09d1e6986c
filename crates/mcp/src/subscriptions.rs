//! Notifications about changed resources.
//!
//! The server reads subscribed resources at an interval and compares their versions: neither the
//! guest nor the API has to know about the subscription.

use crate::error::{ToolError, ToolResult};
use crate::resources::{ResourceId, version};
use crate::session::Session;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};

/// Interval at which a resource is read.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of subscriptions of a client.
pub const MAX_SUBSCRIPTIONS: usize = 16;

/// Subscriptions that a client starts and ends individually (`resources/subscribe`).
#[derive(Default)]
pub struct Subscriptions(Mutex<HashMap<ResourceId, AbortOnDrop>>);

/// Aborts a task when it is dropped.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Subscriptions {
    /// Runs `task`, which notifies the client, until the client ends the subscription.
    pub fn start(
        &self,
        id: ResourceId,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> ToolResult<()> {
        let mut all = self.0.lock();
        // A subscription whose task has ended has no client.
        all.retain(|_, task| !task.0.is_finished());
        if all.len() >= MAX_SUBSCRIPTIONS && !all.contains_key(&id) {
            return Err(ToolError::new(format!(
                "too many subscriptions: at most {MAX_SUBSCRIPTIONS}"
            )));
        }
        all.insert(id, AbortOnDrop(tokio::spawn(task).abort_handle()));
        Ok(())
    }

    /// Ends a subscription.
    pub fn end(&self, id: &ResourceId) {
        self.0.lock().remove(id);
    }
}

/// Calls `changed` after each change of a resource, until it returns false.
pub async fn follow<F>(session: Arc<Session>, id: ResourceId, mut changed: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let mut ticks = interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known = None;
    loop {
        ticks.tick().await;
        // A resource that cannot be read at this time has not changed.
        let Some(now) = version(&session, &id).await else {
            continue;
        };
        if known.replace(now).is_some_and(|before| before != now) && !changed().await {
            return;
        }
    }
}
