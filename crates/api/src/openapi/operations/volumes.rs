//! Operations on volumes and their content.

use crate::openapi::operation::{Operation, query};
use crate::routes::bounds::{DEFAULT_VOLUMES, MAX_VOLUME_DEPTH, MAX_VOLUME_MODE};
use axum::http::Method;
use jiffy_api_types::{
    NewVolume, Volume, VolumeAndToken, VolumeEntry, VolumeEntryChange, VolumeSnapshot,
};
use serde_json::{Value, json};

/// Error statuses of calls on content.
const ERRORS: &[u16] = &[400, 401, 403, 404, 409, 429, 503, 507];

/// Operations on volumes and their content.
pub(super) fn volumes() -> Vec<Operation> {
    let mut all = vec![
        Operation::get(
            "/volumes",
            "listVolumes",
            "List the volumes of the key by name",
        )
        .paged_by_name(DEFAULT_VOLUMES)
        .answers::<Vec<Volume>>(200, "Volumes"),
        Operation::post(
            "/volumes",
            "createVolume",
            "Create an empty volume, or a volume with the files of a snapshot",
        )
        .takes::<NewVolume>()
        .answers::<VolumeAndToken>(201, "Volume and its token")
        .fails_with(&[404, 409, 503, 507]),
        Operation::get(
            "/volumes/{volumeID}",
            "getVolume",
            "Get a volume of the key by id or name, with the token for its content",
        )
        .answers::<VolumeAndToken>(200, "Volume and its token")
        .fails_with(&[403]),
        Operation::delete(
            "/volumes/{volumeID}",
            "deleteVolume",
            "Remove a volume with its files",
        )
        .answers_no_content()
        .fails_with(&[409]),
    ];
    all.extend(snapshots());
    all.extend(content());
    all
}

/// Operations on snapshots of volumes.
fn snapshots() -> Vec<Operation> {
    let all = vec![
        Operation::post(
            "/volumes/{volumeID}/snapshots",
            "snapshotVolume",
            "Store a snapshot of a volume in the store of the host. Changes of the volume wait while \
             its files are copied on the host",
        )
        .answers::<VolumeSnapshot>(201, "Snapshot")
        .fails_with(&[409, 503]),
        Operation::get(
            "/volumesnapshots",
            "listVolumeSnapshots",
            "List the snapshots of the key's volumes by id",
        )
        .paged_by_name(DEFAULT_VOLUMES)
        .answers::<Vec<VolumeSnapshot>>(200, "Snapshots"),
        Operation::delete(
            "/volumesnapshots/{volumeSnapshotID}",
            "deleteVolumeSnapshot",
            "Remove a snapshot of a volume",
        )
        .answers_no_content()
        .fails_with(&[503]),
    ];
    let tagged = |operation: Operation| operation.tagged("volumes");
    all.into_iter().map(tagged).collect()
}

/// Operations on the content of a volume.
fn content() -> Vec<Operation> {
    let patch = Operation::new(
        Method::PATCH,
        "/volumecontent/{volumeID}/path",
        "changeVolumeEntry",
        "Change owner and permissions of a file or directory",
    );
    let all = vec![
        Operation::get(
            "/volumecontent/{volumeID}/path",
            "getVolumeEntry",
            "Get a file or directory of a volume. Calls on content need the token of the volume as \
             bearer token, or a key of its owner",
        )
        .with(vec![path()])
        .answers::<VolumeEntry>(200, "File or directory"),
        patch
            .with(vec![path()])
            .takes::<VolumeEntryChange>()
            .answers::<VolumeEntry>(200, "Changed file or directory"),
        Operation::delete(
            "/volumecontent/{volumeID}/path",
            "removeVolumeEntry",
            "Remove a file, or a directory with its entries",
        )
        .with(vec![path()])
        .answers_no_content(),
        Operation::get(
            "/volumecontent/{volumeID}/dir",
            "listVolumeDirectory",
            "List a directory of a volume, at most 100,000 entries",
        )
        .with(vec![
            path(),
            query(
                "depth",
                "Number of levels",
                json!({ "type": "integer", "minimum": 1, "maximum": MAX_VOLUME_DEPTH, "default": 1 }),
            ),
        ])
        .answers::<Vec<VolumeEntry>>(200, "Entries, sorted by path"),
        Operation::post(
            "/volumecontent/{volumeID}/dir",
            "createVolumeDirectory",
            "Create a directory in a volume",
        )
        .with(created("Create missing parents, and succeed if the directory exists"))
        .answers::<VolumeEntry>(201, "Directory"),
        Operation::get(
            "/volumecontent/{volumeID}/file",
            "readVolumeFile",
            "Get the content of a file",
        )
        .with(vec![path()])
        .answers_with(200, "Content, as `application/octet-stream`"),
        Operation::put(
            "/volumecontent/{volumeID}/file",
            "writeVolumeFile",
            "Write the body to a file. An existing file is replaced when the body is complete",
        )
        .with(created("Create missing parents"))
        .answers::<VolumeEntry>(201, "File"),
    ];
    let tagged = |operation: Operation| operation.tagged("volumes").fails_with(ERRORS);
    all.into_iter().map(tagged).collect()
}

fn path() -> Value {
    let mut path = query(
        "path",
        "Path in the volume, without `..`",
        json!({ "type": "string", "minLength": 1, "maxLength": 4096 }),
    );
    path["required"] = json!(true);
    path
}

/// Returns the query parameters of a call that creates an entry. `force` describes the parameter of
/// this name.
fn created(force: &str) -> Vec<Value> {
    let id = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX - 1 });
    vec![
        path(),
        query("uid", "User", id.clone()),
        query("gid", "Group", id),
        query(
            "mode",
            "Permissions, as a decimal number",
            json!({ "type": "integer", "minimum": 0, "maximum": MAX_VOLUME_MODE }),
        ),
        query(
            "force",
            force,
            json!({ "type": "boolean", "default": false }),
        ),
    ]
}
