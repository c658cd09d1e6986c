//! Volumes of one host, used through all hosts and the front.

use super::client::Client;
use super::laboratory::{Host, Laboratory, report};
use serde_json::Value;
use std::time::Instant;

/// Returns the output of `jiffy` as a client of a host or front, which must succeed.
#[track_caller]
fn ok(laboratory: &Laboratory, client: &Client, args: &[&str]) -> String {
    let done = laboratory.jiffy(client, args);
    assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
    done.stdout.trim_end().to_owned()
}

/// Returns the content of a file of a volume.
#[track_caller]
fn content(laboratory: &Laboratory, client: &Client, file: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy");
    ok(
        laboratory,
        client,
        &["volume", "cp", file, copy.to_str().unwrap()],
    );
    std::fs::read_to_string(copy).unwrap()
}

/// Creates a volume with the file `file`, which contains the name of the volume.
fn create(laboratory: &Laboratory, client: &Client, name: &str, host: &Host) {
    let args = [
        "volume", "create", name, "--size", "64M", "--host", &host.id,
    ];
    ok(laboratory, client, &args);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, name).unwrap();
    let to = format!("{name}:/file");
    ok(
        laboratory,
        client,
        &["volume", "cp", file.to_str().unwrap(), &to],
    );
}

/// Uses a volume through hosts that do not have it, and in a sandbox.
pub fn a_volume_is_used_through_all_hosts(laboratory: &Laboratory) {
    let started = Instant::now();
    let home = laboratory.ordinary();
    let others = laboratory.others(&home);
    let [first, second] = [0, 1].map(|n| laboratory.at(&others[n]));
    let front = laboratory.front();
    create(laboratory, &first, "shared", &home);
    // The sandbox runs on the host of the volume, whichever host receives the create.
    let id = ok(laboratory, &second, &["create", "-v", "shared:/data"]);
    assert!(front.running_on(&home).contains(&id), "{id}");
    let script = "cat /data/file; echo guest > /data/guest; sync /data/guest";
    assert_eq!(laboratory.sh(&front, &id, script).unwrap(), "shared");
    assert_eq!(content(laboratory, &second, "shared:/guest"), "guest\n");
    let snapshot = ok(laboratory, &first, &["volume", "snapshot", "shared"]);
    let restore = ["volume", "restore", &snapshot, "copy"];
    ok(laboratory, &second, &restore);
    assert_eq!(content(laboratory, &front, "copy:/guest"), "guest\n");
    for client in [&first, &second, &front] {
        let listed = client.get("/volumes").expect(200);
        let listed = listed.as_array().unwrap().iter();
        let hosts: Vec<_> = listed.map(|one| one["host"].as_str().unwrap()).collect();
        assert_eq!(hosts, [&others[1].id, &home.id]);
        let snapshots = ok(laboratory, client, &["volume", "snapshots"]);
        assert!(snapshots.contains(&snapshot), "{snapshots}");
    }
    let mounted = laboratory.jiffy(&first, &["volume", "rm", "shared"]);
    assert!(
        mounted.stderr.contains("is mounted in sandboxes"),
        "{mounted:?}"
    );
    front.kill(&id).expect(204);
    ok(laboratory, &first, &["volume", "rm-snapshot", &snapshot]);
    ok(laboratory, &first, &["volume", "rm", "shared", "copy"]);
    assert_eq!(second.get("/volumes").expect(200), Value::Array(Vec::new()));
    report("use of a volume on all hosts", started.elapsed());
}

/// Creates a volume on a host that is about to be lost.
pub fn volume_on(laboratory: &Laboratory, host: &Host) {
    create(laboratory, &laboratory.front(), "lost", host);
}

/// Asserts that the calls on the volume name its lost host.
pub fn assert_lost(clients: &[Client], host: &Host) {
    for client in clients {
        let lost = client.get("/volumes/lost");
        assert_eq!(lost.code(), "host_lost", "{lost:?}");
        assert!(lost.body.to_string().contains(&host.id), "{lost:?}");
    }
}

/// Asserts that the volume has its file after the return of its host, and removes the volume.
pub fn assert_returned(laboratory: &Laboratory, client: &Client) {
    assert_eq!(content(laboratory, client, "lost:/file"), "lost");
    ok(laboratory, client, &["volume", "rm", "lost"]);
}
