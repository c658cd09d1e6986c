//! Operations on the host, its keys and its warm pools.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use axum::http::Method;
use jiffy_api_types::{
    Budget, EngineDescription, Host, Pool, PruneHost, PrunedHost, RevokeKey, RevokedKey, SetPool,
    StopHost, Team, VerifiedSnapshot,
};
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
        .may_take::<PruneHost>()
        .answers::<PrunedHost>(200, "What is gone, or would be"),
        Operation::get("/teams", "listTeams", "The one team there is")
            .answers::<Vec<Team>>(200, "It"),
        Operation::post(
            "/snapshots/{snapshotID}/verify",
            "verifySnapshot",
            "Read a snapshot and all below it again",
        )
        .answers::<Vec<VerifiedSnapshot>>(200, "What was found")
        .refuses(&[409, 501]),
        Operation::get("/engines", "listEngines", "How sandboxes are isolated here").answers::<Vec<
            EngineDescription,
        >>(
            200,
            "All there are",
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
        .answers::<Budget>(200, "Its budget")
        .refuses(&[403, 404]),
        Operation::get(
            "/host",
            "host",
            "Which daemon this is, and what it has left",
        )
        .answers::<Host>(200, "It")
        .refuses(&[403]),
        Operation::post(
            "/host/stop",
            "stopHost",
            "End the daemon; only for the host's owner",
        )
        .may_take::<StopHost>()
        .accepts()
        .refuses(&[501]),
        Operation::post(
            "/keys/{keyID}/revoke",
            "revokeKey",
            "Revoke an API key, by its id or name, and end all it has if that is asked for",
        )
        .may_take::<RevokeKey>()
        .answers::<RevokedKey>(200, "Revoked"),
        Operation::get(
            "/pools",
            "listPools",
            "Warm pools: sandboxes that wait for their creator",
        )
        .answers::<Vec<Pool>>(200, "All of them")
        .refuses(&[403]),
        Operation::new(
            Method::PUT,
            "/pools/{templateID}",
            "setPool",
            "How many sandboxes of a template are to wait",
        )
        .takes::<SetPool>()
        .answers::<Pool>(200, "The pool")
        .refuses(&[409, 501, 503]),
    ]
}
