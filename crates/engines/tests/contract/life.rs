//! Contract of boots and of operations on running guests.
//!
//! An *unassigned* guest is started but does not belong to a sandbox yet: it waits for its
//! *identity*, which consists of id, host name, entropy and clock.

use super::place::{Place, Running, TEMPLATE, missing, new_identity, size};
use crate::support::{programs, skip, until};
use jiffy_engine_api::{AfterSnapshot, BootMode, EngineName, SandboxIdentity};
use std::time::Duration;
use tokio::io::AsyncReadExt;

pub async fn an_unassigned_guest_waits_and_takes_its_assigned_identity(place: &Place) {
    let engine = place.open().await;
    let unassigned = engine.boot(TEMPLATE, size()).await.unwrap();
    assert!(unassigned.is_waiting());
    let token = "a-secret";
    let sandbox_identity = SandboxIdentity {
        env: [("WHO", "a value")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
        access_token: Some(token.to_owned()),
        ..new_identity()
    };
    let mut running = Running::assign_identity(unassigned, &sandbox_identity).await;
    assert_eq!(running.guest.engine(), place.engine.to_string());
    let report = running.guest.report();
    assert_eq!(report.mode, BootMode::Cold);
    assert!(report.total_us > 0);
    let refused = running.agent.list().await.unwrap_err();
    assert!(refused.to_string().contains("X-Access-Token"), "{refused}");
    running.agent = running.agent.clone().with_token(token);
    let output = running
        .sh("hostname; echo $WHO; cut -d' ' -f1 /run/jiffy/generation")
        .await;
    assert_eq!(output, format!("{0}\na value\n{0}", sandbox_identity.id));
    running.stop().await;
}

pub async fn a_sandbox_starts_on_the_selected_engine(place: &Place) {
    let other = match place.engine {
        EngineName::MicroVm => EngineName::Gvisor,
        EngineName::Gvisor => EngineName::MicroVm,
    };
    let test = "a_sandbox_starts_on_the_selected_engine";
    if let Some(why) = missing(other) {
        return skip(test, &why);
    }
    // The other engine is the default.
    let engine = place.open_with(other, programs()).await;
    let own = place.engine.to_string();
    let own_state = engine.prepare(TEMPLATE).await;
    let default = engine.engines.default_engine();
    let default_state = default.prepare(TEMPLATE).await;
    let fingerprint = |state: jiffy_engine_api::TemplateState| state.snapshot_fingerprint(size());
    // Sandboxes with equal fingerprints share a snapshot of the booted template. Sandboxes of
    // different engines must not.
    assert_ne!(
        fingerprint(own_state.unwrap()),
        fingerprint(default_state.unwrap())
    );
    let unassigned = engine.boot(TEMPLATE, size()).await.unwrap();
    let running = Running::assign_identity(unassigned, &new_identity()).await;
    assert_eq!(running.guest.engine(), own);
    running.count().await;
    let id = running.snapshot(AfterSnapshot::Stop).await.unwrap();
    drop(running);
    let restored = place.restored(&engine, &id).await;
    assert_eq!(restored.guest.engine(), own);
    restored.stop().await;
    assert!(engine.engines.get("nosuch").is_err());
    // The engine may notice the end of the original guest only after the reply.
    while engine.snapshot_files().remove(&id).is_err() {
        tokio::task::yield_now().await;
    }
}

pub async fn commands_run_and_report_their_exit_status(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let (status, stdout, stderr) = running.script("echo out; echo bad >&2; exit 7").await;
    assert_eq!((status.exit_code, status.exited), (7, true));
    assert_eq!((&*stdout, &*stderr), ("out", "bad"));
    let (status, ..) = running.script("kill -9 $$").await;
    assert_eq!((status.exit_code, status.exited), (137, false));
    // A large output must be complete.
    assert_eq!(
        running
            .sh("head -c 900000 /dev/zero | tr '\\0' x")
            .await
            .len(),
        900_000
    );
    running.stop().await;
}

pub async fn files_are_written_and_read(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let file = "/root/deep/down/file";
    let written = running.agent.write(file, Some("root"), content.clone());
    written.await.unwrap();
    assert_eq!(
        running.sh(&format!("stat -c %s {file}")).await,
        content.len().to_string()
    );
    running.sh(&format!("cp {file} /root/copy")).await;
    let read = running.agent.read("/root/copy", Some("root"), 4 << 20);
    assert!(read.await.unwrap() == content);
    let none = running.agent.read("/none", None, 1).await.unwrap_err();
    assert!(none.is_not_found(), "{none}");
    running.stop().await;
}

pub async fn a_connection_to_a_closed_port_reads_as_closed(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let mut stream = running.guest.connect(49_990).await.unwrap();
    let mut byte = [0];
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut byte));
    // A reset or an end of the stream: no data is read.
    assert_eq!(read.await.unwrap().unwrap_or(0), 0);
    assert_eq!(running.sh("echo fine").await, "fine");
    running.stop().await;
}

