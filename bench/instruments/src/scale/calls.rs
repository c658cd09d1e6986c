//! Calls whose cost should not depend on the number of objects on a host.

use super::population::{Population, sandbox_name, snapshot_name, template_name};
use crate::own_daemon::OwnDaemon;
use hyper::Method;
use jiffy_benchmark::daemon::{BenchmarkDaemon, timed};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Page size of lists. The smallest measured population has at least this number of items of each
/// kind.
pub(super) const PAGE: usize = 10;
/// Template of the sandboxes.
const TEMPLATE: &str = "base";

/// Client that sends a call.
#[derive(Clone, Copy)]
enum Caller {
    /// The operator, over the socket.
    Owner,
    /// A client with a key, over TCP.
    Key,
}

/// Method, path and body of a call for item `at` of a population.
type Request = fn(&Population, usize) -> (Method, String, Value);

/// Call to the control plane.
struct Call {
    name: &'static str,
    caller: Caller,
    request: Request,
    /// Restores the previous state. Not measured.
    undo: Option<Request>,
}

/// Returns a GET request without a body.
fn get(path: String) -> (Method, String, Value) {
    (Method::GET, path, Value::Null)
}

/// Returns a call of the operator that changes nothing, or whose change may remain.
const fn by_owner(name: &'static str, request: Request) -> Call {
    Call {
        name,
        caller: Caller::Owner,
        request,
        undo: None,
    }
}

/// Returns the request that renames sandbox `at`.
fn name(all: &Population, at: usize, name: String) -> (Method, String, Value) {
    let path = format!("/sandboxes/{}", all.sandboxes[at]);
    (Method::PATCH, path, json!({ "name": name }))
}

/// Calls that require no guest.
const CALLS: [Call; 14] = [
    by_owner("get a sandbox", |all, at| {
        get(format!("/sandboxes/{}", all.sandboxes[at]))
    }),
    by_owner("get a sandbox by its name", |_, at| {
        get(format!("/sandboxes/{}", sandbox_name(at)))
    }),
    Call {
        name: "get a sandbox with a key, over TCP",
        caller: Caller::Key,
        request: |all, at| get(format!("/sandboxes/{}", all.sandboxes[at])),
        undo: None,
    },
    by_owner("list sandboxes, a page", |_, _| {
        get(format!("/v2/sandboxes?limit={PAGE}"))
    }),
    by_owner("list sandboxes of a name", |_, at| {
        get(format!("/v2/sandboxes?name={}", sandbox_name(at)))
    }),
    Call {
        name: "name a sandbox",
        caller: Caller::Owner,
        request: |all, at| name(all, at, format!("{}x", sandbox_name(at))),
        undo: Some(|all, at| name(all, at, sandbox_name(at))),
    },
    by_owner("set a timeout", |all, at| {
        let path = format!("/sandboxes/{}/timeout", all.sandboxes[at]);
        (Method::POST, path, json!({ "timeout": 86_400 }))
    }),
    by_owner("get a snapshot", |all, at| {
        get(format!("/snapshots/{}", all.snapshots[at]))
    }),
    by_owner("list snapshots, a page", |_, _| {
        get(format!("/snapshots?limit={PAGE}"))
    }),
    by_owner("list snapshots of a sandbox", |all, at| {
        get(format!("/snapshots?sandboxID={}", all.sandboxes[at]))
    }),
    by_owner("list snapshots of a name", |_, at| {
        get(format!("/snapshots?name={}", snapshot_name(at)))
    }),
    by_owner("get a template", |_, at| {
        get(format!("/templates/{}", template_name(at)))
    }),
    by_owner("ask for a template's alias", |_, at| {
        get(format!("/templates/aliases/{}", template_name(at)))
    }),
    by_owner("list templates, a page", |_, _| {
        get(format!("/templates?limit={PAGE}"))
    }),
];

/// Returns the milliseconds of `n` calls of each kind, by name. Discards the first call of each
/// kind.
pub(super) async fn measure(
    daemon: &OwnDaemon,
    population: &mut Population,
    n: usize,
) -> anyhow::Result<Vec<(&'static str, Vec<f64>)>> {
    let mut rows = Vec::new();
    for call in &CALLS {
        let client = match call.caller {
            Caller::Owner => daemon.daemon.client(),
            Caller::Key => &daemon.keyed,
        };
        let mut samples = Vec::with_capacity(n);
        for round in 0..=n {
            // The calls are spread, because repeated calls for one item would use cached data.
            let at = population.spread(round, n);
            let (method, path, body) = (call.request)(population, at);
            let (_, took) = timed(client.call::<Value>(method, &path, &body)).await?;
            if round > 0 {
                samples.push(took);
            }
            // The next call finds the same state as this one.
            if let Some(undo) = call.undo {
                let (method, path, body) = undo(population, at);
                client.call::<Value>(method, &path, &body).await?;
            }
        }
        rows.push((call.name, samples));
    }
    rows.push(("remove a snapshot", removals(daemon, population, n).await?));
    Ok(rows)
}

/// Measures removals of snapshots without a paused sandbox.
async fn removals(
    daemon: &OwnDaemon,
    population: &mut Population,
    n: usize,
) -> anyhow::Result<Vec<f64>> {
    let mut samples = Vec::new();
    // A removed snapshot cannot be measured again, so each call needs its own.
    for snapshot in population.free.drain(..).take(n + 1) {
        // The API removes snapshots by the path of templates, as E2B does.
        let path = format!("/templates/{snapshot}");
        let removed = daemon
            .daemon
            .client()
            .call::<()>(Method::DELETE, &path, &());
        samples.push(timed(removed).await?.1);
    }
    // The first removal is discarded, as in all other measurements.
    Ok(samples.split_off(1))
}

/// Measures operations on real guests sequentially. Discards the first round.
pub(super) async fn measure_guests(
    daemon: &BenchmarkDaemon,
    n: usize,
) -> anyhow::Result<Vec<(&'static str, Vec<f64>)>> {
    let mut rows: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in 0..=n {
        let (sandbox, create) = timed(daemon.create_from(TEMPLATE)).await?;
        let id = sandbox.record.id.as_str();
        let (snapshot, snapshot_ms) = timed(daemon.snapshot(id)).await?;
        let (_, rollback) = timed(daemon.rollback(id, &snapshot.id)).await?;
        let ((), pause) = timed(daemon.pause(id)).await?;
        let ((), resume) = timed(daemon.resume(id)).await?;
        let ((), delete) = timed(daemon.remove(id)).await?;
        let ((), remove) = timed(daemon.remove_snapshot(&snapshot.id)).await?;
        let life = [create, snapshot_ms, rollback, pause, resume, delete, remove];
        for (at, took) in life.into_iter().enumerate().filter(|_| round > 0) {
            rows.entry(at).or_default().push(took);
        }
    }
    const NAMES: [&str; 7] = [
        "create",
        "snapshot",
        "rollback",
        "pause",
        "resume",
        "delete a sandbox",
        "remove a snapshot of a guest",
    ];
    let rows = rows.into_values();
    Ok(NAMES.into_iter().zip(rows).collect())
}
