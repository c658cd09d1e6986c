//! Messages of `/live` that are not caused by messages of the browser: events, and the usage of
//! displayed sandboxes.

use crate::Console;
use crate::live::{Notice, text};
use crate::refusal::Refusal;
use crate::session_store::Session;
use axum::extract::ws::Message;
use jiffy_api::{ClientAddress, FollowedEvents};
use std::sync::Arc;
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
                tracing::debug!(reason, "cannot read the events for a browser tab");
                // The id may be of another host or of a removed log. Continue with new events.
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
        let usage = usage_notice(&console.app.displayed_usage(&caller, &sandboxes));
        match queue.try_send(Message::Text(usage.into())) {
            Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return,
        }
    }
}

/// Returns the message with the usage of sandboxes by their ids. All tabs share the text of each
/// sandbox, so that it is encoded once per second.
fn usage_notice(sandboxes: &[(String, Arc<str>)]) -> String {
    let mut text = String::from(r#"{"type":"usage","sandboxes":{"#);
    for (number, (id, usage)) in sandboxes.iter().enumerate() {
        if number > 0 {
            text.push(',');
        }
        // Ids are letters and digits.
        text.extend(["\"", id, "\":", usage]);
    }
    text.push_str("}}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_with_the_usage_is_json() {
        let usage: [(String, Arc<str>); 2] = [
            ("a1".to_owned(), r#"{"memUsed":1}"#.into()),
            ("b2".to_owned(), r#"{"memUsed":2}"#.into()),
        ];
        for count in 0..=2 {
            let message: serde_json::Value =
                serde_json::from_str(&usage_notice(&usage[..count])).unwrap();
            assert_eq!(message["type"], "usage");
            assert_eq!(message["sandboxes"].as_object().unwrap().len(), count);
        }
        let last: serde_json::Value = serde_json::from_str(&usage_notice(&usage)).unwrap();
        assert_eq!(last["sandboxes"]["b2"]["memUsed"], 2);
    }
}
