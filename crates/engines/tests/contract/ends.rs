//! Contract of the exit of guests and of the release of their resources.

use super::place::{Place, TEMPLATE, exited, size, within};
use jiffy_engine_api::{AfterSnapshot, ExitReason};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub async fn dropped_guests_leave_no_resources(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let id = running.snapshot(AfterSnapshot::Resume).await;
    let id = id.unwrap();
    let pid = running.guest.pid().unwrap();
    drop(engine.boot(TEMPLATE, size()).await.unwrap());
    let unassigned = engine.restore(&id, None).await.unwrap();
    assert!(unassigned.is_waiting());
    drop((unassigned, running));
    exited(pid).await;
    place.wait_without_guests().await;
    // Drop several guests at the same time.
    let restored = (0..4).map(|_| engine.restore(&id, None));
    let mut unassigned_guests = Vec::new();
    for restored in restored {
        unassigned_guests.push(restored.await.unwrap());
    }
    drop(unassigned_guests);
    place.wait_without_guests().await;
}

pub async fn a_stopped_guest_reports_that_it_was_stopped(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let waiting_guest = running.guest.clone();
    let ended = tokio::spawn(async move { waiting_guest.ended().await });
    running.guest.stop().await;
    running.guest.stop().await;
    assert_eq!(ended.await.unwrap(), ExitReason::Requested);
    assert_eq!(running.guest.ended().await, ExitReason::Requested);
    assert!(running.agent.health().await.is_err());
    // A guest that has ended cannot be snapshotted.
    let late = running.snapshot(AfterSnapshot::Resume).await;
    assert!(late.is_err());
    assert_eq!(engine.snapshot_files().ids().unwrap(), [""; 0]);
}

pub async fn a_guest_that_shuts_down_reports_it(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    // reboot(2): LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_RESTART. A kernel
    // without this call ends when its first process ends.
    let program = "import ctypes, os
ctypes.CDLL(None).syscall(ctypes.c_long(169), ctypes.c_long(0xfee1dead), ctypes.c_long(672274793), ctypes.c_long(0x1234567), None)
os.kill(1, 9)";
    // Ignore an error: the guest may end before it confirms the start.
    let _ = running.start(&["python3", "-c", program]).await;
    let end = within("the end", running.guest.ended()).await;
    assert_eq!(
        end,
        ExitReason::GuestReset,
        "{}",
        running.guest.console_tail()
    );
}

pub async fn a_guest_that_is_killed_reports_it(place: &Place) {
    let engine = place.open().await;
    for restored in [false, true] {
        let mut running = place.guest(&engine).await;
        if restored {
            let id = running.snapshot(AfterSnapshot::Stop).await;
            running = place.restored(&engine, &id.unwrap()).await;
        }
        let pid = running.guest.pid().unwrap();
        kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
        let end = within("the end", running.guest.ended()).await;
        assert!(matches!(end, ExitReason::VmmDied { .. }), "{end:?}");
        assert!(end.to_string().contains("signal"), "{end}");
        running.stop().await;
    }
}
