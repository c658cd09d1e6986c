//! Operations on the host, its keys and its warm pools.

use crate::openapi::operation::Operation;
use crate::openapi::reference::{list, query, schema};
use axum::http::Method;
use serde_json::json;

/// Operations on the host.
pub(super) fn host() -> Vec<Operation> {
    vec![
        Operation::post(
            "/prune",
            "prune",
            "Remove what nothing needs, or tell what that would be: ended sandboxes, snapshots of \
             booted templates, images that were imported for sandboxes, what builds left; the \
             caller's own, or all for whoever manages the host",
        )
        .may_take("PruneHost")
        .answers(200, "What is gone, or would be", schema("PrunedHost")),
        Operation::get("/teams", "listTeams", "The one team there is").answers(
            200,
            "It",
            list("Team"),
        ),
        Operation::post(
            "/snapshots/{snapshotID}/verify",
            "verifySnapshot",
            "Read a snapshot and all below it again",
        )
        .answers(
            200,
            "What was found",
            json!({ "type": "array", "items": { "type": "object" } }),
        )
        .refuses(&[409, 501]),
        Operation::get("/engines", "listEngines", "How sandboxes are isolated here").answers(
            200,
            "All there are",
            list("Engine"),
        ),
        Operation::get(
            "/limits",
            "getLimits",
            "Limits of a key, and what is used of them: the caller's own, or those of `key` for \
             whoever manages the host",
        )
        .with(vec![query(
            "key",
            json!({ "type": "string", "maxLength": 256 }),
        )])
        .answers(200, "Its budget", schema("Budget"))
        .refuses(&[403, 404]),
        Operation::get(
            "/host",
            "host",
            "Which daemon this is, and what it has left",
        )
        .answers(200, "It", schema("Host"))
        .refuses(&[403]),
        Operation::post(
            "/host/stop",
            "stopHost",
            "End the daemon; only for the host's owner",
        )
        .may_take("StopHost")
        .accepts()
        .refuses(&[501]),
        Operation::post(
            "/keys/{keyID}/revoke",
            "revokeKey",
            "Revoke an API key, by its id or name, and end all it has if that is asked for",
        )
        .may_take("RevokeKey")
        .answers(200, "Revoked", schema("RevokedKey")),
        Operation::get(
            "/pools",
            "listPools",
            "Warm pools: sandboxes that wait for their creator",
        )
        .answers(200, "All of them", list("Pool"))
        .refuses(&[403]),
        Operation::new(
            Method::PUT,
            "/pools/{templateID}",
            "setPool",
            "How many sandboxes of a template are to wait",
        )
        .takes("SetPool")
        .answers(200, "The pool", schema("Pool"))
        .refuses(&[409, 501, 503]),
    ]
}
