//! Contract of detached guests, which outlive the process that started them.
//!
//! A *handle* is the text by which a later process finds a detached guest. The later process
//! *adopts* the guest, which means that it drives the guest from then on. `count` starts a process
//! in the guest that counts, and `counted` returns its process id and count.

use super::place::{Place, Running, exited, within};
use jiffy_engine_api::{AfterSnapshot, DetachedGuest, ExitReason, GuestHandle};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Returns the description of a guest that an earlier daemon has detached.
fn orphan(handle: &GuestHandle) -> DetachedGuest {
    DetachedGuest {
        handle: handle.clone(),
        snapshot: None,
        network: Default::default(),
        captured: None,
    }
}

pub async fn a_detached_guest_is_adopted_by_its_handle_and_continues(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.count().await;
    let at = running.counted().await;
    let pid = running.guest.pid();
    let mut handle = running.guest.detach().await.unwrap();
    drop((running, engine));
    // Two rounds: a guest that was detached once stays detached.
    for _ in 0..2 {
        let engine = place.open().await;
        let running = Running::of(engine.adopt(&orphan(&handle)).await.unwrap());
        assert_eq!(running.guest.engine(), place.engine.to_string());
        assert_eq!(running.guest.pid(), pid);
        running.wait_count_above(at).await;
        assert!(running.guest.usage().is_some());
        // Only the text of the handle is passed from one daemon to the next.
        handle = GuestHandle(handle.0.clone());
        drop((running, engine));
    }
    let engine = place.open().await;
    let running = Running::of(engine.adopt(&orphan(&handle)).await.unwrap());
    let id = running.snapshot(AfterSnapshot::Resume).await;
    let copy = place.restored(&engine, &id.unwrap()).await;
    copy.wait_count_above(at).await;
    copy.stop().await;
    running.wait_count_above(at).await;
    let guest = running.guest.clone();
    running.stop().await;
    assert_eq!(guest.ended().await, ExitReason::Requested);
}

pub async fn an_unknown_detached_guest_is_terminated(place: &Place) {
    let engine = place.open().await;
    let (one, other) = (place.guest(&engine).await, place.guest(&engine).await);
    let attached = place.guest(&engine).await;
    let [known_pid, unknown_pid, attached_pid] =
        [&one, &other, &attached].map(|running| running.guest.pid().unwrap());
    let known = one.guest.detach().await.unwrap();
    other.guest.detach().await.unwrap();
    drop((one, other, attached, engine));
    exited(attached_pid).await;
    let engine = place.open().await;
    let known = [known];
    // Guests that were not detached may still be exiting.
    assert!((1..=2).contains(&engine.end_unadopted(&known).await.unwrap()));
    exited(unknown_pid).await;
    assert_eq!(engine.end_unadopted(&known).await.unwrap(), 0);
    let running = Running::of(engine.adopt(&orphan(&known[0])).await.unwrap());
    assert_eq!(running.sh("echo fine").await, "fine");
    drop(running);
    assert_eq!(engine.end_unadopted(&[]).await.unwrap(), 1);
    exited(known_pid).await;
}

pub async fn a_guest_that_has_ended_cannot_be_adopted(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let handle = running.guest.detach().await.unwrap();
    running.stop().await;
    assert!(engine.adopt(&orphan(&handle)).await.is_err());
    let nonsense = GuestHandle("{}".to_owned());
    assert!(engine.adopt(&orphan(&nonsense)).await.is_err());
    assert_eq!(engine.end_unadopted(&[handle]).await.unwrap(), 0);
}

pub async fn a_killed_detached_guest_leaves_no_resources(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let pid = running.guest.pid().unwrap();
    running.guest.detach().await.unwrap();
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
    within("the end", running.guest.ended()).await;
    drop(running);
    place.wait_without_guests().await;
    // Kill another detached guest while no engine is open.
    let running = place.guest(&engine).await;
    let pid = running.guest.pid().unwrap();
    let handle = running.guest.detach().await.unwrap();
    drop((running, engine));
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
    exited(pid).await;
    let engine = place.open().await;
    assert!(engine.adopt(&orphan(&handle)).await.is_err());
    place.wait_without_guests().await;
}
