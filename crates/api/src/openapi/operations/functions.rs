//! Operations on functions.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{MAX_LOG_WAIT_S, MAX_POSITION};
use jiffy_api_types::{
    DeployFunction, Function, FunctionLog, FunctionMetrics, FunctionVersion, RollbackFunction,
};
use serde_json::json;

/// Statuses of a host without the program for functions, and of a process that cannot run now.
const REFUSALS: &[u16] = &[501, 503];

/// Operations on functions.
pub(super) fn functions() -> Vec<Operation> {
    let number = |most: u64| json!({ "type": "integer", "minimum": 0, "maximum": most });
    let mut all = vec![
        Operation::get(
            "/functions",
            "listFunctions",
            "The caller's functions, or with `all` those of all keys for whoever sees them",
        )
        .with(vec![query("all", json!({ "type": "boolean" }))])
        .answers::<Vec<Function>>(200, "All of them"),
        Operation::get("/functions/{name}", "getFunction", "A function")
            .answers::<Function>(200, "It, with its counts"),
        Operation::post(
            "/functions/{name}",
            "deployFunction",
            "Deploy a WebAssembly module as a new version, which answers once it has been \
             compiled, loaded and instantiated; until then, and if that fails, the former one \
             does. The module is sent, or named by the `digest` of one deployed before",
        )
        .takes_form::<DeployFunction>()
        .answers::<Function>(200, "The function")
        .refuses(&[409, 413, 422, 501, 503, 507]),
        Operation::delete(
            "/functions/{name}",
            "removeFunction",
            "Remove a function with all its versions",
        )
        .answers_nothing(),
        Operation::get(
            "/functions/{name}/versions",
            "listFunctionVersions",
            "Versions that can answer again, newest first",
        )
        .answers::<Vec<FunctionVersion>>(200, "All of them"),
        Operation::post(
            "/functions/{name}/rollback",
            "rollbackFunction",
            "Let an earlier version answer again; without `version` the one before",
        )
        .may_take::<RollbackFunction>()
        .answers::<Function>(200, "The function")
        .refuses(&[422, 501, 503]),
        Operation::post(
            "/functions/{name}/enable",
            "enableFunction",
            "Answer requests to a function again",
        )
        .answers::<Function>(200, "The function"),
        Operation::post(
            "/functions/{name}/disable",
            "disableFunction",
            "Refuse requests to a function, which stays deployed",
        )
        .answers::<Function>(200, "The function"),
        Operation::get(
            "/functions/{name}/logs",
            "functionLogs",
            "Output and failures of a function from position `after` on; waits for `wait` seconds \
             at most if there are none",
        )
        .with(vec![
            query("after", number(MAX_POSITION)),
            query("wait", number(MAX_LOG_WAIT_S)),
        ])
        .answers::<FunctionLog>(200, "Entries, and the position behind them"),
        Operation::get(
            "/functions/{name}/metrics",
            "functionMetrics",
            "Counts of a function's requests since the daemon started",
        )
        .answers::<FunctionMetrics>(200, "Counts"),
    ];
    for operation in &mut all {
        if operation.more.is_empty() {
            operation.more = REFUSALS;
        }
    }
    all
}
