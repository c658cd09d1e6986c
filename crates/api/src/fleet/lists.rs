//! Lists of objects (sandboxes, snapshots and others), merged from the answers of all members.
//!
//! A *member* is a host of the fleet.

use super::forward::{BufferedCall, Purpose};
use super::route::buffer;
use super::{Fleet, unavailable};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::page::{NEXT, Page, PagePosition, with_next};
use crate::query::Query;
use crate::routes::bounds::{DEFAULT_VOLUMES, MAX_UNPAGED};
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

/// List of objects other than sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listed {
    Templates,
    Snapshots,
    Functions,
    Pools,
    VolumeSnapshots,
}

impl Listed {
    /// Returns the list at a path.
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/templates" => Some(Self::Templates),
            "/snapshots" => Some(Self::Snapshots),
            "/functions" => Some(Self::Functions),
            "/pools" => Some(Self::Pools),
            "/volumesnapshots" => Some(Self::VolumeSnapshots),
            _ => None,
        }
    }
}

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
        if query.flag("complete")? && !names.is_empty() {
            let names = names.join(",");
            return Err(unavailable(format!("hosts without an answer: {names}")));
        }
        let mut response = Json(body).into_response();
        add_incomplete(&mut response, &names);
        Ok(response)
    }
}

/// Adds the header that names the members without an answer, if there are any.
pub(super) fn add_incomplete(response: &mut Response, members: &[String]) {
    if !members.is_empty()
        && let Ok(names) = HeaderValue::from_str(&members.join(","))
    {
        response.headers_mut().insert(INCOMPLETE, names);
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
        // A sandbox that moves at this moment may be on two hosts. The running one is shown.
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
        let response = answers.respond(&query, Value::Array(items))?;
        Ok(with_next(response, token))
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

    /// Adds the usage of a key on all members.
    pub(super) async fn merge_limits(
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
        // Start from the answer of this member, which is the last one. It contains the limits,
        // which must not be added, unlike the usage.
        let mut budget = answers.bodies.pop().unwrap_or_default();
        for other in answers.bodies.drain(..) {
            add(&mut budget["used"], &other["used"]);
        }
        answers.respond(&query, budget)
    }

    /// Merges lists of objects. An object that several members have appears once.
    pub(super) async fn merge_objects(
        &self,
        listed: Listed,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let query = Query::parse(request.uri().query().unwrap_or_default())?;
        let page = match listed {
            Listed::Templates => Page::by_name(&query, MAX_UNPAGED)?,
            Listed::VolumeSnapshots => Page::by_name(&query, DEFAULT_VOLUMES)?,
            _ => Page::from_query(&query)?,
        };
        let mut answers = match self.call_all(caller, request, next).await? {
            Ok(answers) => answers,
            Err(response) => return Ok(response),
        };
        let bodies = std::mem::take(&mut answers.bodies).into_iter();
        let items = bodies.flat_map(|body| match body {
            Value::Array(items) => items,
            _ => Vec::new(),
        });
        let (items, token) = match listed {
            Listed::Templates => merge_templates(items, &page, answers.has_next),
            Listed::Snapshots => {
                let items = merge_by(items, snapshot_position, is_stored_better);
                let items: Vec<_> = items.into_iter().collect();
                let position = |(position, _): &(PagePosition, Value)| position.clone();
                let (items, token) = page.cut_merged(items, answers.has_next, position);
                (items.into_iter().map(|(_, item)| item).collect(), token)
            }
            Listed::Functions => {
                let key = |item: &Value| {
                    let owner = item["owner"].as_str().map(str::to_owned);
                    (owner, text(item, "name"))
                };
                let is_newer =
                    |new: &Value, old: &Value| new["version"].as_u64() > old["version"].as_u64();
                (merge_by(items, key, is_newer).into_values().collect(), None)
            }
            Listed::Pools => (merge_pools(items), None),
            Listed::VolumeSnapshots => {
                let id = |item: &Value| text(item, "volumeSnapshotID");
                let items: Vec<_> = merge_by(items, id, |_, _| false).into_iter().collect();
                // In lists by name, the time of all positions is 0.
                let position = |(id, _): &(String, Value)| (0, id.clone());
                let (items, token) = page.cut_merged(items, answers.has_next, position);
                (items.into_iter().map(|(_, item)| item).collect(), token)
            }
        };
        let response = answers.respond(&query, Value::Array(items))?;
        Ok(with_next(response, token))
    }

    /// Sends a call to all members at the same time. Returns the response of this member instead if
    /// it is not successful: the call is invalid.
    async fn call_all(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Result<Answers, Response>, ApiError> {
        let (mut call, mut request) = buffer(caller, request).await?;
        call.purpose = Purpose::Part;
        request.extensions_mut().insert(ListPart);
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

    /// Sends a call to all other members, and collects their answers.
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

/// Marks a call whose answer is merged with the answers of other members. For such a call, some
/// lists return pairs of position and item, so that the receiver can sort the merged items.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListPart;

fn text(item: &Value, name: &str) -> String {
    item[name].as_str().unwrap_or_default().to_owned()
}

/// Returns the items by their keys. Of several items with one key, `is_better` selects one.
fn merge_by<K: Ord>(
    items: impl Iterator<Item = Value>,
    key: impl Fn(&Value) -> K,
    is_better: impl Fn(&Value, &Value) -> bool,
) -> BTreeMap<K, Value> {
    let mut merged: BTreeMap<K, Value> = BTreeMap::new();
    for item in items {
        let key = key(&item);
        if merged.get(&key).is_none_or(|old| is_better(&item, old)) {
            merged.insert(key, item);
        }
    }
    merged
}

/// Merges pairs of the name `[owner/]name` and the template, in the order of owner and name.
/// `has_next` is true if a host has further templates.
fn merge_templates(
    items: impl Iterator<Item = Value>,
    page: &Page,
    has_next: bool,
) -> (Vec<Value>, Option<HeaderValue>) {
    let key = |pair: &Value| {
        let name = pair[0].as_str().unwrap_or_default();
        match name.split_once('/') {
            Some((owner, name)) => (Some(owner.to_owned()), name.to_owned()),
            None => (None, name.to_owned()),
        }
    };
    // Only the host that built a template knows its id. Hosts with a copy show the name as the id.
    let has_id = |pair: &Value| pair[1]["templateID"] != pair[1]["aliases"][0];
    let merged = merge_by(items, key, |new, old| has_id(new) && !has_id(old));
    let has_next = has_next || merged.len() > page.limit();
    let mut last = None;
    let mut shown = Vec::new();
    for (_, mut pair) in merged.into_iter().take(page.limit()) {
        last = pair[0].as_str().and_then(Page::next_name);
        shown.push(pair[1].take());
    }
    (shown, last.filter(|_| has_next))
}

/// Adds the sizes of the pools of a template.
fn merge_pools(items: impl Iterator<Item = Value>) -> Vec<Value> {
    let mut pools: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    for item in items {
        let sums = pools.entry(text(&item, "templateID")).or_default();
        for (sum, name) in sums.iter_mut().zip(["size", "ready"]) {
            *sum = sum.saturating_add(item[name].as_u64().unwrap_or(0));
        }
    }
    let pool = |(template, sums): (String, [u64; 2])| {
        let [size, ready] = sums;
        serde_json::json!({ "templateID": template, "size": size, "ready": ready })
    };
    pools.into_iter().map(pool).collect()
}

/// Returns whether a copy of a snapshot is complete and the other one is not.
fn is_stored_better(new: &Value, old: &Value) -> bool {
    new["status"] == "ready" && old["status"] != "ready"
}

fn snapshot_position(item: &Value) -> PagePosition {
    (milliseconds(item, "createdAt"), text(item, "snapshotID"))
}

fn milliseconds(item: &Value, field: &str) -> u64 {
    let time = item[field].as_str().unwrap_or_default();
    let time: Option<jiff::Timestamp> = time.parse().ok();
    let ms = time.map_or(0, |time| time.as_millisecond());
    u64::try_from(ms).unwrap_or(0)
}

/// Adds all numbers of an object to the numbers with the same names.
fn add(sum: &mut Value, other: &Value) {
    match sum {
        Value::Object(fields) => {
            for (name, value) in fields {
                add(value, &other[&**name]);
            }
        }
        Value::Number(number) => {
            let (own, other) = (number.as_u64(), other.as_u64());
            *sum = own.unwrap_or(0).saturating_add(other.unwrap_or(0)).into();
        }
        _ => {}
    }
}

/// Returns the position of a listed sandbox.
fn position(item: &Value) -> PagePosition {
    (milliseconds(item, "startedAt"), text(item, "sandboxID"))
}
