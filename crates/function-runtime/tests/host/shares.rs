//! Tests for fair shares: disk space is reserved before it is used, and compilers take turns.

use super::{KEY, NAME, deploy_module, files, open, settings};
use crate::support::constant;
use crate::support::many_functions;
use jiffy_function_manager::{
    BoxError, DeployChanges, DeployQuota, DiskQuota, FunctionError, Functions, ModuleDigest,
};
use jiffy_proto::function::CompileLimits;
use std::path::Path;
use std::time::Duration;

/// Quota with a number of bytes. Checks that no data was written before its reservation.
#[derive(Debug)]
struct TestQuota {
    left: u64,
    directory: std::path::PathBuf,
    reserved: u64,
}

impl TestQuota {
    fn of(directory: &Path, left: u64) -> DeployQuota {
        DeployQuota::limited(Self {
            left,
            directory: directory.to_owned(),
            reserved: written(directory),
        })
    }
}

/// Returns the size of all files below a directory, without records.
fn written(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() && entry.file_name() != "records" => written(&entry.path()),
        Ok(found) if found.is_file() && entry.file_name() != "process.json" => found.len(),
        _ => 0,
    });
    bytes.sum()
}

impl DiskQuota for TestQuota {
    fn grow(&mut self, bytes: u64) -> Result<(), BoxError> {
        let before = written(&self.directory);
        assert!(before <= self.reserved, "{before} of {}", self.reserved);
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or("the budget is used up")?;
        self.reserved += bytes;
        Ok(())
    }
}

fn exceeds_quota<T>(result: &Result<T, FunctionError>) -> bool {
    matches!(result, Err(FunctionError::QuotaExceeded(e)) if e.to_string() == "the budget is used up")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_reserves_disk_space_before_it_writes() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    let module = wat::parse_bytes(&constant("first")).unwrap().into_owned();
    let length = u64::try_from(module.len()).unwrap();
    let room = |left| TestQuota::of(directory.path(), left);

    // Neither the module nor its machine code may exceed the quota.
    let mut upload = functions.upload_of(KEY, room(length - 1)).await.unwrap();
    let refused = upload.write(&module);
    assert!(exceeds_quota(&refused), "{refused:?}");
    drop(upload);
    // The module fits, but its machine code needs more than 4096 bytes.
    for left in [length, length + 4096] {
        let mut upload = functions.upload_of(KEY, room(left)).await.unwrap();
        upload.write(&module).unwrap();
        let changes = DeployChanges::default();
        let refused = functions.deploy(KEY, NAME, changes, upload).await;
        assert!(exceeds_quota(&refused), "{refused:?}");
        assert_eq!(files(directory.path()), [""; 0]);
    }
    let mut upload = functions.upload_of(KEY, room(4 << 20)).await.unwrap();
    upload.write(&module).unwrap();
    let changes = DeployChanges::default();
    functions.deploy(KEY, NAME, changes, upload).await.unwrap();

    // A copy of a module that the owner already has requires the size of the module.
    let before = files(directory.path());
    let digest = ModuleDigest::from(blake3::hash(&module));
    let found = functions.find_module(KEY, digest).await.unwrap();
    assert_eq!(found.bytes(), length);
    assert_eq!(files(directory.path()), before, "no file is copied yet");
    let refused = functions.copy_module(KEY, found, room(length - 1)).await;
    assert!(exceeds_quota(&refused), "{refused:?}");
    assert_eq!(files(directory.path()), before);
    functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_compilations_of_some_owners_do_not_delay_another() {
    let directory = tempfile::tempdir().unwrap();
    let mut settings = settings(directory.path(), Duration::from_secs(600));
    settings.compile = CompileLimits {
        time: Duration::from_secs(2),
        ..CompileLimits::default()
    };
    let functions = Functions::open(settings);
    // Start the processes first, so that only compilations are compared.
    let quick = constant("quick");
    for key in ["k1", "k2", "k3"] {
        let first = deploy_module(&functions, Some(key), "first", &constant(key)).await;
        first.unwrap();
    }
    let slow = many_functions();
    let begin = |key: &'static str| {
        let (functions, slow) = (functions.clone(), slow.clone());
        tokio::spawn(async move { deploy_module(&functions, Some(key), "slow", &slow).await })
    };
    let (one, other) = (begin("k1"), begin("k2"));
    wait_for_compilers(2).await;
    deploy_module(&functions, Some("k3"), NAME, &quick)
        .await
        .unwrap();
    let ended = [&one, &other].map(tokio::task::JoinHandle::is_finished);
    assert_eq!(
        ended, [false; 2],
        "the slow modules are still being compiled"
    );
    for slow in [one, other] {
        let refused = slow.await.unwrap().unwrap_err().to_string();
        assert!(refused.contains("takes too long to compile"), "{refused}");
    }
    functions.stop_all().await;
}

/// Waits until `count` compilers of this process run.
async fn wait_for_compilers(count: usize) {
    let tasks = || std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let is_compiler = |id: &str| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).nth(1) == Some(b"compile")
    };
    let running = || {
        let children = tasks().flatten().map(|task| {
            let children = std::fs::read_to_string(task.path().join("children"));
            let children = children.unwrap_or_default();
            let all = children.split_whitespace();
            all.filter(|id| is_compiler(id)).count()
        });
        children.sum::<usize>()
    };
    let limit = std::time::Instant::now() + Duration::from_secs(20);
    while running() < count {
        assert!(std::time::Instant::now() < limit, "no compiler has started");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
