//! Calls on the processes inside a sandbox.

use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::query::Query;
use crate::wire::moment;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{GuestProcess, GuestProcesses, SignalProcess};
use jiffy_engine_api::now_ms;
use std::cmp::Ordering;

/// Maximum and default number of processes in a response.
pub(crate) const MAX_PROCESSES: u64 = 10_000;
pub(crate) const DEFAULT_PROCESSES: u64 = 1000;
/// Maximum length of a filter in bytes.
pub(crate) const MAX_PROCESS_FILTER: usize = 256;

/// Order of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Pid,
    Cpu,
    Memory,
}

/// Orders with their names in requests.
const ORDERS: [(&str, Order); 3] = [
    ("pid", Order::Pid),
    ("cpu", Order::Cpu),
    ("memory", Order::Memory),
];
/// Names of the orders.
pub(crate) const PROCESS_ORDERS: [&str; 3] = [ORDERS[0].0, ORDERS[1].0, ORDERS[2].0];

/// `GET /sandboxes/{id}/processes`: lists the processes inside a sandbox. Command lines may contain
/// secrets, so read-only keys are rejected.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<GuestProcesses>, ApiError> {
    let order = query.word("sort", &ORDERS)?.unwrap_or(Order::Pid);
    let limit = query.number("limit", 1..=MAX_PROCESSES)?;
    let limit = usize::try_from(limit.unwrap_or(DEFAULT_PROCESSES)).unwrap_or(usize::MAX);
    let filter = query.get("filter").unwrap_or_default().to_lowercase();
    if filter.len() > MAX_PROCESS_FILTER {
        return Err(ApiError::invalid(format!(
            "`filter` has more than {MAX_PROCESS_FILTER} bytes"
        )));
    }
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    if caller.is_read_only() {
        return Err(ApiError::read_only());
    }
    let listed = app.sandboxes.observe().processes(record.id()).await?;
    let listed = listed.ok_or_else(too_old)?;
    let (total, now) = (listed.len(), now_ms());
    let processes = listed.into_iter().map(|process| wire(process, now));
    let mut processes: Vec<GuestProcess> = processes.filter(|p| matches(p, &filter)).collect();
    processes.sort_by(|a, b| compare(order, a, b));
    processes.truncate(limit);
    Ok(Json(GuestProcesses { processes, total }))
}

/// `POST /sandboxes/{id}/processes/{pid}/signal`: sends a signal to a process inside a sandbox.
pub(super) async fn signal(
    State(app): State<App>,
    caller: Caller,
    Path((id, pid)): Path<(String, String)>,
    Required(body): Required<SignalProcess>,
) -> Result<StatusCode, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let unknown = || {
        ApiError::not_found(
            "not_found",
            format!(
                "process {} does not exist in sandbox {}; `jiffy processes` lists the processes",
                crate::lookup::short(&pid),
                record.id()
            ),
        )
    };
    let number: u32 = pid.parse().map_err(|_| unknown())?;
    // Linux has no larger process ids. Process 1 runs the sandbox: a kill of the sandbox ends it.
    if number > i32::MAX.unsigned_abs() {
        return Err(unknown());
    }
    if number < 2 {
        return Err(ApiError::invalid(
            "process 1 runs the sandbox and receives no signals: kill the sandbox instead",
        ));
    }
    let observe = app.sandboxes.observe();
    let sent = observe.signal_process(record.id(), number, body.signal.number(), body.start_ticks);
    if sent.await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(unknown())
    }
}

fn too_old() -> ApiError {
    ApiError::unsupported(
        "the agent of this sandbox is of an earlier version, which cannot list processes: use a \
         new sandbox",
    )
}

/// Returns whether a process contains the text of a filter, which is in lower case.
fn matches(process: &GuestProcess, filter: &str) -> bool {
    let texts = [&process.name, &process.command, &process.user];
    filter.is_empty()
        || process.pid.to_string() == filter
        || texts
            .iter()
            .any(|text| text.to_lowercase().contains(filter))
}

fn compare(order: Order, a: &GuestProcess, b: &GuestProcess) -> Ordering {
    let by = match order {
        Order::Pid => Ordering::Equal,
        Order::Cpu => b.cpu_percent.total_cmp(&a.cpu_percent),
        Order::Memory => b.memory_bytes.cmp(&a.memory_bytes),
    };
    by.then(a.pid.cmp(&b.pid))
}

/// Converts a process of a guest.
fn wire(process: jiffy_agent_client::GuestProcess, now_ms: u64) -> GuestProcess {
    let age_ms = (process.age_seconds * 1000.0) as u64;
    // A new process has used little: a short time would give a high share.
    let share = process.cpu_seconds / process.age_seconds.max(1.0) * 100.0;
    GuestProcess {
        pid: process.pid,
        parent_pid: process.parent,
        user: process.user,
        name: process.name,
        command: process.command,
        state: process.state,
        cpu_seconds: process.cpu_seconds,
        cpu_percent: (share * 10.0).round() / 10.0,
        memory_bytes: process.memory_bytes,
        started_at: moment(now_ms.saturating_sub(age_ms)),
        start_ticks: process.start_ticks,
    }
}
