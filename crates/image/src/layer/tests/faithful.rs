//! Tests that unpacked files equal the entries of their archive: attributes, holes, links,
//! deletions.
//!
//! A file `.wh.NAME` of a layer (*whiteout*) deletes the file NAME of the layers below. A file
//! `.wh..wh..opq` hides all files of its directory in the layers below (*opaque* directory).

use super::*;
use rustix::fs as sys;

/// Names of a file's extended attributes.
pub(super) fn attributes(path: &Path) -> Vec<String> {
    let mut buffer = vec![0; 4096];
    let n = sys::llistxattr(path, &mut buffer[..]).unwrap();
    let names = buffer[..n].split(|b| *b == 0).filter(|n| !n.is_empty());
    names
        .map(|n| String::from_utf8(n.to_vec()).unwrap())
        .collect()
}

fn attribute(path: &Path, name: &str) -> Vec<u8> {
    let mut buffer = vec![0; 4096];
    let n = sys::lgetxattr(path, name, &mut buffer[..]).unwrap();
    buffer.truncate(n);
    buffer
}

#[test]
fn modes_owners_times_and_attributes_are_kept() {
    let dirs = test_dirs!(modes_owners_times_and_attributes_are_kept);
    let mut sudo = Tar::header("bin/sudo", EntryType::Regular, 2);
    sudo.set_mode(0o4755);
    sudo.set_uid(100_000);
    sudo.set_gid(42);
    // VFS_CAP_REVISION_2, nothing permitted (linux/capability.h).
    let capability = "\0\0\0\u{2}".to_owned() + &"\0".repeat(16);
    let attributes = [
        ("SCHILY.xattr.security.capability", capability.as_str()),
        ("SCHILY.xattr.user.note", "hello"),
        ("mtime", "1600000000.25"),
    ];
    let archive = Tar::default()
        .directory("bin/", 0o1777)
        .pax(&attributes)
        .add(sudo, b"#!");
    dirs.unpack(&archive.symlink("bin/su", "sudo").end())
        .unwrap();
    let m = fs::metadata(dirs.inside("bin/sudo")).unwrap();
    assert_eq!((m.mode() & 0o7777, m.uid(), m.gid()), (0o4755, 100_000, 42));
    assert_eq!((m.mtime(), m.mtime_nsec()), (1_600_000_000, 250_000_000));
    assert_eq!(attribute(&dirs.inside("bin/sudo"), "user.note"), b"hello");
    assert_eq!(
        attribute(&dirs.inside("bin/sudo"), "security.capability").len(),
        20
    );
    // Entries in the directory did not change its time.
    let m = fs::metadata(dirs.inside("bin")).unwrap();
    assert_eq!((m.mode() & 0o7777, m.mtime()), (0o1777, 1_700_000_000));
    let m = fs::symlink_metadata(dirs.inside("bin/su")).unwrap();
    assert_eq!(m.mtime(), 1_700_000_000);
}

#[test]
fn deletions_become_overlay_marks_in_any_order() {
    let dirs = test_dirs!(deletions_become_overlay_marks_in_any_order);
    // Whiteouts before and after the entry that they concern.
    let archive = Tar::default()
        .file(".wh.gone", b"")
        .directory("d", 0o755)
        .file("d/.wh..wh..opq", b"")
        .file("d/kept", b"x")
        .file("new", b"x")
        .file(".wh.new", b"")
        .file(".wh.tree", b"")
        .directory("tree", 0o755)
        .directory("grove", 0o755)
        .file(".wh.grove", b"")
        // Metadata of the file system AUFS, which the unpacker ignores.
        .file(".wh..wh.aufs", b"");
    let unpacked = dirs.unpack(&archive.end()).unwrap();
    assert!(!unpacked.opaque);
    let gone = fs::symlink_metadata(dirs.inside("gone")).unwrap();
    assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
    for opaque in ["d", "tree", "grove"] {
        assert_eq!(
            attribute(&dirs.inside(opaque), "trusted.overlay.opaque"),
            b"y"
        );
    }
    assert_eq!(fs::read(dirs.inside("new")).unwrap(), b"x");
    assert_eq!(
        names(&dirs.inside("")),
        ["d", "gone", "grove", "new", "tree"]
    );
    // A mark on the root applies to the whole layer.
    let everything = Tar::default().file(".wh..wh..opq", b"").end();
    assert!(dirs.unpack(&everything).unwrap().opaque);
}

