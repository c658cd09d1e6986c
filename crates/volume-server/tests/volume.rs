//! Files of a volume: names, contents, quota and durability of numbers. A *node* is a file or
//! directory, by its number.
#![allow(clippy::unwrap_used)]

use jiffy_volume_server::image::{ImageHead, unpack};
use jiffy_volume_server::{Attributes, Change, Creation, Quota, ROOT, RenameMode, Volume};
use nix::errno::Errno;
use nix::libc;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Quota of most volumes: 1 MiB and 100 nodes.
const QUOTA: Quota = Quota {
    bytes: 1 << 20,
    nodes: 100,
};

/// Returns the attributes of a new node with this mode.
fn new(mode: u32) -> Creation {
    Creation {
        mode,
        uid: 1000,
        gid: 1000,
        device: 0,
    }
}

/// Creates a file, and returns its node.
fn file(volume: &Volume, parent: u64, name: &str) -> u64 {
    let made = volume.create(parent, name.as_bytes(), new(libc::S_IFREG | 0o644), None);
    made.unwrap().node
}

/// Creates a directory, and returns its node.
fn directory(volume: &Volume, parent: u64, name: &str) -> u64 {
    let made = volume.create(parent, name.as_bytes(), new(libc::S_IFDIR | 0o755), None);
    made.unwrap().node
}

fn open(path: &Path) -> Volume {
    Volume::open(path, QUOTA).unwrap()
}

#[test]
fn files_persist_with_their_attributes_and_numbers_are_never_reused() {
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    let node = file(&volume, ROOT, "a");
    assert_eq!(volume.write(node, Some(3), b"data").unwrap(), 4);
    let change = Change {
        mode: Some(0o4755),
        uid: Some(7),
        ..Change::default()
    };
    let changed = volume.change(node, &change).unwrap();
    drop(volume);
    let volume = open(home.path());
    assert_eq!(volume.lookup(ROOT, b"a").unwrap(), changed);
    assert_eq!(
        (changed.mode & 0o7777, changed.uid, changed.size),
        (0o4755, 7, 7)
    );
    let mut content = [1; 16];
    assert_eq!(volume.read(node, 0, &mut content).unwrap(), 7);
    assert_eq!(&content[..7], b"\0\0\0data");
    volume.unlink(ROOT, b"a").unwrap();
    assert_eq!(volume.read(node, 0, &mut content), Err(Errno::ESTALE));
    let next = file(&volume, ROOT, "a");
    // Numbers are reserved in large blocks. The second start skipped the rest of the first block.
    assert!(next > node + 1000, "{next}");
    // The set-user-ID bit has no effect on the host.
    for entry in std::fs::read_dir(home.path().join("data")).unwrap() {
        for entry in std::fs::read_dir(entry.unwrap().path()).unwrap() {
            use std::os::unix::fs::MetadataExt;
            assert_eq!(entry.unwrap().metadata().unwrap().mode(), 0o100_600);
        }
    }
}

#[test]
fn names_that_could_leave_a_directory_are_rejected_and_links_are_never_followed() {
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    for name in ["", ".", "..", "a/b", "/etc", "a\0b"] {
        let made = volume.create(ROOT, name.as_bytes(), new(libc::S_IFREG), None);
        assert_eq!(made, Err(Errno::EINVAL), "{name:?}");
        let linked = volume.rename((ROOT, b"x"), (ROOT, name.as_bytes()), RenameMode::Replace);
        assert_eq!(linked, Err(Errno::EINVAL), "{name:?}");
    }
    let long = volume.create(ROOT, &[b'a'; 256], new(libc::S_IFREG), None);
    assert_eq!(long, Err(Errno::ENAMETOOLONG));
    let link = new(libc::S_IFLNK | 0o777);
    let link = volume
        .create(ROOT, b"link", link, Some(b"/etc/passwd"))
        .unwrap();
    assert_eq!(volume.target(link.node).unwrap(), b"/etc/passwd");
    assert_eq!(volume.lookup(link.node, b"x"), Err(Errno::ENOTDIR));
    assert_eq!(volume.write(link.node, Some(0), b"x"), Err(Errno::EINVAL));
    let device = new(libc::S_IFCHR | 0o666);
    let device = volume.create(ROOT, b"null", device, None).unwrap();
    assert_eq!(volume.read(device.node, 0, &mut [0]), Err(Errno::EINVAL));
}

