//! Tests of the threads for calls that may block forever, such as calls on a stuck file system.
//!
//! The calls are divided into classes, such as calls on files and starts of processes. Each class
//! has a limit of threads and a *patience*: a call without progress for a longer time is *stuck*.
//! The *place* of a call is the mount point above its path, or on the root file system the path
//! itself.

use super::*;
use std::path::Path;
use std::sync::mpsc;

/// Starts a call that blocks a thread until the returned sender is dropped. Returns when the call
/// is running. The call counts as stuck after [`age`].
fn hold(workers: &Workers, class: CallClass, path: &'static str) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (started, begun) = mpsc::channel();
    let workers = workers.clone();
    tokio::spawn(async move {
        let work = move |progress: &Progress| {
            progress.enter(Path::new(path)).unwrap();
            started.send(()).unwrap();
            let _ = held.recv();
        };
        let _ = workers
            .run(class, format!("cannot read '{path}'"), work)
            .await;
    });
    std::thread::scope(|scope| {
        tokio::task::block_in_place(|| scope.spawn(move || begun.recv().unwrap()).join().unwrap());
    });
    release
}

/// Sets the last progress of the running calls to the pool's epoch (its start), so that they count
/// as stuck.
fn age(workers: &Workers) {
    for record in &lock(&workers.0.state).running {
        record.progress_ms.store(0, Ordering::Relaxed);
    }
}

/// Returns a pool without a permanent thread. Its epoch is older than the patience of every class,
/// as [`age`] requires.
fn pool_with_old_epoch() -> Workers {
    Workers(Arc::new(Pool {
        epoch: Instant::now() - Duration::from_secs(3600),
        patience: None,
        state: Mutex::default(),
        ready: Condvar::new(),
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn stuck_calls_neither_block_others_nor_exceed_their_limit() {
    let workers = pool_with_old_epoch();
    let class = CallClass::Files;
    let mut held = Vec::new();
    // Each call has a separate place, since a third call on one place is rejected.
    let places: Vec<&'static str> = (0..class.max_threads())
        .map(|n| &*format!("/place-{n}").leak())
        .collect();
    for place in places {
        held.push(hold(&workers, class, place));
        age(&workers);
        if held.len() < class.max_threads() {
            let answer = workers.run(class, "cannot add", |_| 1 + 1).await;
            assert_eq!(answer, Ok(2), "with {} stuck calls", held.len());
        }
    }
    assert_eq!(workers.stuck(), class.max_threads());
    let rejected = workers.run(class, "cannot add", |_| ()).await;
    assert!(
        matches!(rejected, Err(CallError::Exhausted { stuck, .. }) if stuck == class.max_threads())
    );
    // Processes can still be started.
    let answer = workers.run(CallClass::Start, "cannot start", |_| 3).await;
    assert_eq!(answer, Ok(3));
    drop(held);
    let began = Instant::now();
    while workers.stuck() > 0 {
        assert!(began.elapsed() < Duration::from_secs(10));
        tokio::task::yield_now().await;
    }
    assert_eq!(workers.run(class, "cannot add", |_| 4).await, Ok(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_with_stuck_calls_rejects_further_calls_immediately() {
    let workers = pool_with_old_epoch();
    let _held = [
        hold(&workers, CallClass::Files, "/place"),
        hold(&workers, CallClass::Start, "/place"),
    ];
    age(&workers);
    let enter = |path: &'static str| {
        let workers = workers.clone();
        async move {
            let work = move |progress: &Progress| progress.enter(Path::new(path));
            workers.attempt(CallClass::Files, "cannot list", work).await
        }
    };
    let rejected = enter("/place").await;
    assert!(matches!(rejected, Err(CallError::Unresponsive { .. })));
    assert_eq!(enter("/other").await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_above_the_limit_wait_for_a_thread() {
    let workers = Workers::new(None).unwrap();
    let calls: Vec<_> = (0..50)
        .map(|n| {
            let workers = workers.clone();
            let call = async move {
                workers
                    .run(CallClass::Start, "cannot count", move |_| n)
                    .await
            };
            tokio::spawn(call)
        })
        .collect();
    let mut sum = 0;
    for call in calls {
        sum += call.await.unwrap().unwrap();
    }
    assert_eq!(sum, (0..50).sum::<usize>());
    let began = Instant::now();
    while !lock(&workers.0.state).running.is_empty() {
        assert!(began.elapsed() < Duration::from_secs(10));
        tokio::task::yield_now().await;
    }
}