pub async fn usage_grows_when_the_guest_computes(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let before = running.guest.usage().unwrap();
    assert!(before.memory_bytes > 1 << 20, "{before:?}");
    // 112 MiB that stay allocated, because a guest that has just started may return some memory
    // meanwhile. The program computes until the guest is stopped, because the guest's clocks also
    // count time in which the host runs other programs.
    let program = "held = bytearray(b'x') * (112 << 20)
print('allocated', flush=True)
while True: pass";
    let mut process = running.start(&["python3", "-c", program]).await;
    assert_eq!(super::place::next_output(&mut process).await, "allocated\n");
    let grown = until(
        "the usage to grow",
        async || running.guest.usage().unwrap(),
        |now| {
            now.cpu_us >= before.cpu_us + 400_000
                && now.memory_bytes >= before.memory_bytes + (48 << 20)
        },
    );
    grown.await;
    running.stop().await;
}

/// 40 programs that use all memory at the same time. Each first writes to one page per huge page.
/// An engine that provides memory in larger pieces must count these pieces and the page tables. The
/// first three programs that end must have been killed by the guest's kernel (signal 9). The others
/// are then killed.
const MANY_HOGS: &str = "
import mmap, os
def hog():
    os.close(go)
    os.read(ready, 1)
    held = mmap.mmap(-1, 200 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for step in (2 << 20, 4096):
        for page in range(0, 200 << 20, step): held[page] = 1
    os._exit(1)
ready, go = os.pipe()
hogs = set()
for _ in range(40):
    child = os.fork()
    if child == 0: hog()
    hogs.add(child)
os.close(go)
for _ in range(3):
    child, status = os.wait()
    assert status == 9, status
    hogs.remove(child)
for child in hogs: os.kill(child, 9)
for child in hogs: os.waitpid(child, 0)";

pub async fn out_of_memory_kills_only_the_program_that_uses_the_memory(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.count().await;
    let before = running.counted().await;
    // Allocate memory without and with a reservation in advance.
    let hogs = [
        "held = []
while True: held.append(b'x' * (1 << 20))",
        "import mmap
held = [mmap.mmap(-1, 200 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
for page in range(0, 200 << 20, 4096):
    for one in held: one[page] = 1",
    ];
    for hog in hogs {
        for _ in 0..2 {
            let (status, stdout, stderr) = running.script(&format!("python3 -c \"{hog}\"")).await;
            assert_eq!(status.exit_code, 137, "{stdout} {stderr}");
            assert_eq!(running.sh("echo fine").await, "fine");
        }
    }
    let (status, _, stderr) = running.script(&format!("python3 -c \"{MANY_HOGS}\"")).await;
    assert_eq!(status.exit_code, 0, "{stderr}");
    assert_eq!(running.sh("echo fine").await, "fine");
    running.wait_count_above(before).await;
    running.stop().await;
}

pub async fn a_full_disk_is_an_error_and_does_not_end_the_guest(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    for _ in 0..3 {
        let (status, _, stderr) = running
            .script("dd if=/dev/zero of=/root/fill bs=1M count=1000")
            .await;
        assert_eq!(status.exit_code, 1, "{stderr}");
        assert!(stderr.contains("No space left on device"), "{stderr}");
        // Programs must still run and be able to free space.
        let write = "python3 -c \"print('fine')\" && rm /root/fill && echo fine >/root/note && cat /root/note";
        assert_eq!(running.sh(write).await, "fine\nfine");
    }
    running.stop().await;
}
