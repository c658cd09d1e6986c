//! Requests to functions of other members of the fleet, by the host name of the function. The
//! *label* is the part of this host name that identifies the function.
//!
//! A *member* is a host of the fleet. A *probe* is a forwarded call that only tests whether the
//! receiver has the function.

use super::forward::{BufferedCall, FUNCTION, Forwarded, Purpose};
use super::object_calls::read_probe;
use super::objects::{Match, own};
use super::{Fleet, host_lost, unavailable};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::routes::FunctionHost;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_fleet_core::MemberId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time for which the place of a function is remembered.
const KNOWN: Duration = Duration::from_secs(5);
/// Time for which a function that no member has is remembered.
const UNKNOWN: Duration = Duration::from_secs(1);
/// Maximum number of remembered functions.
const MAX_REMEMBERED: usize = 4096;

/// Places of functions by their labels. Clients need no key to request a label, so a request must
/// not always cause a search.
#[derive(Debug, Default)]
pub(super) struct FunctionPlaces(Mutex<HashMap<String, (Option<MemberId>, Instant)>>);

impl FunctionPlaces {
    /// Returns the remembered place. The outer `None` means that a search is needed.
    fn get(&self, label: &str, now: Instant) -> Option<Option<MemberId>> {
        let places = self.0.lock();
        let (place, until) = *places.get(label)?;
        (now < until).then_some(place)
    }

    /// Remembers the host of a function for a short time. `None` means that no host has it.
    fn insert(&self, label: &str, place: Option<MemberId>, now: Instant) {
        let mut places = self.0.lock();
        if places.len() >= MAX_REMEMBERED {
            places.retain(|_, (_, until)| now < *until);
        }
        if places.len() < MAX_REMEMBERED {
            let time = if place.is_some() { KNOWN } else { UNKNOWN };
            places.insert(label.to_owned(), (place, now + time));
        }
    }
}

/// Forwards a request to the member that has the function.
pub(crate) async fn route_function(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let label = request.extensions().get::<FunctionHost>().cloned();
    let (Some(fleet), Some(FunctionHost(label))) = (app.fleet.clone(), label) else {
        return next.run(request).await;
    };
    let functions = app.functions();
    let is_here = functions.is_ok_and(|functions| functions.find_label(&label).is_ok());
    match request.extensions().get::<Forwarded>() {
        Some(Forwarded(Purpose::Probe)) => {
            let found: Option<Match> = is_here.then(own);
            return Json(found).into_response();
        }
        // A call of a client for a function that is not on this host.
        None if !is_here => {}
        // A forwarded call is not forwarded again.
        _ => return next.run(request).await,
    }
    let forwarded = fleet.call_function(&label, request, next).await;
    forwarded.unwrap_or_else(IntoResponse::into_response)
}

impl Fleet {
    /// Passes a request to the member that has the function, or to this host.
    async fn call_function(
        &self,
        label: &str,
        mut request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let Some(member) = self.function_place(label).await? else {
            return Ok(next.run(request).await);
        };
        let row = self.node.members().row(member).cloned();
        let row = row.filter(|row| row.state.is_live());
        let row = row.ok_or_else(|| host_lost(member, "it was declared dead"))?;
        let caller = request.extensions().get::<Caller>().cloned();
        // The label was parsed from a host name.
        if let Ok(value) = HeaderValue::from_str(label) {
            request.headers_mut().insert(FUNCTION, value);
        }
        let sent = self.send_request(member, &row.address, caller.as_ref(), request);
        sent.await.map_err(|error| host_lost(member, &error.reason))
    }

    /// Returns the other member that has a function.
    async fn function_place(&self, label: &str) -> Result<Option<MemberId>, ApiError> {
        if let Some(place) = self.functions.get(label, Instant::now()) {
            return Ok(place);
        }
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_str(label);
        let value = value.map_err(|_| ApiError::invalid("the name of the function is invalid"))?;
        headers.insert(FUNCTION, value);
        let probe = BufferedCall {
            method: Method::GET,
            uri: Uri::from_static("/"),
            headers,
            body: Default::default(),
            caller: Caller::Owner,
            client: None,
            purpose: Purpose::Probe,
            placement: None,
        };
        // False if a member does not answer.
        let mut is_complete = true;
        let mut place = None;
        for (member, _, answer) in self.send_to_all(&probe, read_probe).await {
            match answer {
                Some(Some(_)) => place = Some(member),
                Some(None) => {}
                None => is_complete = false,
            }
        }
        if place.is_none() && !is_complete {
            let message = "hosts that may have the function do not answer";
            return Err(unavailable(message));
        }
        self.functions.insert(label, place, Instant::now());
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_functions_are_remembered_for_a_short_time_and_bounded() {
        let places = FunctionPlaces::default();
        let start = Instant::now();
        places.insert("a", Some(MemberId(2)), start);
        places.insert("b", None, start);
        assert_eq!(places.get("a", start + UNKNOWN), Some(Some(MemberId(2))));
        assert_eq!(places.get("a", start + KNOWN), None);
        assert_eq!(places.get("b", start), Some(None));
        assert_eq!(places.get("b", start + UNKNOWN), None);
        for n in 0..2 * MAX_REMEMBERED {
            places.insert(&n.to_string(), None, start);
        }
        assert!(places.0.lock().len() <= MAX_REMEMBERED);
        places.insert("later", None, start + UNKNOWN);
        assert_eq!(places.get("later", start + UNKNOWN), Some(None));
    }
}
