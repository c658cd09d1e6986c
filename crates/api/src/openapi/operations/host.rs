//! Operations on the host, its keys and its warm pools.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use axum::http::Method;
use jiffy_api_types::{
    AcceptedRestore, ApiKey, Budget, ChangeKey, CreateKey, DrainHost, EngineDescription, FleetInfo,
    FleetNodes, FleetWhy, Host, HostOperation, NewApiKey, Pool, PruneHost, PrunedHost, RevokeKey,
    RevokedKey, RotateKey, SetPool, StopHost, Team, VerifiedSnapshot,
};
use serde_json::json;

/// Operations on the host.
pub(super) fn host() -> Vec<Operation> {
    vec![
        Operation::post(
            "/prune",
            "prune",
            "Remove unused data: records of killed sandboxes, snapshots of booted templates, \
             images imported for sandboxes, build caches. Callers of scope `create` prune their \
             own data, callers of scope `admin` all data",
        )
        .may_take::<PruneHost>()
        .answers::<PrunedHost>(200, "Removed items, or with `dryRun` the items that would be removed"),
        Operation::get("/teams", "listTeams", "List teams. Every host has exactly one team")
            .answers::<Vec<Team>>(200, "Team"),
        Operation::post(
            "/snapshots/{snapshotID}/verify",
            "verifySnapshot",
            "Compare a snapshot and its ancestors with their checksums. Damaged files are fetched again \
             if the store has them",
        )
        .answers::<Vec<VerifiedSnapshot>>(200, "Result for each snapshot")
        .fails_with(&[409, 501]),
        Operation::get(
            "/engines",
            "listEngines",
            "List the engines that isolate sandboxes on this host",
        )
        .answers::<Vec<EngineDescription>>(200, "Engines"),
        Operation::get(
            "/limits",
            "getLimits",
            "Get limits and usage of a key",
        )
        .with(vec![query(
            "key",
            "Id or name of the key. Defaults to the key of the request. Other keys require the \
             scope `admin`",
            json!({ "type": "string", "maxLength": 256 }),
        )])
        .answers::<Budget>(200, "Limits and usage")
        .fails_with(&[403, 404]),
        Operation::get(
            "/host",
            "host",
            "Get status and free resources of the daemon",
        )
        .answers::<Host>(200, "Status")
        .fails_with(&[403]),
        Operation::get(
            "/fleet",
            "fleet",
            "Get the state of the fleet of this host. Requires a key with the scope `admin`",
        )
        .answers::<FleetInfo>(200, "Fleet")
        .fails_with(&[403, 404]),
        Operation::get(
            "/fleet/nodes",
            "fleetNodes",
            "List the hosts of the fleet. Requires a key with the scope `admin`",
        )
        .answers::<FleetNodes>(200, "Hosts")
        .fails_with(&[403, 404]),
        Operation::get(
            "/fleet/why/{sandboxID}",
            "fleetWhy",
            "Explain on which host of the fleet a sandbox was placed, or why its create was rejected. \
             Requires a key with the scope `admin`",
        )
        .answers::<FleetWhy>(200, "Recent decisions")
        .fails_with(&[403, 404]),
        Operation::post(
            "/fleet/nodes/{host}/drain",
            "drainHost",
            "Place no more sandboxes on a host. Its paused sandboxes resume on other hosts. Requires \
             the scope `admin`",
        )
        .may_take::<DrainHost>()
        .answers::<HostOperation>(200, "The host receives no more sandboxes")
        .fails_with(&[403, 404, 409, 503]),
        Operation::post(
            "/fleet/nodes/{host}/undrain",
            "undrainHost",
            "Place sandboxes on a drained host again. Requires the scope `admin`",
        )
        .answers::<HostOperation>(200, "The host receives sandboxes")
        .fails_with(&[403, 404, 409, 503]),
        Operation::post(
            "/fleet/nodes/{host}/remove",
            "removeHost",
            "Remove a dead host or a front from the fleet. Requires the scope `admin`",
        )
        .answers::<HostOperation>(200, "The host was removed")
        .fails_with(&[403, 404, 409, 503]),
        Operation::post(
            "/fleet/nodes/{host}/confirm-dead",
            "confirmDeadHost",
            "Declare a silent host dead, also if most hosts are silent. Requires the scope `admin`",
        )
        .answers::<HostOperation>(200, "The host is dead")
        .fails_with(&[403, 404, 409, 503]),
        Operation::post(
            "/fleet/accept-restore",
            "acceptRestore",
            "Accept records that an operator has restored from a backup. Requires the scope `admin`",
        )
        .answers::<AcceptedRestore>(200, "Hosts that accept the records")
        .fails_with(&[403, 404, 409, 503]),
        Operation::post(
            "/host/stop",
            "stopHost",
            "Stop the daemon. Only the host's owner may call it",
        )
        .may_take::<StopHost>()
        .accepts("Daemon is stopping")
        .fails_with(&[501]),
        Operation::get(
            "/keys",
            "listKeys",
            "List all API keys, also revoked ones. Requires the scope `admin`",
        )
        .answers::<Vec<ApiKey>>(200, "Keys, oldest first")
        .fails_with(&[403]),
        Operation::post(
            "/keys",
            "createKey",
            "Create an API key. Requires the scope `admin`",
        )
        .takes::<CreateKey>()
        .answers::<NewApiKey>(201, "Key and its secret, which is not shown again")
        .fails_with(&[503]),
        Operation::new(
            Method::PATCH,
            "/keys/{keyID}",
            "changeKey",
            "Change the limits of an API key by id or name. Requires the scope `admin`",
        )
        .takes::<ChangeKey>()
        .answers::<ApiKey>(200, "Changed key")
        .fails_with(&[409, 503]),
        Operation::post(
            "/keys/{keyID}/rotate",
            "rotateKey",
            "Replace the secret of an API key by id or name. Requires the scope `admin`",
        )
        .may_take::<RotateKey>()
        .answers::<NewApiKey>(200, "Key and its new secret, which is not shown again")
        .fails_with(&[503]),
        Operation::post(
            "/keys/{keyID}/revoke",
            "revokeKey",
            "Revoke an API key by id or name. Its sandboxes and builds continue unless `end` is true",
        )
        .may_take::<RevokeKey>()
        .answers::<RevokedKey>(200, "Revoked key")
        .fails_with(&[503]),
        Operation::get(
            "/pools",
            "listPools",
            "List warm pools",
        )
        .merged()
        .answers::<Vec<Pool>>(200, "Warm pools")
        .fails_with(&[403, 503]),
        Operation::new(
            Method::PUT,
            "/pools/{templateID}",
            "setPool",
            "Set the size of a template's warm pool",
        )
        .takes::<SetPool>()
        .answers::<Pool>(200, "Warm pool")
        .fails_with(&[409, 501, 503]),
    ]
}
