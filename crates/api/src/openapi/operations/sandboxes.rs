//! Operations on sandboxes: lifecycle and snapshots.

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

/// Parameters of lists of sandboxes.
fn list_parameters() -> Vec<Value> {
    let text = json!({ "type": "string", "maxLength": 8192 });
    let states = json!({
        "name": "state", "in": "query", "required": false, "style": "form", "explode": false,
        "description": "Only sandboxes in these states, separated by commas",
        "schema": {
            "type": "array", "minItems": 1, "maxItems": STATES.len(),
            "items": { "type": "string", "enum": STATES },
        },
    });
    let mut filters = vec![
        query(
            "metadata",
            "Only sandboxes with this metadata: `key=value&key2=value2` with each part \
             URL-encoded, and the result URL-encoded as one value",
            text,
        ),
        states,
        query(
            "startedAfter",
            "Only sandboxes created after this time",
            json!({ "type": "string", "format": "date-time" }),
        ),
        query(
            "template",
            "Only sandboxes of this template",
            json!({ "type": "string", "maxLength": 256 }),
        ),
        query(
            "name",
            "Only the sandbox with this name",
            json!({ "type": "string", "maxLength": MAX_SANDBOX_NAME }),
        ),
    ];
    filters.extend(merged());
    filters
}

/// Parameters of lists that are merged from all hosts of a fleet.
pub(in crate::openapi) fn merged() -> [Value; 2] {
    [
        query(
            "complete",
            "In a fleet: fail with 503 if a host does not answer within 1 s. By default, the header \
             `jiffy-incomplete` names these hosts, and their items are omitted",
            json!({ "type": "boolean", "default": false }),
        ),
        query(
            "host",
            "In a fleet: only items of this host, for example `h2`",
            json!({ "type": "string", "maxLength": 16 }),
        ),
    ]
}

/// Header that makes a repeated request idempotent.
fn idempotency_key() -> Value {
    json!({
        "name": "Idempotency-Key", "in": "header", "required": false,
        "description": "A repeated request with the same key receives the first answer and creates nothing",
        "schema": { "type": "string", "pattern": "^[a-z0-9-]{1,255}$" },
    })
}

fn create(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::post(path, id, summary)
        .with(vec![idempotency_key()])
        .takes::<NewSandbox>()
        .answers::<Sandbox>(201, "The sandbox runs and its agent has answered")
        .fails_with(&[404, 409, 422, 429, 501, 503])
}

fn connect(path: &'static str, id: &'static str) -> Operation {
    let summary = "Connect to a sandbox. Resumes a paused sandbox; never shortens its timeout";
    let operation = Operation::post(path, id, summary).may_take::<ConnectSandbox>();
    let operation = if path.starts_with("/v2/") {
        operation
            .answers::<Sandbox>(200, "The sandbox was running")
            .answers::<Sandbox>(201, "The sandbox was resumed")
    } else {
        operation.answers::<Sandbox>(200, "The sandbox runs")
    };
    operation.fails_with(&[409, 429, 501, 503])
}

