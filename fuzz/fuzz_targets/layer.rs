#![no_main]
//! Unpacking any archive changes no file outside of the target directory. The directory then
//! contains only files, directories, links, FIFOs and marks of overlayfs, within the limits.
//!
//! Half of the inputs are lists of commands from which an archive with correct checksums is built:
//! random bytes are rarely an archive. The other inputs are the archive itself.

use jiffy_fuzz::tree::survey;
use jiffy_image::{UnpackLimits, unpack};
use libfuzzer_sys::fuzz_target;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Names that resolve to a file, and parts of such names.
const NAMES: [&[u8]; 24] = [
    b"a",
    b"b",
    b"a/b",
    b"a/b/c",
    b"..",
    b"../out",
    b"../out/secret",
    b"/",
    b"/a",
    b".",
    b"./a",
    b"a/..",
    b"a/../../out/secret",
    b".wh.a",
    b".wh.b",
    b".wh..",
    b".wh...",
    b"a/.wh.b",
    b".wh..wh..opq",
    b"a/.wh..wh..opq",
    b"link",
    b"link/secret",
    b"a/",
    b"",
];
/// Targets of links.
const TARGETS: [&[u8]; 12] = [
    b"..",
    b"../out",
    b"../out/secret",
    b"/",
    b"/tmp",
    b"a",
    b"a/b",
    b"link",
    b".",
    b"/proc/self/root",
    b"../../..",
    b"b",
];
/// Type flags of entries in tar archives.
const KINDS: &[u8] = b"0\x0012345671SxgLKVDM";

/// Writes `text` to the field of a header that begins at `at`. Truncates it to `length`.
fn field(block: &mut [u8], at: usize, length: usize, text: &[u8]) {
    let n = text.len().min(length);
    block[at..at + n].copy_from_slice(&text[..n]);
}

/// Builds an archive from commands of six bytes, each followed by content. The fields of a header
/// are the name, mode, owner and group, size, time, kind, target of a link, magic, and checksum.
/// The checksum is computed with spaces in its own field.
fn archive(mut data: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    while let [name, kind, target, mode, size, magic, rest @ ..] = data {
        let n = usize::from(*size).min(rest.len());
        let (content, rest) = rest.split_at(n);
        data = rest;
        let mut block = [0; 512];
        field(&mut block, 0, 100, NAMES[usize::from(*name) % NAMES.len()]);
        field(
            &mut block,
            100,
            8,
            format!("{:07o}", u32::from(*mode) << 4).as_bytes(),
        );
        field(&mut block, 108, 8, b"0000000");
        field(&mut block, 116, 8, b"0000000");
        field(&mut block, 124, 12, format!("{n:011o}").as_bytes());
        field(&mut block, 136, 12, b"00000000001");
        block[156] = KINDS[usize::from(*kind) % KINDS.len()];
        field(
            &mut block,
            157,
            100,
            TARGETS[usize::from(*target) % TARGETS.len()],
        );
        let magic: &[u8] = if magic % 2 == 0 {
            b"ustar  \0"
        } else {
            b"ustar\x0000"
        };
        field(&mut block, 257, 8, magic);
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
        field(&mut block, 148, 8, format!("{sum:06o}\0 ").as_bytes());
        archive.extend(block);
        archive.extend(content);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

/// Observable attributes of a file.
fn look(path: &Path) -> (u64, u32, u64, i64, i64, Vec<u8>) {
    let m = fs::symlink_metadata(path).unwrap();
    let content = if m.is_file() {
        fs::read(path).unwrap()
    } else {
        Vec::new()
    };
    (
        m.nlink(),
        m.mode(),
        m.size(),
        m.ctime(),
        m.ctime_nsec(),
        content,
    )
}

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    // Unpack to a tmpfs: unpacking flushes the target's file system.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("in")).unwrap();
    fs::create_dir(path("out")).unwrap();
    fs::write(path("out/secret"), "untouched").unwrap();
    let before = (look(&path("out")), look(&path("out/secret")));
    let limits = UnpackLimits {
        bytes: 1 << 20,
        entries: 64,
        time: Duration::from_secs(5),
        ..UnpackLimits::default()
    };
    let made = if first % 2 == 0 {
        archive(rest)
    } else {
        rest.to_vec()
    };
    let _ = unpack(&made[..], &path("in"), limits, &mut |_| ());
    assert_eq!(before, (look(&path("out")), look(&path("out/secret"))));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    let (entries, bytes) = survey(&path("in"));
    // A name may imply directories; a file may have several names.
    assert!(
        entries <= 64 * 4 && bytes <= (1 << 20) * 64,
        "{entries} entries, {bytes} bytes"
    );
});
