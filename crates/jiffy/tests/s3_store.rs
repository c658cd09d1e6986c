//! Tests for snapshots that two hosts share through a bucket of a real S3 server, with injected
//! faults of the server and of disks.
//!
//! A *pack* is an object of the store with chunks of snapshots.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores. The *working set* of a
//! snapshot consists of the pages that a restored guest touches first.

use crate::support::s3::{self, Fault, Request, S3Proxy, S3Server};
use crate::support::sandbox_http;
use crate::support::small_disk::SmallDisk;
use crate::support::store::directory;
use crate::support::test_home::TestHome;
use crate::support::{finish, skip, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Creates files and 12 MiB of memory with checksums in a guest.
const BEGIN: &str = "cd && head -c 3000000 /dev/urandom > file && sha256sum file > sums \
    && head -c 12582912 /dev/urandom > /dev/shm/memory && sha256sum /dev/shm/memory >> sums";
/// Fails if a byte differs.
const CHECK: &str = "cd && sha256sum -c sums > /dev/null && echo sound";
/// Minimum size of a request for part of a layer, except for chunks that a guest waits for.
const BULK_BYTES: u64 = 256 << 10;
/// Maximum size of a request for a whole small file, such as a description or the state of devices.
const SMALL_FILE_BYTES: u64 = 16 << 10;

/// Bucket with the snapshot of a removed host.
struct Bucket {
    server: S3Server,
    proxy: S3Proxy,
    keys: PathBuf,
    snapshot: String,
    _dir: TempDir,
}

impl Bucket {
    /// Creates a snapshot on a host, and removes the host. `None` if the server was not built.
    fn new() -> Option<Self> {
        let there = TestHome::new();
        let dir = tempfile::tempdir().unwrap();
        let Some(server) = S3Server::start(&dir.path().join("objects")) else {
            skip("versitygw is not built: run scripts/test-servers");
            return None;
        };
        let mut bucket = Self {
            proxy: S3Proxy::new(server.address),
            server,
            keys: there.dir.path().join("store/keys.toml"),
            snapshot: String::new(),
            _dir: dir,
        };
        bucket.serve(&there, s3::SECRET, &[]);
        let id = there.ok(&["create"]);
        there.sh(&id, BEGIN);
        bucket.snapshot = there.ok(&["snapshot", &id, "--name", "moving", "--durable"]);
        there.ok(&["serve", "--stop", "--kill-sandboxes"]);
        let keys = bucket._dir.path().join("keys.toml");
        fs::copy(&bucket.keys, &keys).unwrap();
        bucket.keys = keys;
        // Forget the requests so far.
        bucket.proxy.requests();
        Some(bucket)
    }

    /// Starts the daemon of `home` with this bucket.
    fn serve(&self, home: &TestHome, secret: &str, more: &[&str]) {
        let keys = self.keys.to_str().unwrap();
        let mut options = vec!["--store", "s3://bucket/some/prefix", "--warm-pool", "0"];
        if self.keys.exists() {
            options.extend(["--store-keys", keys]);
        }
        options.extend(more);
        let variables = s3::variables(self.proxy.address, secret);
        let variables: Vec<_> = variables.iter().map(|(k, v)| (*k, v.as_str())).collect();
        drop(home.serve_with(&options, &variables));
    }

    /// Requests a sandbox from the snapshot, and does not wait for the answer.
    fn begin_create(&self, home: &TestHome) -> UnixStream {
        let body = json!({ "templateID": self.snapshot });
        sandbox_http::begin_call(home, "POST", "/sandboxes", &body)
    }

    /// Creates a sandbox from the snapshot.
    fn create(&self, home: &TestHome) -> String {
        home.ok(&["create", "--from", &self.snapshot])
    }

    /// Asserts that the snapshot is not available now, and that the attempt leaves no files.
    fn assert_refused(&self, home: &TestHome, words: &str) {
        self.assert_refusal(home, self.begin_create(home), words);
    }

    /// Asserts that a started create is rejected with `words`, and leaves no files.
    fn assert_refusal(&self, home: &TestHome, create: UnixStream, words: &str) {
        let (status, head, body) = sandbox_http::finish_call(create).unwrap();
        assert_eq!(status, 503, "{body}");
        assert!(body.contains("store_unavailable"), "{body}");
        assert!(body.contains(words), "{body}");
        assert!(head.contains("\r\nretry-after:"), "{head}");
        self.assert_absent(home);
    }

    /// Asserts that `home` has no files of the snapshot except cached files.
    fn assert_absent(&self, home: &TestHome) {
        wait_for("the files to be removed", || {
            (!directory(home, &self.snapshot).exists()).then_some(())
        });
        assert!(!home.ok(&["snapshots"]).contains("moving"));
        assert!(home.json(&["ls"]).as_array().unwrap().is_empty());
        let kinds = ["snapshots", "gvisor"].map(|kind| home.dir.path().join(kind));
        let names = kinds.iter().flat_map(fs::read_dir).flatten().flatten();
        let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
        let hidden = |name: &std::ffi::OsString| name.to_string_lossy().starts_with('.');
        assert!(!names.iter().any(hidden), "{names:?}");
    }

    /// Removes all files of the snapshot from `home`, but not from its cache.
    fn remove_from(&self, home: &TestHome, id: &str) {
        home.ok(&["rm", id]);
        home.ok(&["rm", "moving"]);
        self.assert_absent(home);
    }
}

fn assert_sound(home: &TestHome, id: &str) {
    assert_eq!(home.sh(id, CHECK), "sound");
}

/// Holds requests for large ranges of packs.
fn hold_bulk(request: &Request) -> Fault {
    if request.is_of_pack() && request.range_bytes() > BULK_BYTES {
        Fault::Hold
    } else {
        Fault::None
    }
}

#[jiffy_test(engine = "each")]
fn a_snapshot_reaches_another_host_through_a_bucket_that_fails_in_all_ways() {
    let Some(mut bucket) = Bucket::new() else {
        return;
    };
    let here = TestHome::new();
    bucket.serve(&here, "wrong", &[]);
    bucket.assert_refused(&here, "AWS_SECRET_ACCESS_KEY");
    here.ok(&["serve", "--stop"]);
    here.wait_for_daemon_exit();
    bucket.serve(&here, s3::SECRET, &[]);
    bucket.server.stop();
    bucket.assert_refused(&here, "try again when the store is available");
    bucket.server.run();
    bucket.proxy.on(|_| Fault::Status(503));
    bucket.assert_refused(&here, "after 6 attempts");
    // Of seven requests, two fail and one is slow, up to the hundredth request.
    let mut count = 0;
    bucket.proxy.on(move |_| {
        count += 1;
        match count % 7 {
            _ if count > 100 => Fault::None,
            1 => Fault::Status(503),
            3 => Fault::Cut,
            5 => Fault::Slow(Duration::from_millis(300)),
            _ => Fault::None,
        }
    });
    let id = bucket.create(&here);
    assert_sound(&here, &id);
    bucket.proxy.clear_faults();
    // The snapshot behaves like a local snapshot.
    here.ok(&["pause", &id]);
    here.ok(&["resume", &id]);
    assert_sound(&here, &id);
    here.ok(&["serve", "--stop", "--kill-sandboxes"]);
}

/// Returns whether `one` and `other` are different ranges of a pack that a single request could
/// read.
fn is_adjacent(one: &Request, other: &Request) -> bool {
    let (Some(range), Some(next)) = (&one.range, &other.range) else {
        return false;
    };
    let gap = next
        .start
        .saturating_sub(range.end)
        .max(range.start.saturating_sub(next.end));
    one.path == other.path && range != next && gap <= BULK_BYTES
}

/// Asserts that all data required to start the guest is read in large ranges.
fn assert_few_and_large(requests: &[Request]) {
    // Later requests are for chunks that the guest waits for.
    let is_bulk = |request: &Request| request.is_of_pack() && request.range_bytes() >= BULK_BYTES;
    let last = requests.iter().rposition(is_bulk).unwrap();
    let ranges = requests[..=last]
        .iter()
        .filter(|request| request.is_of_pack());
    let (files, pieces): (Vec<_>, Vec<_>) =
        ranges.partition(|request| request.range_bytes() < SMALL_FILE_BYTES);
    // The small ranges are the files of two snapshots, a few each.
    assert!(files.len() <= 20, "{files:?}");
    // No other required data is adjacent to a small range, which is the rest of a pack or of a
    // layer.
    let small = pieces
        .iter()
        .filter(|piece| piece.range_bytes() < BULK_BYTES);
    for piece in small {
        let beside = pieces.iter().find(|other| is_adjacent(piece, other));
        assert!(beside.is_none(), "{piece:?} {beside:?}");
    }
    assert!(requests[..=last].len() <= 60, "{requests:?}");
}

#[jiffy_test]
fn a_resume_reads_its_working_set_in_few_requests_and_survives_an_outage() {
    if fs::File::open("/dev/userfaultfd").is_err() {
        return skip("/dev/userfaultfd cannot be opened");
    }
    let Some(mut bucket) = Bucket::new() else {
        return;
    };
    let here = TestHome::new();
    bucket.serve(&here, s3::SECRET, &[]);
    let id = bucket.create(&here);
    let mut requests = bucket.proxy.requests();
    assert_few_and_large(&requests);
    let check = here.begin(&["exec", &id, "--", "sh", "-c", CHECK]);
    wait_for("chunks for which the guest waits", || {
        requests.extend(bucket.proxy.requests());
        requests
            .last()
            .is_some_and(Request::is_of_pack)
            .then_some(())
    });
    bucket.server.stop();
    // Wait for more attempts for one chunk than the number after which a request fails.
    let (sender, attempts) = std::sync::mpsc::channel();
    bucket.proxy.on(move |request| {
        let _ = sender.send(format!("{} {:?}", request.path, request.range));
        Fault::None
    });
    let first = attempts.recv_timeout(crate::support::LIMIT).unwrap();
    let mut seen = std::collections::HashMap::from([(first, 1)]);
    while *seen.values().max().unwrap() < 8 {
        *seen
            .entry(attempts.recv_timeout(crate::support::LIMIT).unwrap())
            .or_insert(0) += 1;
    }
    bucket.proxy.clear_faults();
    bucket.server.run();
    let checked = finish(check);
    assert_eq!(checked.stdout.trim_end(), "sound", "{checked:?}");
    requests.extend(bucket.proxy.requests());
    let moved: u64 = requests.iter().map(|request| request.bytes).sum();
    let layers = fs::read_dir(here.dir.path().join("store/layers")).unwrap();
    let layers = layers.map(|layer| layer.unwrap().metadata().unwrap().blocks() * 512);
    let arrived: u64 = layers.sum();
    // The requests moved at most 30 % more bytes than the layers received.
    assert!(moved * 10 < arrived * 13, "{moved} for {arrived}");
    here.ok(&["serve", "--stop", "--kill-sandboxes"]);
}

/// Directory that is read-only while this value exists.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn new(path: &Path) -> Self {
        let none = None::<&str>;
        mount(Some(path), path, none, MsFlags::MS_BIND, none).unwrap();
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, path, none, flags, none).unwrap();
        Self(path.to_owned())
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[jiffy_test(engine = "each")]
fn a_fetch_that_is_killed_or_out_of_space_leaves_no_files_and_can_be_retried() {
    let Some((bucket, disk)) = Bucket::new().zip(SmallDisk::new("1g")) else {
        return;
    };
    let here = TestHome::in_directory(disk.path());
    // Without a small reserve, admission control would reject calls before the disk is full.
    let options = ["--reserve-disk", "1MiB"];
    bucket.serve(&here, s3::SECRET, &options);
    bucket.proxy.on(hold_bulk);
    let create = bucket.begin_create(&here);
    bucket.proxy.wait_for_held();
    here.kill_daemon();
    bucket.proxy.clear_faults();
    assert!(sandbox_http::finish_call(create).is_none());
    bucket.serve(&here, s3::SECRET, &options);
    bucket.assert_absent(&here);
    // The disk fills up while data is fetched.
    bucket.proxy.on(hold_bulk);
    let create = bucket.begin_create(&here);
    bucket.proxy.wait_for_held();
    disk.fill(256 << 10);
    bucket.proxy.clear_faults();
    bucket.assert_refusal(&here, create, "is full; free space");
    disk.free();
    let id = bucket.create(&here);
    assert_sound(&here, &id);
    bucket.remove_from(&here, &id);
    let layers = ReadOnly::new(&here.dir.path().join("store/layers"));
    bucket.assert_refused(&here, "cannot write");
    drop(layers);
    let id = bucket.create(&here);
    assert_sound(&here, &id);
    here.ok(&["serve", "--stop", "--kill-sandboxes"]);
}

