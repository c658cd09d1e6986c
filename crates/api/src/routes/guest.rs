//! Calls that observe or connect to a running sandbox: network, metrics, console, connections and
//! preview links.

use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::header_rules::parse_rules;
use crate::keys::KeyStatus;
use crate::lookup::Liveness;
use crate::network::{check_change, check_update};
use crate::query::Query;
use crate::wire::guest::metric;
use crate::wire::moment;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{
    AllMetrics, Connection, Connections, HeaderRequest, LogEntry, LogLevel, Logs, LogsV2, Metric,
    NetworkUpdate, Preview, RefusalReason, Verdict,
};
use jiffy_engine_api::ConnectionRecord;
use jiffy_sandbox_manager::{SandboxSettings, SandboxState};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum number of console lines, or of connections, per response.
pub(crate) const MAX_LINES: u64 = 1000;
/// Maximum number of sandboxes per request for metrics.
pub(crate) const MAX_SANDBOXES: usize = 100;
/// Maximum validity of a link, in seconds.
pub(crate) const MAX_LINK_S: u64 = 7 * 24 * 3600;
/// Maximum timestamp, in seconds since 1970: the year 9999.
pub(crate) const MAX_MOMENT: u64 = 253_402_300_799;
/// Default validity of a link, in seconds.
const DEFAULT_LINK_S: u64 = 3600;

