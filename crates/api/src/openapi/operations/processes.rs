//! Operations on the processes inside a sandbox.

use crate::openapi::operation::{Operation, query};
use crate::routes::bounds::{DEFAULT_PROCESSES, MAX_PROCESS_FILTER, MAX_PROCESSES, PROCESS_ORDERS};
use jiffy_api_types::{GuestProcesses, SignalProcess};
use serde_json::json;

/// Operations on processes.
pub(super) fn processes() -> Vec<Operation> {
    vec![
        Operation::get(
            "/sandboxes/{sandboxID}/processes",
            "listProcesses",
            "List the processes inside a running sandbox, except threads of its kernel. Command lines \
             may contain secrets: keys of scope `read` are rejected",
        )
        .with(vec![
            query(
                "sort",
                "Order: by process id, or most processor share or memory first",
                json!({ "type": "string", "enum": PROCESS_ORDERS, "default": PROCESS_ORDERS[0] }),
            ),
            query(
                "filter",
                "Only processes with this id, or whose name, command line or user contains this text",
                json!({ "type": "string", "maxLength": MAX_PROCESS_FILTER }),
            ),
            query(
                "limit",
                "Maximum number of processes",
                json!({
                    "type": "integer", "minimum": 1, "maximum": MAX_PROCESSES,
                    "default": DEFAULT_PROCESSES,
                }),
            ),
        ])
        .answers::<GuestProcesses>(200, "Processes")
        .fails_with(&[403, 409, 501]),
        Operation::post(
            "/sandboxes/{sandboxID}/processes/{pid}/signal",
            "signalProcess",
            "Send a signal to a process inside a running sandbox",
        )
        .takes::<SignalProcess>()
        .answers_no_content()
        .fails_with(&[409]),
    ]
}