#[test]
fn the_quota_is_never_exceeded_and_space_is_released_exactly() {
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    // The quota is 1 MiB and 100 nodes. Usage is counted in blocks of 4 KiB, and the root is a
    // node.
    let used = || (volume.space().bytes, volume.space().nodes);
    let node = file(&volume, ROOT, "a");
    assert_eq!(used(), (0, 2));
    let full = vec![7; 1 << 20];
    // The file would end one byte beyond the quota, so no byte is written.
    assert_eq!(volume.write(node, Some(1), &full), Err(Errno::EDQUOT));
    assert_eq!(used(), (0, 2));
    volume.write(node, Some(0), &full).unwrap();
    assert_eq!(volume.write(node, None, b"x"), Err(Errno::EDQUOT));
    let grow = Change {
        size: Some((1 << 20) + 1),
        ..Change::default()
    };
    assert_eq!(volume.change(node, &grow), Err(Errno::EDQUOT));
    let shrink = Change {
        // One byte more than a block, so that the file needs two blocks.
        size: Some(4097),
        ..Change::default()
    };
    volume.change(node, &shrink).unwrap();
    assert_eq!(used(), (8192, 2));
    // Together with the root and the first file, 100 nodes.
    for number in 0..98 {
        file(&volume, ROOT, &format!("f{number}"));
    }
    let more = volume.create(ROOT, b"more", new(libc::S_IFREG), None);
    assert_eq!(more, Err(Errno::EDQUOT));
    // Many clients that write at the same time do not exceed the quota together.
    std::thread::scope(|scope| {
        for number in 0..8 {
            let node = volume
                .lookup(ROOT, format!("f{number}").as_bytes())
                .unwrap()
                .node;
            let volume = &volume;
            scope.spawn(move || {
                for _ in 0..100 {
                    let _ = volume.write(node, None, &[1; 4096]);
                }
            });
        }
    });
    assert_eq!(used().0, 1 << 20);
    drop(volume);
    // A restart counts the same usage.
    let volume = open(home.path());
    assert_eq!((volume.space().bytes, volume.space().nodes), (1 << 20, 100));
    for number in 0..98 {
        volume
            .unlink(ROOT, format!("f{number}").as_bytes())
            .unwrap();
    }
    assert_eq!((volume.space().bytes, volume.space().nodes), (8192, 2));
}

#[test]
fn renames_have_the_effects_that_posix_requires() {
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    let (a, b) = (directory(&volume, ROOT, "a"), directory(&volume, ROOT, "b"));
    let below = directory(&volume, a, "below");
    let rename = |from, to| volume.rename(from, to, RenameMode::Replace);
    assert_eq!(rename((ROOT, b"a"), (below, b"x")), Err(Errno::EINVAL));
    assert_eq!(rename((ROOT, b"b"), (ROOT, b"a")), Err(Errno::ENOTEMPTY));
    rename((a, b"below"), (ROOT, b"b")).unwrap();
    assert_eq!(volume.lookup(ROOT, b"b").unwrap().node, below);
    assert_eq!(volume.attributes(b), Err(Errno::ESTALE));
    // Two links of each directory, and one of each directory below it: `a` and `b`.
    assert_eq!(volume.attributes(ROOT).unwrap().links, 4);
    assert_eq!(volume.attributes(a).unwrap().links, 2);
    let (x, y) = (file(&volume, a, "x"), file(&volume, below, "y"));
    assert_eq!(rename((a, b"x"), (ROOT, b"b")), Err(Errno::EISDIR));
    let keep = volume.rename((a, b"x"), (below, b"y"), RenameMode::NoReplace);
    assert_eq!(keep, Err(Errno::EEXIST));
    volume
        .rename((a, b"x"), (below, b"y"), RenameMode::Exchange)
        .unwrap();
    assert_eq!(volume.lookup(a, b"x").unwrap().node, y);
    volume.link(y, ROOT, b"second", false).unwrap();
    assert_eq!(volume.attributes(y).unwrap().links, 2);
    // Both names are links of the same file, so the rename has no effect.
    rename((ROOT, b"second"), (a, b"x")).unwrap();
    assert_eq!(volume.lookup(ROOT, b"second").unwrap().node, y);
    // The renamed file replaces one of the two links.
    rename((below, b"y"), (a, b"x")).unwrap();
    assert_eq!(volume.attributes(y).unwrap().links, 1);
    assert_eq!(volume.lookup(a, b"x").unwrap().node, x);
}