/// `PUT /sandboxes/{id}/network`: replaces the network rules.
pub(super) async fn network(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<NetworkUpdate>,
) -> Result<StatusCode, ApiError> {
    let rules = parse_rules(body.rules.as_ref())?;
    let proxy = body.egress_proxy.clone();
    let change = check_update(body)?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    // The rules refer to secrets of the sandbox's owner, also if an administrator changes them.
    let tokens = &record.settings().identity_tokens;
    let rules = app.header_rules(record.owner(), rules, tokens)?;
    let authority = app.missing_authority(record.settings(), !rules.is_empty())?;
    let proxy = app.egress_proxy(record.owner(), proxy)?;
    let change = move |settings: &mut SandboxSettings| {
        change(&mut settings.network, rules);
        (settings.network.egress_proxy, settings.egress_proxy_secrets) = proxy.unzip();
        settings.header_authority = settings.header_authority.take().or(authority);
    };
    app.sandboxes.change_settings(record.id(), change).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PATCH /sandboxes/{id}/network`: changes the given network rules and retains the others.
pub(super) async fn change_network(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<NetworkUpdate>,
) -> Result<StatusCode, ApiError> {
    let rules = body.rules.is_some().then_some(body.rules.as_ref());
    let rules = rules.map(parse_rules).transpose()?;
    let proxy = body.egress_proxy.clone();
    let change = check_change(body)?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let tokens = &record.settings().identity_tokens;
    let rules = rules.map(|rules| app.header_rules(record.owner(), rules, tokens));
    let rules = rules.transpose()?;
    let has_rules = rules.as_ref().is_some_and(|rules| !rules.is_empty());
    let authority = app.missing_authority(record.settings(), has_rules)?;
    // The outer `None` retains the proxy.
    let proxy = proxy.map(|proxy| app.egress_proxy(record.owner(), Some(proxy)));
    let proxy = proxy.transpose()?;
    let change = move |settings: &mut SandboxSettings| {
        change(&mut settings.network);
        if let Some(rules) = rules {
            settings.network.rules = rules;
        }
        if let Some(proxy) = proxy {
            (settings.network.egress_proxy, settings.egress_proxy_secrets) = proxy.unzip();
        }
        settings.header_authority = settings.header_authority.take().or(authority);
    };
    app.sandboxes.change_settings(record.id(), change).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /sandboxes/{id}/metrics`: returns samples measured on the host, oldest first.
pub(super) async fn metrics(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<Vec<Metric>>, ApiError> {
    let bound = |name| query.number(name, 0..=MAX_MOMENT);
    let (start, end) = (bound("start")?, bound("end")?);
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let since = start.map(|s| s * 1000);
    // Include the whole last second.
    let until = end.map(|s| s * 1000 + 999);
    let samples = app.sandboxes.observe().history(record.id(), since, until)?;
    Ok(Json(samples.iter().map(metric).collect()))
}

/// `GET /sandboxes/metrics`: returns the latest sample of each sandbox, or with `now=true` a new
/// sample.
pub(super) async fn all_metrics(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Json<AllMetrics>, ApiError> {
    let ids: Vec<&str> = query
        .get("sandbox_ids")
        .unwrap_or_default()
        .split(',')
        .collect();
    // With `now`, each sandbox costs a measurement.
    if ids.len() > MAX_SANDBOXES {
        return Err(ApiError::invalid(format!(
            "`sandbox_ids` has too many entries: at most {MAX_SANDBOXES} are allowed"
        )));
    }
    let now = query.flag("now")?;
    let mut sandboxes = BTreeMap::new();
    for id in ids {
        // Unknown ids are omitted from the result, because sandboxes may be killed at any time.
        let Ok(record) = app.sandbox(&caller, id, Liveness::Alive) else {
            continue;
        };
        let fresh = if now {
            app.sandboxes.observe().now(record.id())?
        } else {
            None
        };
        let latest = match fresh {
            None => app
                .sandboxes
                .observe()
                .history(record.id(), None, None)?
                .last()
                .copied(),
            fresh => fresh,
        };
        if let Some(latest) = latest {
            let id = caller.shown_id(record.id()).to_owned();
            sandboxes.insert(id, metric(&latest));
        }
    }
    Ok(Json(AllMetrics { sandboxes }))
}

/// A line of a console.
struct ConsoleLine {
    at_ms: u64,
    text: String,
    level: LogLevel,
}

impl ConsoleLine {
    fn entry(&self) -> LogEntry {
        LogEntry {
            timestamp: moment(self.at_ms),
            message: self.text.clone(),
            level: self.level,
            step: None,
            fields: Some(BTreeMap::new()),
        }
    }

    /// Returns the line in the form that E2B's clients expect: a JSON object as text.
    fn v1(&self) -> jiffy_api_types::ConsoleLine {
        let line = json!({
            "level": self.level,
            "logger": "console",
            "message": self.text,
        });
        jiffy_api_types::ConsoleLine {
            timestamp: moment(self.at_ms),
            line: line.to_string(),
        }
    }
}

/// Returns the last lines of a sandbox's console, oldest first.
fn console(app: &App, caller: &Caller, id: &str) -> Result<Vec<ConsoleLine>, ApiError> {
    // The console of a broken sandbox explains its failure.
    let record = app.sandbox(caller, id, Liveness::IncludingBroken)?;
    let text = app
        .sandboxes
        .observe()
        .console_tail(record.id())?
        .unwrap_or_default();
    let mut lines: Vec<&str> = text.lines().collect();
    retain_last(&mut lines, MAX_LINES);
    // The console may contain the guest's host name, which is the complete id of the sandbox. A
    // read-only caller must not see it.
    let shown = |line: &str| line.replace(record.id(), caller.shown_id(record.id()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ms = now.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
    let reason = match &record.state() {
        SandboxState::Broken { cause, .. } => Some(format!("jiffy: {cause}")),
        _ => None,
    };
    // The reason why a sandbox is broken is appended as a line of its own.
    let texts: Vec<&str> = lines.iter().copied().chain(reason.as_deref()).collect();
    // A console has no times. Each line has the time at which this daemon first read it, so that
    // clients can request all lines after their last line. The lines of the first read get
    // increasing times that start at the last change of the sandbox's state (`changed_ms`).
    let times = (app.console_times).of(record.id(), &texts, record.changed_ms(), now_ms);
    let line = |(at, (&text, at_ms)): (usize, (&&str, u64))| ConsoleLine {
        at_ms,
        text: shown(text),
        level: if at < lines.len() {
            LogLevel::Info
        } else {
            LogLevel::Error
        },
    };
    Ok(texts.iter().zip(times).enumerate().map(line).collect())
}

/// `GET /sandboxes/{id}/logs`: returns the last console lines, or the first ones since `start`.
pub(super) async fn logs_v1(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<Logs>, ApiError> {
    let limit = query.number("limit", 0..=MAX_LINES)?.unwrap_or(MAX_LINES);
    let start = query.number("start", 0..=MAX_MOMENT * 1000)?;
    let mut lines = console(&app, &caller, &id)?;
    match start {
        Some(start) => retain_from(&mut lines, start, limit),
        None => retain_last(&mut lines, limit),
    }
    Ok(Json(Logs {
        logs: lines.iter().map(ConsoleLine::v1).collect(),
        log_entries: lines.iter().map(ConsoleLine::entry).collect(),
    }))
}

/// `GET /v2/sandboxes/{id}/logs`: returns console lines, filtered by level and text.
///
/// In the direction `forward`, the lines start at `cursor`, oldest first. In the direction
/// `backward`, they start at `cursor` and go back in time, newest first. Without a cursor, the last
/// lines are returned.
pub(super) async fn logs_v2(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<LogsV2>, ApiError> {
    let limit = query.number("limit", 0..=MAX_LINES)?.unwrap_or(MAX_LINES);
    let cursor = query.number("cursor", 0..=MAX_MOMENT * 1000)?;
    let directions = [("forward", false), ("backward", true)];
    let backward = query.word("direction", &directions)?.unwrap_or(false);
    let levels = LogLevel::ALL.map(|level| (level.name(), level));
    let level = query.word("level", &levels)?.unwrap_or(LogLevel::Debug);
    let mut lines = console(&app, &caller, &id)?;
    // Filter before limiting, so that the limit counts the matching lines.
    lines.retain(|line| line.level >= level);
    if let Some(search) = query.get("search") {
        lines.retain(|line| line.text.contains(search));
    }
    match cursor {
        Some(cursor) if !backward => retain_from(&mut lines, cursor, limit),
        // Backward or without a cursor: select the last lines, up to the cursor. The selected lines
        // are still in ascending order. The code below reverses them.
        cursor => {
            lines.retain(|line| cursor.is_none_or(|cursor| line.at_ms <= cursor));
            retain_last(&mut lines, limit);
        }
    }
    if backward {
        lines.reverse();
    }
    let logs = lines.iter().map(ConsoleLine::entry).collect();
    Ok(Json(LogsV2 { logs }))
}

/// Retains the first `limit` lines that are not older than `start_ms`.
fn retain_from(lines: &mut Vec<ConsoleLine>, start_ms: u64, limit: u64) {
    lines.retain(|line| line.at_ms >= start_ms);
    lines.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
}

/// Retains the last `limit` lines.
fn retain_last<T>(lines: &mut Vec<T>, limit: u64) {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    lines.drain(..lines.len().saturating_sub(limit));
}

/// Converts an entry of the connection record for the response.
fn connection(connection: ConnectionRecord) -> Connection {
    use jiffy_engine_api::RefusalReason as Reason;
    Connection {
        timestamp: moment(connection.at_ms),
        protocol: connection.protocol.to_string(),
        address: connection.address.map(|address| address.to_string()),
        port: connection.port,
        host: connection.host,
        question: connection.question,
        request: connection.header_use.map(|used| HeaderRequest {
            method: used.method,
            status: used.status,
            rule: used.rule,
            secrets: used.secrets,
            tokens: used.tokens,
        }),
        bytes_out: connection.bytes.map(|(out, _)| out),
        bytes_in: connection.bytes.map(|(_, back)| back),
        verdict: match connection.refused {
            Some(_) => Verdict::Refused,
            None => Verdict::Allowed,
        },
        reason: connection.refused.map(|why| match why {
            Reason::Rules => RefusalReason::Rules,
            Reason::Limit => RefusalReason::Limit,
            Reason::Host => RefusalReason::Host,
            Reason::Authority => RefusalReason::Authority,
            Reason::Proxy => RefusalReason::Proxy,
        }),
        times: connection.times,
    }
}

/// `GET /sandboxes/{id}/connections`: returns established connections and denied attempts.
pub(super) async fn connections(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<Connections>, ApiError> {
    let limit = query.number("limit", 0..=MAX_LINES)?.unwrap_or(MAX_LINES);
    let record = app.sandbox(&caller, &id, Liveness::IncludingBroken)?;
    let mut all = app.sandboxes.observe().connections(record.id()).await?;
    retain_last(&mut all.list, limit);
    Ok(Json(Connections {
        since: all.since_ms.map(moment),
        connections: all.list.into_iter().map(connection).collect(),
        missing: all.missing,
        unavailable: all.unavailable.into_iter().map(str::to_owned).collect(),
    }))
}

/// `GET /sandboxes/{id}/preview`: returns a signed link to a port. The link needs no key and
/// expires.
pub(super) async fn preview(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<Preview>, ApiError> {
    let port = query.number("port", 1..=65_535)?;
    let ttl = query
        .number("ttl", 1..=MAX_LINK_S)?
        .unwrap_or(DEFAULT_LINK_S);
    let port = port.and_then(|p| u16::try_from(p).ok());
    let port = port.ok_or_else(|| ApiError::invalid("`port` is missing: it must be 1 to 65535"))?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    if caller.is_read_only() {
        return Err(ApiError::forbidden(
            "cannot create a link with a key of the scope `read`: the link permits changes of the sandbox",
        ));
    }
    // The owner of a sandbox is an API key. If the key was revoked or has expired, the gateway
    // rejects links to its sandboxes.
    if app.keys.status(record.owner()) != KeyStatus::InForce {
        return Err(ApiError::conflict(
            "key_over",
            "the key that created this sandbox was revoked or has expired: links to the sandbox are invalid",
        ));
    }
    let Some(links) = &app.preview else {
        return Err(ApiError::unsupported(
            "links are not available: the daemon of this host serves no data plane",
        ));
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let expires = now.map_or(0, |d| d.as_secs()).saturating_add(ttl);
    Ok(Json(Preview {
        url: links.link(record.id(), port, expires),
        expires_at: moment(expires * 1000),
    }))
}
