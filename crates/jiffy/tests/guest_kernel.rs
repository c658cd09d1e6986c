//! Tests that the guest kernel supports common software, and that its clocks show a pause.

use crate::support::test_home::TestHome;
use crate::support::{call_with, skip};
use jiffy_test_attributes::jiffy_test;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const FEATURES: &str = include_str!("guest_kernel/features.py");
const BLOCK: usize = 4096;

/// File systems: type, size in MiB, mount options, and the commands that create `$IMAGE` from the
/// directory `$TREE`.
const IMAGES: [(&str, u64, &str, &str); 5] = [
    (
        "squashfs",
        0,
        "ro",
        "mksquashfs $TREE $IMAGE -quiet -no-progress -noappend",
    ),
    (
        "iso9660",
        0,
        "ro",
        "genisoimage -quiet -R -J -o $IMAGE $TREE",
    ),
    (
        "vfat",
        16,
        "rw",
        "mkfs.vfat $IMAGE && mcopy -i $IMAGE $TREE/file ::file",
    ),
    ("btrfs", 128, "rw", "mkfs.btrfs -q --rootdir $TREE $IMAGE"),
    (
        "xfs",
        300,
        "rw",
        "printf '/x\\n0 0\\nd--755 0 0\\nfile ---644 0 0 %s\\n$\\n' $TREE/file > $TREE.proto && \
        mkfs.xfs -q -p $TREE.proto $IMAGE",
    ),
];

/// Returns the images that this host can create, encoded without holes for the program in the
/// guest.
fn images() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(tree.join("file"), "jiffy\n").unwrap();
    let mut all = Vec::new();
    for (kind, mib, options, commands) in IMAGES {
        let path = dir.path().join(kind);
        File::create(&path).unwrap().set_len(mib << 20).unwrap();
        let created = Command::new("sh")
            .args(["-c", commands])
            .env("TREE", &tree)
            .env("IMAGE", &path)
            .output()
            .unwrap();
        if created.status.success() {
            append(&mut all, kind, options, &path);
        } else {
            let why = String::from_utf8_lossy(&created.stderr).trim().to_owned();
            skip(&format!("mounting {kind}: {why}"));
        }
    }
    all
}

/// Appends an image: a header, and the blocks that are not zero with their numbers.
fn append(all: &mut Vec<u8>, kind: &str, options: &str, path: &Path) {
    let file = File::open(path).unwrap();
    let size = file.metadata().unwrap().len();
    let mut blocks = Vec::new();
    for number in 0..size.div_ceil(BLOCK as u64) {
        let mut block = vec![0; BLOCK];
        let length = BLOCK.min(usize::try_from(size - number * BLOCK as u64).unwrap());
        file.read_exact_at(&mut block[..length], number * BLOCK as u64)
            .unwrap();
        if block.iter().any(|b| *b != 0) {
            blocks.extend(number.to_le_bytes());
            blocks.extend(block);
        }
    }
    let count = blocks.len() / (8 + BLOCK);
    let head = serde_json::json!({"kind": kind, "size": size, "options": options, "blocks": count});
    all.extend(format!("{head}\n").into_bytes());
    all.extend(blocks);
}

#[jiffy_test]
fn the_guest_kernel_supports_features_of_common_software() {
    let args = ["run", "-i", "-u", "root", "--", "python3", "-c", FEATURES];
    let done = call_with(&args, &images());
    assert_eq!(
        (done.code, done.stdout.trim()),
        (Some(0), "missing: []"),
        "{done:?}"
    );
}

/// Returns the seconds since boot with and without pauses, according to the guest.
fn clocks(place: &TestHome, id: &str) -> (f64, f64) {
    let program = "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())";
    let output = place.ok(&["exec", id, "--", "python3", "-c", program]);
    let (boot, monotonic) = output.split_once(' ').unwrap();
    (boot.parse().unwrap(), monotonic.parse().unwrap())
}

#[jiffy_test]
fn paused_time_counts_in_the_boot_clock_only() {
    let place = TestHome::new();
    let asleep = |id: &str| {
        let (boot, monotonic) = clocks(&place, id);
        boot - monotonic
    };
    let id = place.ok(&["create"]);
    let snapshot = place.ok(&["snapshot", &id]);
    // A new guest has not been paused, regardless of the age of its template's snapshot.
    assert!(asleep(&id).abs() < 0.1, "{}", asleep(&id));

    let (_, before) = clocks(&place, &id);
    place.ok(&["pause", &id]);
    let paused = Instant::now();
    // The sleep may take longer than 3 s, so the duration of the pause is measured.
    std::thread::sleep(Duration::from_secs(3));
    let slept = paused.elapsed().as_secs_f64();
    place.ok(&["resume", &id]);
    let counted = asleep(&id);
    assert!(counted >= slept, "{counted} s of {slept} s");
    // A slow host may need some time to pause and to resume.
    assert!(counted < slept + 30.0, "{counted} s of {slept} s");
    // The monotonic clock counts the time to pause and to resume, but not the pause.
    let (_, after) = clocks(&place, &id);
    assert!(after - before < counted + 30.0 - slept, "{before} {after}");

    // The snapshot was taken before the pause, so guests restored from it have no paused time.
    let copy = place.ok(&["create", "--from", &snapshot]);
    assert!(asleep(&copy).abs() < 0.1, "{}", asleep(&copy));
    place.ok(&["rollback", &id, &snapshot]);
    assert!(asleep(&id).abs() < 0.1, "{}", asleep(&id));
}
