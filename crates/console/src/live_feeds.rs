//! Messages of `/live` that are not caused by messages of the browser: events, and the usage of
//! displayed sandboxes.

use crate::Console;
use crate::live::{Notice, text};
use crate::refusal::Refusal;
use crate::session_store::Session;
use axum::extract::ws::Message;
use jiffy_api::{ClientAddress, FollowedEvents};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

/// Interval at which the usage of displayed sandboxes is shown.
const DISPLAY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after an error before events are followed again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Session of a tab, and the address of its browser.
pub(crate) type Viewer = (Session, ClientAddress);

/// Sends the events after `after`, or from now on, to a tab. They are read from the log, so that a
/// slow tab misses none.
pub(crate) async fn follow(
    console: Console,
    (session, from): Viewer,
    mut after: Option<String>,
    queue: mpsc::Sender<Message>,
) {
    // The tab is closed when its session ends.
    while let Ok(Some(caller)) = console.caller_of(&session, from) {
        match console.app.follow_events(caller, after.as_deref()) {
            Ok(mut follower) => {
                while let Some(FollowedEvents { page, gap }) = follower.next().await {
                    after = page.next.clone().or(after);
                    let notice = Notice::Events {
                        events: page.events,
                        next: page.next,
                        gap: gap.is_some(),
                    };
                    if queue.send(text(&notice)).await.is_err() {
                        return;
                    }
                }
            }
            Err(error) => {
                let reason = Refusal::Api(error).message();
                tracing::debug!(reason, "a tab cannot follow events");
                // An id of another host or of a removed log.
                after = None;
            }
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// Sends the usage of sandboxes to a tab once per second. A slow tab misses values.
pub(crate) async fn display(
    console: Console,
    (session, from): Viewer,
    sandboxes: Vec<String>,
    queue: mpsc::Sender<Message>,
) {
    let mut ticks = tokio::time::interval(DISPLAY_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // The tab is closed when its session ends.
        let Ok(Some(caller)) = console.caller_of(&session, from) else {
            return;
        };
        let sandboxes = console.app.displayed_usage(&caller, &sandboxes);
        match queue.try_send(text(&Notice::Usage { sandboxes })) {
            Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return,
        }
    }
}