#[test]
fn holes_stay_holes_in_every_format() {
    let dirs = test_dirs!(holes_stay_holes_in_every_format);
    // A file of 2 MiB with 3 bytes at its start and 2 bytes at 1 MiB.
    let mib = 1 << 20;
    let map = format!("0,3,{mib},2");
    let v01 = [
        ("GNU.sparse.map", map.as_str()),
        ("GNU.sparse.size", "2097152"),
    ];
    let v10 = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "pax10"),
        ("GNU.sparse.realsize", "2097152"),
    ];
    // Format 1.0: the map is at the start of the content, padded to a block.
    let mut in_data = format!("2\n0\n3\n{mib}\n2\n").into_bytes();
    in_data.resize(512, 0);
    in_data.extend(b"abcde");
    let mut old = Tar::header("old", EntryType::GNUSparse, 5);
    let gnu = old.as_gnu_mut().unwrap();
    gnu.set_real_size(2 * mib);
    for (slot, (offset, length)) in gnu.sparse.iter_mut().zip([(0, 3), (mib, 2)]) {
        slot.set_offset(offset);
        slot.set_length(length);
    }
    let archive = Tar::default()
        .pax(&v01)
        .file("pax01", b"abcde")
        .pax(&v10)
        .file("GNUSparseFile.1/x", &in_data)
        .add(old, b"abcde");
    dirs.unpack(&archive.end()).unwrap();
    for name in ["pax01", "pax10", "old"] {
        let path = dirs.inside(name);
        let content = fs::read(&path).unwrap();
        assert_eq!(content.len(), 2 << 20, "{name}");
        assert_eq!(
            (&content[..4], &content[1 << 20..][..3]),
            (&b"abc\0"[..], &b"de\0"[..])
        );
        assert!(
            fs::metadata(&path).unwrap().blocks() < 64,
            "{name} is not sparse"
        );
    }
}

#[test]
fn gnu_tar_with_holes_and_long_names_is_read_as_it_was_written() {
    let dirs = test_dirs!(gnu_tar_with_holes_and_long_names_is_read_as_it_was_written);
    let source = tempfile::tempdir().unwrap();
    let long = "n".repeat(120);
    fs::create_dir_all(source.path().join(&long).join(&long)).unwrap();
    fs::write(source.path().join(&long).join(&long).join("leaf"), "x").unwrap();
    std::os::unix::fs::symlink(long.repeat(2), source.path().join("link")).unwrap();
    let holes = File::create(source.path().join("holes")).unwrap();
    for i in 0..40_u64 {
        use std::os::unix::fs::FileExt;
        holes.write_all_at(b"data", i << 20).unwrap();
    }
    for format in ["gnu", "posix"] {
        let archive = std::process::Command::new("tar")
            .args(["--sparse", "--format", format, "-C"])
            .arg(source.path())
            .args(["-c", "."])
            .output()
            .unwrap();
        assert!(archive.status.success());
        dirs.unpack(&archive.stdout).unwrap();
        let leaf = dirs.inside(&format!("{long}/{long}/leaf"));
        assert_eq!(fs::read(leaf).unwrap(), b"x");
        assert_eq!(
            fs::read_link(dirs.inside("link")).unwrap(),
            Path::new(&long.repeat(2))
        );
        let is_equal = fs::read(dirs.inside("holes")).unwrap()
            == fs::read(source.path().join("holes")).unwrap();
        assert!(is_equal, "{format}");
        // Each of the 40 pieces of data needs one block of 4 KiB, or 8 sectors. The limit is twice
        // as many.
        assert!(
            fs::metadata(dirs.inside("holes")).unwrap().blocks() < 8 * 80,
            "{format}"
        );
        fs::remove_dir_all(dirs.inside(&long)).unwrap();
    }
}

#[test]
fn the_diff_id_is_the_digest_of_the_uncompressed_archive() {
    let dirs = test_dirs!(the_diff_id_is_the_digest_of_the_uncompressed_archive);
    let mut archive = Tar::default().file("a", b"1").end();
    // The padding after the end mark is a part of the diff id.
    archive.resize(10240, 0);
    let plain = dirs.unpack(&archive).unwrap();
    assert_eq!(plain.diff_id, crate::verified::sum_of(&archive));
    // Two gzip members in a row, as some packers write them.
    let mut members = gzip(&archive[..700]);
    members.extend(gzip(&archive[700..]));
    assert_eq!(dirs.unpack(&members).unwrap(), plain);
    let zstd = zstd::encode_all(&archive[..], 1).unwrap();
    assert_eq!(dirs.unpack(&zstd).unwrap(), plain);
}

#[test]
fn hard_links_share_their_file() {
    let dirs = test_dirs!(hard_links_share_their_file);
    let archive = Tar::default().file("d/a", b"1").hard_link("b", "/d/a");
    dirs.unpack(&archive.end()).unwrap();
    let inode = |path| fs::metadata(dirs.inside(path)).unwrap().ino();
    assert_eq!(inode("d/a"), inode("b"));
    // A directory without an entry has mode 0755 and a fixed time: the start of 2025.
    let m = fs::metadata(dirs.inside("d")).unwrap();
    assert_eq!((m.mode() & 0o7777, m.mtime()), (0o755, 1_735_689_600));
}
