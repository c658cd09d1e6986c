//! Guests have the requested size, from the smallest to the largest.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{Guest, base, host_available, size, skip};

/// Boots a guest and checks its number of processors and its memory.
async fn boot_and_check(prepared: &jiffy_engines::PreparedTemplate, vcpus: u8, mib: u32) -> Guest {
    let guest = Guest::boot(prepared, &size(vcpus, mib)).await;
    let nproc = guest.run(&["nproc"]).await;
    assert_eq!(nproc.trim(), vcpus.to_string());
    let total = guest.meminfo("MemTotal").await;
    let mib = u64::from(mib);
    println!(
        "{vcpus} vCPUs, {mib} MiB: MemTotal {total} MiB, {} MiB resident, up in {} ms",
        guest.resident(),
        guest.vm.report().total_us / 1000
    );
    // The kernel reserves its own image, and 1/64 of the memory for page descriptors. The bounds of
    // 40 MiB and 1/50 include a tolerance.
    assert!(
        total <= mib && total + mib / 50 + 40 >= mib,
        "{total} of {mib}"
    );
    guest
}

#[tokio::test]
async fn a_guest_has_the_configured_number_of_processors() {
    let Some(prepared) = base("a_guest_has_the_configured_number_of_processors") else {
        return;
    };
    for vcpus in [1, 3, 8] {
        let guest = boot_and_check(&prepared, vcpus, 512).await;
        // Compute on each processor.
        let program = format!(
            r#"
import os
def on(cpu):
    os.sched_setaffinity(0, [cpu])
    return sum(range(100000)) == 4999950000
print(all(on(cpu) for cpu in range({vcpus})))
"#
        );
        assert_eq!(guest.python(&program).await, "True\n");
        guest.finish().await;
    }
}

#[tokio::test]
async fn the_smallest_guest_works() {
    let Some(prepared) = base("the_smallest_guest_works") else {
        return;
    };
    let guest = boot_and_check(&prepared, 1, 128).await;
    assert_eq!(guest.python("print(6 * 7)").await, "42\n");
    guest.finish().await;
}

#[tokio::test]
async fn memory_above_the_hole_below_4_gib_is_usable() {
    const NAME: &str = "memory_above_the_hole_below_4_gib_is_usable";
    let Some(prepared) = base(NAME) else { return };
    let available = host_available();
    if available < 8 << 10 {
        return skip(NAME, &format!("{available} MiB available, 8192 required"));
    }
    let guest = boot_and_check(&prepared, 1, 4096).await;
    // Write the address to every sixteenth page, or to every page if configured. Memory that is
    // mapped twice, or missing, then has the wrong content. 3584 MiB reach above the hole.
    let step = std::env::var("JIFFY_MEMORY_STEP").map_or(16, |step| step.parse().unwrap());
    let program = format!(
        r#"
import mmap, struct
PAGE, TOTAL = 4096, 3584 << 20
m = mmap.mmap(-1, TOTAL)
def content(at): return struct.pack("<Q", at ^ 0x5a5a5a5a5a5a5a5a) * (PAGE // 8)
for at in range(0, TOTAL, {step} * PAGE): m[at:at + PAGE] = content(at)
for at in range(0, TOTAL, {step} * PAGE): assert m[at:at + PAGE] == content(at), at
print("ok")
"#
    );
    assert_eq!(guest.python(&program).await, "ok\n");
    // Only the pages that were written need memory of the host.
    assert!(guest.peak_resident() > 3584 / step);
    guest.finish().await;
}

#[tokio::test]
async fn the_largest_guest_boots_on_a_host_with_less_memory() {
    const NAME: &str = "the_largest_guest_boots_on_a_host_with_less_memory";
    let Some(prepared) = base(NAME) else { return };
    let available = host_available();
    if available < 4 << 10 {
        return skip(NAME, &format!("{available} MiB available, 4096 required"));
    }
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    if overcommit.trim() == "2" {
        return skip(NAME, "the host does not overcommit memory");
    }
    let guest = boot_and_check(&prepared, 2, 65_536).await;
    // The kernel of the guest describes each page of 4 KiB with 64 bytes, which is 1 GiB in total.
    assert!(guest.resident() < 3 << 10, "{}", guest.resident());
    guest.finish().await;
}
