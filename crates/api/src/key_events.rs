//! Records events of API keys: creation, change, revocation.
//!
//! The calls of the API report their own changes. On a single host, `jiffy key` changes the
//! database of keys without the daemon: [`report_keys`] polls for such changes. In a fleet, the
//! host that receives a call reports the change.

use crate::app::App;
use crate::keys::Key;
use jiffy_api_types::EventType;
use jiffy_engine_api::steps;
use jiffy_event_log::Event;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;

/// Interval at which the keys are compared.
const INTERVAL: Duration = Duration::from_secs(1);

/// Keys whose events were recorded: their ids, and whether they were revoked.
#[derive(Debug, Default)]
pub(crate) struct ReportedKeys(Mutex<HashMap<String, bool>>);

impl ReportedKeys {
    /// Marks an event as recorded. Returns whether it is new.
    fn mark(&self, kind: EventType, key: &Key) -> bool {
        let is_revoked = kind == EventType::KeyRevoked;
        let mut keys = self.0.lock();
        match keys.insert(key.id.clone(), is_revoked) {
            None => true,
            Some(before) => is_revoked && !before,
        }
    }
}

impl App {
    /// Records that a key was created or revoked, with the caller of the request in flight.
    pub(crate) fn report_key(&self, kind: EventType, key: &Key) {
        if !self.reported_keys.mark(kind, key) {
            return;
        }
        let request = steps::request();
        let caller = request.as_ref().map_or_else(
            // Only the owner of the host changes keys without a request.
            || Event::HOST_OWNER.to_owned(),
            |request| match &request.caller {
                Some(caller) => caller.to_string(),
                None => Event::HOST_OWNER.to_owned(),
            },
        );
        self.sandboxes.events().append(Event {
            owner: Some(key.id.clone()),
            caller: Some(caller),
            request: request.and_then(|request| request.id.as_ref().map(|id| id.to_string())),
            key: Some(key.id.clone()),
            name: Some(key.name.clone()),
            ..Event::new(kind)
        });
    }
}

/// Background task that records the keys that another process creates or revokes. Never returns.
pub async fn report_keys(app: App) {
    if app.keys.is_fleet() {
        // In a fleet, all changes are calls of the API, so nothing has to be polled.
        std::future::pending::<()>().await;
    }
    let mut known: Option<HashMap<String, bool>> = None;
    loop {
        let app_keys = app.keys.clone();
        // Reads the database.
        let keys = tokio::task::spawn_blocking(move || app_keys.list()).await;
        if let Ok(Ok(keys)) = keys {
            let before = known.take();
            for key in &keys {
                let is_revoked = key.revoked_ms.is_some();
                match before.as_ref().map(|before| before.get(&key.id)) {
                    // The first comparison: the keys are from before the start of the daemon.
                    None => {
                        app.reported_keys
                            .0
                            .lock()
                            .insert(key.id.clone(), is_revoked);
                    }
                    // The key has been in this state for one interval. An event that was recorded
                    // before is not recorded again.
                    Some(Some(was_revoked)) if *was_revoked == is_revoked => {
                        let kind = if is_revoked {
                            EventType::KeyRevoked
                        } else {
                            EventType::KeyCreated
                        };
                        app.report_key(kind, key);
                    }
                    // The key is new or was just revoked. It is reported at the next comparison: a
                    // call in flight may report it first, with its caller.
                    Some(_) => {}
                }
            }
            known = Some(
                keys.into_iter()
                    .map(|k| (k.id, k.revoked_ms.is_some()))
                    .collect(),
            );
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
