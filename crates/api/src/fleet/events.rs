//! Events of all members of a fleet, merged by their ids.

use super::Fleet;
use super::forward::{BufferedCall, Purpose};
use super::merged_log::{LogPage, add_parameter, merge, page_uri, read};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::events::EventSelection;
use axum::http::{Method, Uri};
use jiffy_api_types::{Event, EventPage};
use jiffy_engine_api::now_ms;
use jiffy_event_log::SandboxChoice;

impl Fleet {
    /// Merges the events of all members. Returns the members without an answer.
    pub(crate) async fn events(
        &self,
        app: &App,
        caller: &Caller,
        selection: &EventSelection,
    ) -> Result<(EventPage, Vec<String>), ApiError> {
        let call = BufferedCall {
            method: Method::GET,
            uri: uri(selection)?,
            headers: selection.credentials.clone(),
            body: Default::default(),
            caller: caller.clone(),
            client: None,
            purpose: Purpose::Part,
            placement: None,
        };
        let (own, others) = tokio::join!(
            app.local_events(caller, selection),
            self.send_to_all(&call, read::<EventPage>)
        );
        let (mut pages, mut missing) = (vec![part(own?)], Vec::new());
        for (member, _, page) in others {
            match page {
                Some(page) => pages.push(part(page)),
                None => missing.push(member.to_string()),
            }
        }
        missing.sort();
        let merged = merge(pages, |event| &event.id, &selection.page, now_ms());
        let page = EventPage {
            events: merged.entries,
            next: merged.next,
            more: merged.more,
            dropped: merged.dropped,
        };
        Ok((page, missing))
    }
}

/// Returns the request that selects the events.
fn uri(selection: &EventSelection) -> Result<Uri, ApiError> {
    let EventSelection { page, filter, .. } = selection;
    let mut uri = page_uri("/events", page);
    if let Some(SandboxChoice::Exact(id) | SandboxChoice::Prefix(id)) = &filter.sandbox {
        add_parameter(&mut uri, "sandboxID", id);
    }
    let types: Vec<_> = filter.types.iter().map(|kind| kind.name()).collect();
    if !types.is_empty() {
        uri += &format!("&types={}", types.join(","));
    }
    let uri = uri.parse();
    uri.map_err(|_| ApiError::invalid("the selection of events is invalid"))
}

fn part(page: EventPage) -> LogPage<Event> {
    LogPage {
        entries: page.events,
        next: page.next,
        more: page.more,
        dropped: page.dropped,
    }
}
