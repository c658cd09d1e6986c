//! Operations on sandboxes: life and snapshots.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{AWAITED, MAX_WAIT_S, STATES};
use axum::http::Method;
use jiffy_api_types::{
    ChangeSandbox, ConnectSandbox, ForkSandbox, Forked, ListedSandbox, MAX_SANDBOX_NAME,
    NewSandbox, PauseSandbox, Promoted, Refresh, RestartSandbox, ResumeSandbox, RollbackSandbox,
    RolledBack, Sandbox, SandboxDetail, SetTimeout, Snapshot, SnapshotSandbox, Waited,
};
use serde_json::{Value, json};

/// Parameters that narrow a list of sandboxes.
fn filters() -> Vec<Value> {
    let text = json!({ "type": "string", "maxLength": 8192 });
    let states = json!({
        "name": "state", "in": "query", "required": false, "style": "form", "explode": false,
        "schema": {
            "type": "array", "minItems": 1, "maxItems": STATES.len(),
            "items": { "type": "string", "enum": STATES },
        },
    });
    let mut metadata = query("metadata", text);
    if let Some(map) = metadata.as_object_mut() {
        let what = "`key=value&key2=value2`, each part URL-encoded, and that encoded as one value";
        map.insert("description".to_owned(), json!(what));
    }
    vec![
        metadata,
        states,
        query(
            "startedAfter",
            json!({ "type": "string", "format": "date-time" }),
        ),
        query("template", json!({ "type": "string", "maxLength": 256 })),
        query(
            "name",
            json!({ "type": "string", "maxLength": MAX_SANDBOX_NAME }),
        ),
    ]
}

/// Header by which a request is made once.
fn idempotent() -> Value {
    json!({
        "name": "Idempotency-Key", "in": "header", "required": false,
        "description": "The same request with the same key is answered again, not done again",
        "schema": { "type": "string", "pattern": "^[a-z0-9-]{1,255}$" },
    })
}

fn create(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::post(path, id, summary)
        .with(vec![idempotent()])
        .takes::<NewSandbox>()
        .answers::<Sandbox>(201, "It runs, and its agent has answered")
        .refuses(&[404, 409, 422, 429, 501, 503])
}

fn connect(path: &'static str, id: &'static str) -> Operation {
    let what = "Make sure that a sandbox runs; never shortens its time";
    let operation = Operation::post(path, id, what).may_take::<ConnectSandbox>();
    let answered = match path.starts_with("/v2/") {
        true => operation
            .answers::<Sandbox>(200, "It ran")
            .answers::<Sandbox>(201, "It was woken"),
        false => operation.answers::<Sandbox>(200, "It runs"),
    };
    answered.refuses(&[409, 429, 501, 503])
}

/// Operations on sandboxes.
pub(super) fn sandboxes() -> Vec<Operation> {
    vec![
        create(
            "/v2/sandboxes",
            "createSandboxV2",
            "Make a sandbox; its agent wants a token",
        ),
        create(
            "/sandboxes",
            "createSandbox",
            "Make a sandbox; its agent wants a token if `secure`",
        ),
        Operation::get(
            "/v2/sandboxes",
            "listSandboxesV2",
            "Sandboxes that run or sleep",
        )
        .with(filters())
        .paged()
        .answers::<Vec<ListedSandbox>>(200, "A page of them"),
        Operation::get(
            "/sandboxes",
            "listSandboxes",
            "Sandboxes that run, all at once",
        )
        .with(filters())
        .answers::<Vec<ListedSandbox>>(200, "All of them"),
        Operation::get("/sandboxes/{sandboxID}", "getSandbox", "One sandbox")
            .answers::<SandboxDetail>(200, "The sandbox"),
        Operation::delete("/sandboxes/{sandboxID}", "killSandbox", "End a sandbox")
            .with(vec![query(
                "forget",
                json!({ "type": "boolean", "default": false }),
            )])
            .answers_nothing(),
        Operation::new(
            Method::PATCH,
            "/sandboxes/{sandboxID}",
            "changeSandbox",
            "Give a sandbox another name",
        )
        .takes::<ChangeSandbox>()
        .answers::<SandboxDetail>(200, "The sandbox")
        .refuses(&[409]),
        connect("/v2/sandboxes/{sandboxID}/connect", "connectSandboxV2"),
        connect("/sandboxes/{sandboxID}/connect", "connectSandbox"),
        Operation::post(
            "/sandboxes/{sandboxID}/resume",
            "resumeSandbox",
            "Wake a sandbox",
        )
        .may_take::<ResumeSandbox>()
        .answers::<Sandbox>(201, "It was woken")
        .refuses(&[409, 429, 501, 503]),
        Operation::post(
            "/sandboxes/{sandboxID}/pause",
            "pauseSandbox",
            "Put a sandbox to sleep, memory and all",
        )
        .may_take::<PauseSandbox>()
        .answers_nothing()
        .refuses(&[409, 429, 501, 503, 507]),
        Operation::post(
            "/sandboxes/{sandboxID}/timeout",
            "setTimeout",
            "End its time so long from now",
        )
        .takes::<SetTimeout>()
        .answers_nothing()
        .refuses(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/refreshes",
            "refreshSandbox",
            "Give it at least so long from now",
        )
        .may_take::<Refresh>()
        .answers_nothing()
        .refuses(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/fork",
            "forkSandbox",
            "Make sandboxes that begin as this one is now",
        )
        .may_take::<ForkSandbox>()
        .answers::<Vec<Forked>>(201, "One entry per child, each with a sandbox or an error")
        .refuses(&[409, 429, 501, 503, 507]),
        Operation::post(
            "/sandboxes/{sandboxID}/promote",
            "promoteSandbox",
            "Keep this child of a fork and remove its siblings",
        )
        .answers::<Promoted>(200, "Who went")
        .refuses(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/rollback",
            "rollbackSandbox",
            "Put a sandbox back to a snapshot; it keeps its id",
        )
        .takes::<RollbackSandbox>()
        .answers::<RolledBack>(200, "It is as it was")
        .refuses(&[409, 429, 501, 503]),
        Operation::post(
            "/sandboxes/{sandboxID}/restart",
            "restartSandbox",
            "End its processes and start what its template starts; disk, id and kernel stay",
        )
        .may_take::<RestartSandbox>()
        .answers::<Sandbox>(200, "It runs")
        .refuses(&[409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/wait",
            "waitForSandbox",
            "Wait until a sandbox has ended, runs or sleeps",
        )
        .with(vec![
            query(
                "for",
                json!({ "type": "string", "enum": AWAITED, "default": "ended" }),
            ),
            query(
                "seconds",
                json!({ "type": "integer", "minimum": 0, "maximum": MAX_WAIT_S, "default": 0 }),
            ),
        ])
        .answers::<Waited>(200, "What it is now, or when the time was over"),
        Operation::post(
            "/sandboxes/{sandboxID}/snapshots",
            "snapshotSandbox",
            "Take a snapshot of a sandbox, which runs on",
        )
        .may_take::<SnapshotSandbox>()
        .answers::<Snapshot>(201, "The snapshot")
        .refuses(&[409, 429, 501, 503, 507]),
    ]
}