#[jiffy_test]
fn a_paused_sandbox_is_resumed_on_another_host_of_the_bucket_and_runs_once() {
    let dir = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start(&dir.path().join("objects")) else {
        return skip("versitygw is not built: run scripts/test-servers");
    };
    let (there, here) = (TestHome::new(), TestHome::new());
    let bucket = Bucket {
        proxy: S3Proxy::new(server.address),
        server,
        keys: there.dir.path().join("store/keys.toml"),
        snapshot: String::new(),
        _dir: dir,
    };
    let share = ["--share-sandboxes"];
    bucket.serve(&there, s3::SECRET, &share);
    bucket.serve(&here, s3::SECRET, &share);
    let id = there.ok(&["create", "--name", "mover", "--timeout", "2h"]);
    there.sh(&id, BEGIN);
    there.ok(&["pause", &id, "--durable"]);
    let error = failure(&here, &["resume", "abcdefghijkmnpqrstuv"]);
    assert!(
        error.contains("neither on this host nor in the store"),
        "{error}"
    );

    here.ok(&["resume", &id]);
    assert_sound(&here, &id);
    let shown = here.ok(&["inspect", &id]);
    assert!(shown.contains("mover"), "{shown}");
    let error = failure(&there, &["resume", &id]);
    assert!(error.contains("runs on host"), "{error}");
    assert!(!there.ok(&["ls"]).contains("mover"));

    // Back again, with the changes of the other host.
    here.sh(&id, "echo moved > ~/moved");
    here.ok(&["pause", &id, "--durable"]);
    there.ok(&["resume", &id]);
    assert_eq!(there.sh(&id, "cat ~/moved").trim(), "moved");
    assert_sound(&there, &id);
    // The kill is written to the *head*, the record that decides which host may run the sandbox.
    there.ok(&["kill", &id]);
    wait_for("the head of the killed sandbox", || {
        let error = failure(&here, &["resume", &id]);
        error.contains("was killed").then_some(())
    });
    for home in [&there, &here] {
        home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    }
}

/// Runs a command that must fail, and returns its message.
fn failure(home: &TestHome, arguments: &[&str]) -> String {
    let done = home.call(arguments);
    assert_eq!(done.code, Some(1), "{arguments:?}: {done:?}");
    done.stderr
}