#[test]
fn an_image_has_all_files_and_attributes_and_a_damaged_one_is_rejected() {
    let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let quota = Quota {
        bytes: 1 << 24,
        nodes: 1000,
    };
    let volume = Volume::open(home.path(), quota).unwrap();
    let mut nodes = Vec::new();
    for number in 0..200_u32 {
        let name = format!("f{number}");
        let node = file(&volume, ROOT, &name);
        // Four files are longer than a chunk of the image (64 KiB).
        let length = if number % 50 == 0 {
            100_000
        } else {
            number as usize
        };
        let data = vec![number as u8; length];
        volume.write(node, None, &data).unwrap();
        nodes.push((name, node, data));
    }
    // A hole, a removed file and a link.
    volume.write(nodes[0].1, Some(1 << 20), b"end").unwrap();
    nodes[0].2.resize(1 << 20, 0);
    nodes[0].2.extend_from_slice(b"end");
    volume.unlink(ROOT, b"f1").unwrap();
    nodes.remove(1);
    let link = new(libc::S_IFLNK | 0o777);
    let made = volume.create(ROOT, b"link", link, Some(b"/etc/passwd"));
    made.unwrap();
    let image = tempfile::tempfile().unwrap();
    let written = volume.write_image(&image).unwrap();
    assert_eq!(written.bytes, volume.space().bytes);
    let head = ImageHead::read(&image).unwrap();
    assert_eq!((head.quota, head.bytes), (quota, written.bytes));
    unpack(&image, other.path(), head.bytes).unwrap();
    let copy = Volume::open(other.path(), quota).unwrap();
    assert_eq!(copy.space(), volume.space());
    for (name, node, data) in &nodes {
        let found = copy.lookup(ROOT, name.as_bytes()).unwrap();
        // The number of blocks on the disk and the time of the last access may differ.
        let expected = Attributes {
            blocks: found.blocks,
            accessed: found.accessed,
            ..volume.attributes(*node).unwrap()
        };
        assert_eq!(found, expected);
        let mut buffer = vec![0; data.len() + 1];
        assert_eq!(copy.read(found.node, 0, &mut buffer), Ok(data.len()));
        assert_eq!(&buffer[..data.len()], &data[..]);
    }
    let link = copy.lookup(ROOT, b"link").unwrap();
    assert_eq!(copy.target(link.node).unwrap(), b"/etc/passwd");
    assert_eq!(copy.lookup(ROOT, b"f1"), Err(Errno::ENOENT));
    // The image of a small change differs in few chunks.
    volume.write(nodes[100].1, Some(0), b"x").unwrap();
    let changed = tempfile::tempfile().unwrap();
    volume.write_image(&changed).unwrap();
    let chunks = |image: &File| {
        let mut content = vec![0; image.metadata().unwrap().len() as usize];
        image.read_exact_at(&mut content, 0).unwrap();
        content
            .chunks(1 << 16)
            .map(<[u8]>::to_vec)
            .collect::<Vec<_>>()
    };
    let (before, after) = (chunks(&image), chunks(&changed));
    let differing = before.iter().zip(&after).filter(|(a, b)| a != b);
    assert!(differing.count() <= 2);
    // Offsets of the magic number, the version, the number of contents, and the offset and length
    // of the catalog, and of the node, offset and length of the first content.
    for at in [0, 8, 32, 40, 48, 64, 72, 80] {
        let mut before = [0; 8];
        image.read_exact_at(&mut before, at).unwrap();
        image.write_all_at(&u64::MAX.to_le_bytes(), at).unwrap();
        let target = tempfile::tempdir().unwrap();
        unpack(&image, target.path(), head.bytes).unwrap_err();
        image.write_all_at(&before, at).unwrap();
    }
    let target = tempfile::tempdir().unwrap();
    // The image has one byte more than permitted.
    unpack(&image, target.path(), head.bytes - 1).unwrap_err();
}
