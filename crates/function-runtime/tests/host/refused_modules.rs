//! Tests for modules that are too large or whose compilation exceeds a limit.

use super::{KEY, NAME, deploy, deploy_module, files, get, open, settings};
use crate::support::many_functions;
use jiffy_function_manager::{FunctionError, Functions};
use jiffy_proto::function::{CompileLimits, MAX_MODULE_BYTES};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_module_that_takes_too_long_to_compile_leaves_the_previous_version() {
    let directory = tempfile::tempdir().unwrap();
    let mut settings = settings(directory.path(), Duration::from_secs(600));
    settings.compile = CompileLimits {
        cpu_s: 1,
        ..CompileLimits::default()
    };
    let functions = Functions::open(settings);
    deploy(&functions, "former").await;
    let before = files(directory.path());
    let deploying = deploy_module(&functions, KEY, NAME, &many_functions()).await;
    match deploying {
        Err(FunctionError::Module(reason)) => {
            assert!(reason.contains("ran out of memory or time"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(get(&functions).await, "former");
    assert_eq!(files(directory.path()), before);
    functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_above_the_limit_is_rejected_during_the_upload() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    let mut upload = functions.upload().unwrap();
    let part = vec![0; 1 << 20];
    // The upload reaches the limit exactly. The next byte exceeds it.
    for _ in 0..MAX_MODULE_BYTES >> 20 {
        upload.write(&part).unwrap();
    }
    let refused = upload.write(&[0]);
    assert!(
        matches!(refused, Err(FunctionError::TooLarge)),
        "{refused:?}"
    );
    drop(upload);
    assert_eq!(files(directory.path()), [""; 0]);
}
