//! Balloon and free page reporting: memory that a guest returns to its host.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{Guest, base, size, until};

/// Tolerance for the memory of a guest and its VMM, in MiB: page tables, caches, and the VMM
/// process.
const SLACK: u64 = 24;

/// Writes `mib` MiB of memory, which stay in use until the file is removed.
async fn fill(guest: &Guest, mib: u64) {
    guest.run(&["mkdir", "-p", "/fill"]).await;
    guest
        .run(&["mount", "-t", "tmpfs", "-o", "size=100%", "none", "/fill"])
        .await;
    let of = format!("count={mib}");
    guest
        .run(&["dd", "if=/dev/urandom", "of=/fill/data", "bs=1M", &of])
        .await;
}

#[tokio::test]
async fn the_balloon_reaches_its_target_and_returns_the_memory() {
    let Some(prepared) = base("the_balloon_reaches_its_target_and_returns_the_memory") else {
        return;
    };
    let guest = Guest::boot(&prepared, &size(1, 512)).await;
    let free = guest.meminfo("MemFree").await;
    guest.vm.set_balloon(128).unwrap();
    let less = until(
        "the balloon to take 128 MiB",
        async || guest.meminfo("MemFree").await,
        |now| *now + 128 <= free + SLACK,
    )
    .await;
    println!("balloon of 128 MiB: MemFree {free} -> {less} MiB");
    assert!(less + 128 + SLACK > free, "{free} -> {less}");
    guest.vm.set_balloon(0).unwrap();
    until(
        "the balloon to give 128 MiB back",
        async || guest.meminfo("MemFree").await,
        |now| *now + SLACK > free,
    )
    .await;
    // Use all of the memory, which fails unless it is backed by the host.
    fill(&guest, 400).await;
    guest.run(&["cksum", "/fill/data"]).await;
    guest.finish().await;
}

/// The guest handles a *quiet* interrupt without reading or acknowledging a status register, which
/// saves two exits. Devices with quiet interrupts have the vendor id `0x4646494a`.
///
/// The balloon driver must also receive interrupts for configuration changes, which involve no
/// queue. A quiet device would have to repeat such an interrupt until the guest notices it. The
/// balloon is therefore an ordinary device, whose interrupts are acknowledged.
#[tokio::test]
async fn only_the_balloon_has_ordinary_interrupts() {
    let Some(prepared) = base("only_the_balloon_has_ordinary_interrupts") else {
        return;
    };
    let guest = Guest::boot(&prepared, &size(1, 256)).await;
    let script =
        "cd /sys/bus/virtio/devices && for d in *; do echo $(cat $d/device $d/vendor); done";
    let output = guest.run(&["sh", "-c", script]).await;
    let mut devices: Vec<_> = output.lines().collect();
    devices.sort_unstable();
    let quiet = "0x4646494a";
    // The device ids are 2 for disks, 4 for random numbers, 5 for the balloon and 0x13 for sockets.
    assert_eq!(
        devices,
        [
            &format!("0x0002 {quiet}"),
            &format!("0x0002 {quiet}"),
            &format!("0x0002 {quiet}"),
            &format!("0x0004 {quiet}"),
            "0x0005 0x0000",
            &format!("0x0013 {quiet}"),
        ]
    );
    guest.finish().await;
}

#[tokio::test]
async fn a_balloon_larger_than_the_guest_does_not_kill_it() {
    let Some(prepared) = base("a_balloon_larger_than_the_guest_does_not_kill_it") else {
        return;
    };
    let guest = Guest::boot(&prepared, &size(1, 256)).await;
    // Fill the memory with page cache of the disk.
    guest
        .run(&["dd", "if=/dev/vdb", "of=/dev/null", "bs=1M", "count=220"])
        .await;
    assert!(guest.resident() > 200, "{}", guest.resident());
    guest.vm.set_balloon(u32::MAX).unwrap();
    until(
        "the balloon to take nearly all memory",
        async || (guest.resident(), guest.meminfo("MemAvailable").await),
        |(resident, available)| *resident < 100 && *available < 16,
    )
    .await;
    // The agent still accepts connections; commands may have to wait for memory.
    crate::support::within("the agent", guest.agent.health())
        .await
        .unwrap();
    println!(
        "full balloon: MemAvailable {} MiB",
        guest.meminfo("MemAvailable").await
    );
    guest.vm.set_balloon(0).unwrap();
    fill(&guest, 150).await;
    guest.finish().await;
}

#[tokio::test]
async fn a_full_guest_frees_host_memory_for_the_balloon() {
    let Some(prepared) = base("a_full_guest_frees_host_memory_for_the_balloon") else {
        return;
    };
    let guest = Guest::boot(&prepared, &size(1, 512)).await;
    // Fill memory with page cache: the host counts it as used, the guest as available.
    guest
        .run(&["dd", "if=/dev/vdb", "of=/dev/null", "bs=1M", "count=500"])
        .await;
    let full = guest.resident();
    assert!(full > 400, "{full} MiB resident after 500 MiB were read");
    guest.vm.set_balloon(256).unwrap();
    let less = until(
        "the VMM to shrink",
        async || guest.resident(),
        |now| *now <= 512 - 256 + SLACK,
    )
    .await;
    println!("balloon of 256 MiB in a full guest: {full} -> {less} MiB resident");
    guest.vm.set_balloon(0).unwrap();
    let free = until(
        "the guest to receive its memory",
        async || guest.meminfo("MemAvailable").await,
        |now| *now > 256 + SLACK,
    );
    free.await;
    guest.finish().await;
}

#[tokio::test]
async fn freed_memory_returns_to_the_host() {
    let Some(prepared) = base("freed_memory_returns_to_the_host") else {
        return;
    };
    let guest = Guest::boot(&prepared, &size(1, 512)).await;
    // The first run of the program fills the page cache.
    guest.python("pass").await;
    let idle = guest.resident();
    let spec = r#"
import mmap, os
m = mmap.mmap(-1, 200 << 20)
for at in range(0, 200 << 20, 4096):
    m[at] = 1
print(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
"#;
    let peak = async {
        let mut peak = 0;
        loop {
            peak = peak.max(guest.resident());
            if peak >= idle + 150 {
                return peak;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let (peak, used) = tokio::join!(
        crate::support::within("memory to be used", peak),
        guest.python(spec)
    );
    // `VmRSS` is in KiB.
    assert!(used.trim().parse::<u64>().unwrap() > 200 << 10, "{used}");
    let started_at = std::time::Instant::now();
    let after = until(
        "the host to receive its memory",
        async || guest.resident(),
        |now| *now < idle + SLACK,
    )
    .await;
    println!(
        "200 MiB used and freed: {idle} -> {peak} -> {after} MiB resident, {:?} after the process",
        started_at.elapsed()
    );
    guest.finish().await;
}