/// Operations on sandboxes.
pub(super) fn sandboxes() -> Vec<Operation> {
    vec![
        create(
            "/v2/sandboxes",
            "createSandboxV2",
            "Create a sandbox whose agent requires a token",
        ),
        create(
            "/sandboxes",
            "createSandbox",
            "Create a sandbox whose agent requires a token unless `secure` is false",
        ),
        Operation::get(
            "/v2/sandboxes",
            "listSandboxesV2",
            "List running and paused sandboxes, newest first",
        )
        .with(list_parameters())
        .paged()
        .answers::<Vec<ListedSandbox>>(200, "Page of sandboxes")
        .fails_with(&[503]),
        Operation::get(
            "/sandboxes",
            "listSandboxes",
            "List running sandboxes without pages",
        )
        .with(list_parameters())
        .answers::<Vec<ListedSandbox>>(200, "Sandboxes")
        .fails_with(&[503]),
        Operation::get("/sandboxes/{sandboxID}", "getSandbox", "Get a sandbox")
            .answers::<SandboxDetail>(200, "Sandbox"),
        Operation::delete("/sandboxes/{sandboxID}", "killSandbox", "Kill a sandbox")
            .with(vec![query(
                "forget",
                "Remove the record of the sandbox too. By default it remains for an hour",
                json!({ "type": "boolean", "default": false }),
            )])
            .answers_no_content(),
        Operation::new(
            Method::PATCH,
            "/sandboxes/{sandboxID}",
            "changeSandbox",
            "Rename a sandbox",
        )
        .takes::<ChangeSandbox>()
        .answers::<SandboxDetail>(200, "Sandbox")
        .fails_with(&[409]),
        connect("/v2/sandboxes/{sandboxID}/connect", "connectSandboxV2"),
        connect("/sandboxes/{sandboxID}/connect", "connectSandbox"),
        Operation::post(
            "/sandboxes/{sandboxID}/resume",
            "resumeSandbox",
            "Resume a paused sandbox",
        )
        .may_take::<ResumeSandbox>()
        .answers::<Sandbox>(201, "The sandbox was resumed")
        .fails_with(&[409, 429, 501, 503]),
        Operation::post(
            "/sandboxes/{sandboxID}/pause",
            "pauseSandbox",
            "Pause a sandbox with its memory and disk",
        )
        .may_take::<PauseSandbox>()
        .answers_no_content()
        .fails_with(&[409, 429, 501, 503, 507]),
        Operation::post(
            "/sandboxes/{sandboxID}/timeout",
            "setTimeout",
            "Set the timeout or the idle timeout of a sandbox, counted from now",
        )
        .takes::<SetTimeout>()
        .answers_no_content()
        .fails_with(&[409, 429]),
        Operation::post(
            "/sandboxes/{sandboxID}/refreshes",
            "refreshSandbox",
            "Extend the timeout of a sandbox. Never shortens it",
        )
        .may_take::<Refresh>()
        .answers_no_content()
        .fails_with(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/fork",
            "forkSandbox",
            "Fork a sandbox: create copies of its current state",
        )
        .may_take::<ForkSandbox>()
        .answers::<Vec<Forked>>(201, "One entry per child with a sandbox or an error")
        .fails_with(&[409, 429, 501, 503, 507]),
        Operation::post(
            "/sandboxes/{sandboxID}/promote",
            "promoteSandbox",
            "Retain this child of a fork and remove its siblings",
        )
        .answers::<Promoted>(200, "Removed siblings")
        .fails_with(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/rollback",
            "rollbackSandbox",
            "Roll back a sandbox to a snapshot. The id remains",
        )
        .takes::<RollbackSandbox>()
        .answers::<RolledBack>(200, "The sandbox has the state of the snapshot")
        .fails_with(&[409, 429, 501, 503]),
        Operation::post(
            "/sandboxes/{sandboxID}/restart",
            "restartSandbox",
            "Restart the programs of a sandbox. Stops its processes and runs the start command of its \
             template. Disk, id, network and kernel remain",
        )
        .may_take::<RestartSandbox>()
        .answers::<Sandbox>(200, "The sandbox runs")
        .fails_with(&[409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/wait",
            "waitForSandbox",
            "Wait until a sandbox has ended, runs or is paused",
        )
        .with(vec![
            query(
                "for",
                "State to wait for",
                json!({ "type": "string", "enum": AWAITED, "default": "ended" }),
            ),
            query(
                "seconds",
                "Maximum time to wait in seconds",
                json!({ "type": "integer", "minimum": 0, "maximum": MAX_WAIT_S, "default": 0 }),
            ),
        ])
        .answers::<Waited>(200, "State of the sandbox now, or when the time was over"),
        Operation::post(
            "/sandboxes/{sandboxID}/snapshots",
            "snapshotSandbox",
            "Take a snapshot of a sandbox. The sandbox continues to run",
        )
        .may_take::<SnapshotSandbox>()
        .answers::<Snapshot>(201, "Snapshot")
        .fails_with(&[409, 429, 501, 503, 507]),
    ]
}
