//! Faults between a client and its records.

use super::contract::{key, put, value};
use super::proxy::{Mode, Proxy};
use super::servers::{self, SHORT_ATTEMPT, SHORT_CALL};
use jiffy_fleet::records::Fault;
use jiffy_fleet::{MemoryRecords, RecordError, Records, Written};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time beyond the limit of a call after which its error must have been returned: the machine may
/// be busy.
const TOLERANCE: Duration = Duration::from_secs(5);

/// Number of lost responses. `JIFFY_LOST_ANSWERS` overrides it.
fn lost_answers() -> usize {
    let number = std::env::var("JIFFY_LOST_ANSWERS").ok();
    number.map_or(60, |number| number.parse().unwrap())
}

/// Client through a proxy, and client without it.
struct Bench {
    proxy: Proxy,
    through: Arc<dyn Records>,
    direct: Arc<dyn Records>,
}

impl Bench {
    async fn new(server: SocketAddr, open: fn(SocketAddr, bool) -> Arc<dyn Records>) -> Self {
        let proxy = Proxy::start(server).await;
        Self {
            through: open(proxy.address, true),
            direct: open(server, false),
            proxy,
        }
    }
}

async fn faults_are_handled(bench: &Bench) {
    writes_with_lost_responses_are_recognised(bench).await;
    a_write_that_arrives_late_changes_nothing(bench).await;
    silence_and_errors_end_with_a_typed_error(bench).await;
}

async fn writes_with_lost_responses_are_recognised(bench: &Bench) {
    let key = key("faults/lost");
    let mut version = put(&bench.through, &key, "start").await;
    for number in 0..lost_answers() {
        bench.proxy.set(Mode::LoseNextAnswer);
        let content = format!("write {number}");
        let written = bench.through.replace(&key, value(&content), &version).await;
        let Written::Done(next) = written.unwrap() else {
            panic!("write {number} was reported as lost");
        };
        let read = bench.direct.get(&key).await.unwrap().unwrap();
        assert_eq!(
            (&read.value[..], &read.version),
            (content.as_bytes(), &next)
        );
        // A replacement of an outdated version is not reported as done, even if its response is
        // lost.
        bench.proxy.set(Mode::LoseNextAnswer);
        let outdated = bench
            .through
            .replace(&key, value("foreign"), &version)
            .await;
        let Written::Lost(Some(current)) = outdated.unwrap() else {
            panic!("an outdated write {number} was reported as done");
        };
        assert_eq!(current.version, next);
        version = next;
    }
    let created = super::contract::key("faults/created");
    bench.proxy.set(Mode::LoseNextAnswer);
    put(&bench.through, &created, "created").await;
}

async fn a_write_that_arrives_late_changes_nothing(bench: &Bench) {
    let key = key("faults/late");
    let version = put(&bench.direct, &key, "start").await;
    let before = bench.proxy.forwarded();
    bench.proxy.set(Mode::Delay(SHORT_CALL * 2));
    let late = bench.through.replace(&key, value("late"), &version).await;
    let error = late.unwrap_err();
    assert!(matches!(error, RecordError::Unknown { .. }), "{error}");
    let written = bench.direct.replace(&key, value("winner"), &version).await;
    assert!(matches!(written.unwrap(), Written::Done(_)));
    // The delayed write reaches the server.
    bench.proxy.wait_for_more(before).await;
    let read = bench.direct.get(&key).await.unwrap().unwrap();
    assert_eq!(&read.value[..], b"winner");
    // A repetition of the write reports its outcome.
    bench.proxy.set(Mode::Forward);
    let outcome = bench.through.replace(&key, value("late"), &version).await;
    assert_eq!(outcome.unwrap(), Written::Lost(Some(read)));
}

async fn silence_and_errors_end_with_a_typed_error(bench: &Bench) {
    let key = key("faults/silent");
    let version = put(&bench.direct, &key, "start").await;
    for mode in [
        Mode::Silent,
        Mode::Unavailable,
        Mode::Delay(SHORT_ATTEMPT * 4),
    ] {
        bench.proxy.set(mode);
        let start = Instant::now();
        let error = bench.through.get(&key).await.unwrap_err();
        assert!(
            matches!(error, RecordError::Unavailable { .. }),
            "{mode:?}: {error}"
        );
        let error = bench.through.list(&key, None, 1).await.unwrap_err();
        assert!(
            matches!(error, RecordError::Unavailable { .. }),
            "{mode:?}: {error}"
        );
        let write = bench.through.replace(&key, value("x"), &version).await;
        let error = write.unwrap_err();
        assert!(
            matches!(error, RecordError::Unknown { .. }),
            "{mode:?}: {error}"
        );
        // Three calls, each with its own limit.
        assert!(start.elapsed() < SHORT_CALL * 3 + TOLERANCE, "{mode:?}");
    }
    bench.proxy.set(Mode::Forward);
    assert!(bench.through.get(&key).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_an_s3_store_are_handled() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::versitygw(dir.path(), &[]) else {
        return;
    };
    faults_are_handled(&Bench::new(address, servers::store_records).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_etcd_are_handled() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::etcd(dir.path()) else {
        return;
    };
    faults_are_handled(&Bench::new(address, servers::etcd_records).await).await;
}

#[tokio::test]
async fn faults_of_records_in_memory_are_handled() {
    let direct = MemoryRecords::default();
    let through = direct.with_timeouts(SHORT_ATTEMPT, SHORT_CALL);
    let key = key("faults/memory");
    let Written::Done(mut version) = through.create(&key, value("start")).await.unwrap() else {
        panic!("not created");
    };
    for number in 0..lost_answers() {
        direct.inject(Fault::LoseAnswer, 1);
        let content = value(&number.to_string());
        let written = through.replace(&key, content, &version).await.unwrap();
        let Written::Done(next) = written else {
            panic!("write {number} was reported as lost");
        };
        version = next;
    }
    direct.inject(Fault::Unavailable, usize::MAX);
    let error = through.get(&key).await.unwrap_err();
    assert!(matches!(error, RecordError::Unavailable { .. }), "{error}");
    let write = through.replace(&key, value("x"), &version).await;
    assert!(
        matches!(write, Err(RecordError::Unknown { .. })),
        "{write:?}"
    );
    // One delayed attempt arrives after another writer has succeeded.
    let late = direct.with_timeouts(SHORT_ATTEMPT, SHORT_ATTEMPT);
    direct.inject(Fault::Delay(SHORT_ATTEMPT * 2), 1);
    let write = late.replace(&key, value("late"), &version).await;
    assert!(
        matches!(write, Err(RecordError::Unknown { .. })),
        "{write:?}"
    );
    let winner = direct
        .replace(&key, value("winner"), &version)
        .await
        .unwrap();
    assert!(matches!(winner, Written::Done(_)));
    tokio::time::sleep(SHORT_ATTEMPT * 2).await;
    let read = direct.get(&key).await.unwrap().unwrap();
    assert_eq!(&read.value[..], b"winner");
}
