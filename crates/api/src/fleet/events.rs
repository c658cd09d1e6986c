//! Events of all members of a fleet: requests the events of each member, and merges them by their
//! ids.
//!
//! A *member* is a host of the fleet.

use super::Fleet;
use super::merged_log::{LogPage, PageOfLog, add_parameter, page_uri};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::EventSelection;
use jiffy_api_types::{Event, EventPage};
use jiffy_event_log::SandboxChoice;

impl Fleet {
    /// Merges the events of all members. Returns the members without an answer.
    pub(crate) async fn events(
        &self,
        app: &App,
        caller: &Caller,
        selection: &EventSelection,
    ) -> Result<(EventPage, Vec<String>), ApiError> {
        let uri = uri(selection);
        let call = (&*uri, &selection.credentials);
        let own = app.local_events(caller, selection);
        self.merged(caller, call, &selection.page, own).await
    }
}

impl PageOfLog for EventPage {
    type Entry = Event;

    fn into_page(self) -> LogPage<Event> {
        LogPage {
            entries: self.events,
            next: self.next,
            more: self.more,
            dropped: self.dropped,
        }
    }

    fn from_page(page: LogPage<Event>) -> Self {
        Self {
            events: page.entries,
            next: page.next,
            more: page.more,
            dropped: page.dropped,
        }
    }

    fn id(event: &Event) -> &String {
        &event.id
    }
}

/// Returns the request that selects the events.
fn uri(selection: &EventSelection) -> String {
    let EventSelection { page, filter, .. } = selection;
    let mut uri = page_uri("/events", page);
    if let Some(SandboxChoice::Exact(id) | SandboxChoice::Prefix(id)) = &filter.sandbox {
        add_parameter(&mut uri, "sandboxID", id);
    }
    let types: Vec<_> = filter.types.iter().map(|kind| kind.name()).collect();
    if !types.is_empty() {
        uri += &format!("&types={}", types.join(","));
    }
    uri
}
