//! Operations on functions.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{MAX_LOG_WAIT_S, MAX_POSITION};
use jiffy_api_types::{
    DeployFunction, Function, FunctionLog, FunctionMetrics, FunctionVersion, RollbackFunction,
};
use serde_json::json;

/// Additional errors of operations that list none. 501: the host does not have the program for
/// functions. 503: the process for functions cannot run at the moment.
const DEFAULT_ERRORS: &[u16] = &[501, 503];

/// Operations on functions.
pub(super) fn functions() -> Vec<Operation> {
    let number = |maximum: u64| json!({ "type": "integer", "minimum": 0, "maximum": maximum });
    let mut all = vec![
        Operation::get(
            "/functions",
            "listFunctions",
            "List functions of the caller",
        )
        .with(vec![query(
            "all",
            "List the functions of all keys. Requires the scope `admin` or `read`",
            json!({ "type": "boolean" }),
        )])
        .merged()
        .answers::<Vec<Function>>(200, "Functions"),
        Operation::get("/functions/{name}", "getFunction", "Get a function")
            .answers::<Function>(200, "Function with its request counts"),
        Operation::post(
            "/functions/{name}",
            "deployFunction",
            "Deploy a WebAssembly module as a new version. The version becomes active once it has \
             been compiled and instantiated. If this fails, the previous version remains active. \
             The form has the module, or its settings have the `digest` of an earlier module",
        )
        .takes_form::<DeployFunction>()
        .answers::<Function>(200, "Function")
        .fails_with(&[409, 413, 422, 501, 503, 507]),
        Operation::delete(
            "/functions/{name}",
            "removeFunction",
            "Remove a function with all its versions",
        )
        .answers_no_content(),
        Operation::get(
            "/functions/{name}/versions",
            "listFunctionVersions",
            "List versions that a rollback can activate, newest first",
        )
        .answers::<Vec<FunctionVersion>>(200, "Versions"),
        Operation::post(
            "/functions/{name}/rollback",
            "rollbackFunction",
            "Activate an earlier version",
        )
        .may_take::<RollbackFunction>()
        .answers::<Function>(200, "Function")
        .fails_with(&[422, 501, 503]),
        Operation::post(
            "/functions/{name}/enable",
            "enableFunction",
            "Enable a function",
        )
        .answers::<Function>(200, "Function"),
        Operation::post(
            "/functions/{name}/disable",
            "disableFunction",
            "Disable a function. Requests are rejected; the function remains deployed",
        )
        .answers::<Function>(200, "Function"),
        Operation::get(
            "/functions/{name}/logs",
            "functionLogs",
            "Read the log of a function: output and failures",
        )
        .with(vec![
            query(
                "after",
                "Position to read from: `next` of the previous answer. Defaults to 0",
                number(MAX_POSITION),
            ),
            query(
                "wait",
                "Maximum time in seconds to wait for the first entry",
                number(MAX_LOG_WAIT_S),
            ),
        ])
        .answers::<FunctionLog>(200, "Entries, and the position after the last one"),
        Operation::get(
            "/functions/{name}/metrics",
            "functionMetrics",
            "Get request counts of a function since the start of the daemon",
        )
        .answers::<FunctionMetrics>(200, "Request counts"),
    ];
    for operation in &mut all {
        if operation.errors.is_empty() {
            operation.errors = DEFAULT_ERRORS;
        }
    }
    all
}
