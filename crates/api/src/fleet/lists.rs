//! Lists of sandboxes, merged from the answers of all members.

use super::forward::BufferedCall;
use super::route::buffer;
use super::{Fleet, unavailable};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::page::{NEXT, Page, PagePosition};
use crate::query::Query;
use axum::Json;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_fleet_core::MemberId;
use serde_json::Value;
use std::collections::BTreeMap;

/// Maximum size of the answer of a member.
const MAX_ANSWER_BYTES: usize = 32 << 20;
/// Header that names the members without an answer.
pub(crate) const INCOMPLETE: HeaderName = HeaderName::from_static("jiffy-incomplete");

/// Successful answers of the members to one call.
struct Answers {
    bodies: Vec<Value>,
    /// A further page of a member exists.
    has_next: bool,
    /// Members that did not answer in time.
    missing: Vec<MemberId>,
}

impl Answers {
    fn add(&mut self, (body, has_next): (Value, bool)) {
        self.bodies.push(body);
        self.has_next |= has_next;
    }

    /// Returns a response that names the members without an answer.
    ///
    /// # Errors
    /// An error that names them if the caller requires a complete answer.
    fn respond(&self, query: &Query, body: Value) -> Result<Response, ApiError> {
        let names: Vec<_> = self.missing.iter().map(ToString::to_string).collect();
        let names = names.join(",");
        if query.flag("complete")? && !names.is_empty() {
            return Err(unavailable(format!("hosts without an answer: {names}")));
        }
        let mut response = Json(body).into_response();
        if !names.is_empty()
            && let Ok(value) = HeaderValue::from_str(&names)
        {
            response.headers_mut().insert(INCOMPLETE, value);
        }
        Ok(response)
    }
}

/// Returns the JSON of a response, and whether a further page exists. `None` if it is no success.
async fn read(response: Response) -> Option<(Value, bool)> {
    if !response.status().is_success() {
        return None;
    }
    let has_next = response.headers().contains_key(NEXT);
    let body = to_bytes(response.into_body(), MAX_ANSWER_BYTES)
        .await
        .ok()?;
    Some((serde_json::from_slice(&body).ok()?, has_next))
}

impl Fleet {
    /// Merges the pages of all members by creation time and id.
    pub(super) async fn list(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let query = Query::parse(request.uri().query().unwrap_or_default())?;
        let page = request
            .uri()
            .path()
            .starts_with("/v2/")
            .then(|| Page::from_query(&query))
            .transpose()?;
        let mut answers = match self.call_all(caller, request, next).await? {
            Ok(answers) => answers,
            Err(response) => return Ok(response),
        };
        // A sandbox that moves at this moment may be on two hosts.
        let mut items: BTreeMap<PagePosition, Value> = BTreeMap::new();
        for body in answers.bodies.drain(..) {
            let Value::Array(page) = body else { continue };
            for item in page {
                let is_running = item["state"] == "running";
                let position = position(&item);
                if is_running || !items.contains_key(&position) {
                    items.insert(position, item);
                }
            }
        }
        let items: Vec<_> = items.into_iter().collect();
        let Some(page) = page else {
            let items = items.into_iter().map(|(_, item)| item).collect();
            return answers.respond(&query, Value::Array(items));
        };
        let (items, token) =
            page.cut_merged(items, answers.has_next, |(position, _)| position.clone());
        let items = items.into_iter().map(|(_, item)| item).collect();
        let mut response = answers.respond(&query, Value::Array(items))?;
        if let Some(token) = token {
            response.headers_mut().insert(NEXT, token);
        }
        Ok(response)
    }

    /// Merges the usage of sandboxes on all members.
    pub(super) async fn merge_metrics(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let query = Query::parse(request.uri().query().unwrap_or_default())?;
        let mut answers = match self.call_all(caller, request, next).await? {
            Ok(answers) => answers,
            Err(response) => return Ok(response),
        };
        let mut merged = serde_json::Map::new();
        for mut body in answers.bodies.drain(..) {
            if let Some(Value::Object(sandboxes)) = body.get_mut("sandboxes").map(Value::take) {
                merged.extend(sandboxes);
            }
        }
        let body = serde_json::json!({ "sandboxes": merged });
        answers.respond(&query, body)
    }

    /// Sends a call to all members at the same time. Returns the response of this member instead if
    /// it is not successful: the call is invalid.
    async fn call_all(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Result<Answers, Response>, ApiError> {
        let (call, request) = buffer(caller, request).await?;
        let others = tokio::spawn(self.clone().call_others(call));
        let own = next.run(request).await;
        if !own.status().is_success() {
            others.abort();
            return Ok(Err(own));
        }
        let own = read(own).await;
        let own = own.ok_or_else(|| unavailable("the list of this host cannot be read"))?;
        let others = others.await;
        let mut answers = others.map_err(|e| ApiError::internal(e.to_string()))?;
        answers.add(own);
        Ok(Ok(answers))
    }

    async fn call_others(self, call: BufferedCall) -> Answers {
        let mut answers = Answers {
            bodies: Vec::new(),
            has_next: false,
            missing: Vec::new(),
        };
        for (member, _, answer) in self.send_to_all(&call, read).await {
            match answer {
                Some(answer) => answers.add(answer),
                None => answers.missing.push(member),
            }
        }
        answers.missing.sort();
        answers
    }
}

/// Returns the position of a listed sandbox.
fn position(item: &Value) -> PagePosition {
    let text = |name: &str| item[name].as_str().unwrap_or_default();
    let started: Option<jiff::Timestamp> = text("startedAt").parse().ok();
    let ms = started.map_or(0, |time| time.as_millisecond());
    let ms = u64::try_from(ms).unwrap_or(0);
    (ms, text("sandboxID").to_owned())
}
