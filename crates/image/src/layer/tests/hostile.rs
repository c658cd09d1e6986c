//! Tests with hostile archives: attacks on files outside of the target directory, and on the host's
//! resources.
//!
//! Next to the target directory is the directory `outside` with the file `secret`
//! ([`TestDirs`]). An entry `.wh.NAME` (a whiteout) deletes `NAME` of the layers below.

use super::*;
use std::time::Duration;

#[test]
fn a_path_with_dots_is_refused() {
    for path in ["../outside/x", "a/../../outside/x", "/../outside/x", ".."] {
        let dirs = test_dirs!(a_path_with_dots_is_refused);
        let message = dirs.refused(&Tar::default().file(path, b"x").end());
        assert!(message.contains("leads out of the root"), "{message}");
    }
}

#[test]
fn an_absolute_path_is_relative_to_the_layer() {
    let dirs = test_dirs!(an_absolute_path_is_relative_to_the_layer);
    let outside = dirs.dir.path().join("outside/secret");
    let name = outside.to_str().unwrap();
    dirs.unpack(&Tar::default().file(name, b"x").end()).unwrap();
    let landed = dirs.inside(name.trim_start_matches('/'));
    assert_eq!(fs::read(landed).unwrap(), b"x");
}

#[test]
fn nothing_is_written_through_a_symbolic_link_to_a_directory() {
    for target in ["../outside", "/", "/tmp", "sub"] {
        let dirs = test_dirs!(nothing_is_written_through_a_symbolic_link_to_a_directory);
        let archive = Tar::default()
            .directory("sub", 0o755)
            .symlink("door", target);
        let message = dirs.refused(&archive.file("door/secret", b"x").end());
        assert!(
            message.contains("goes through a symbolic link"),
            "{message}"
        );
        assert!(names(&dirs.inside("sub")).is_empty());
    }
}

#[test]
fn a_link_in_the_middle_of_a_path_is_not_followed_either() {
    let dirs = test_dirs!(a_link_in_the_middle_of_a_path_is_not_followed_either);
    let archive = Tar::default()
        .symlink("a", "..")
        .directory("a/outside/new", 0o755);
    assert!(dirs.refused(&archive.end()).contains("goes through"));
}

#[test]
fn a_file_replaces_a_symbolic_link_and_not_its_target() {
    let dirs = test_dirs!(a_file_replaces_a_symbolic_link_and_not_its_target);
    let archive = Tar::default().symlink("door", "../outside/secret");
    dirs.unpack(&archive.file("door", b"mine").end()).unwrap();
    assert!(dirs.inside("door").symlink_metadata().unwrap().is_file());
    assert_eq!(fs::read(dirs.inside("door")).unwrap(), b"mine");
}

#[test]
fn a_directory_replaces_a_symbolic_link_and_does_not_adopt_its_target() {
    let dirs = test_dirs!(a_directory_replaces_a_symbolic_link_and_does_not_adopt_its_target);
    let archive = Tar::default().symlink("door", "../outside");
    let archive = archive.directory("door", 0o777).file("door/new", b"x");
    dirs.unpack(&archive.end()).unwrap();
    assert!(dirs.inside("door").symlink_metadata().unwrap().is_dir());
}

#[test]
fn a_hard_link_to_outside_is_refused() {
    for target in [
        "../outside/secret",
        "door/secret",
        "/etc/passwd",
        "missing",
        "",
        ".",
    ] {
        let dirs = test_dirs!(a_hard_link_to_outside_is_refused);
        let archive = Tar::default().symlink("door", "../outside");
        let message = dirs.refused(&archive.hard_link("mine", target).end());
        let is_rejected = message.contains("is a hard link to") || message.contains("leads out");
        assert!(is_rejected, "{target}: {message}");
        assert_eq!(names(&dirs.inside("")), ["door"]);
    }
}

#[test]
fn a_hard_link_to_a_symbolic_link_links_that_and_not_its_target() {
    let dirs = test_dirs!(a_hard_link_to_a_symbolic_link_links_that_and_not_its_target);
    let archive = Tar::default()
        .symlink("door", "../outside/secret")
        .hard_link("too", "door");
    // Writing to the linked name creates a new file.
    dirs.unpack(&archive.file("too", b"mine").end()).unwrap();
    assert!(dirs.inside("door").symlink_metadata().unwrap().is_symlink());
}

#[test]
fn a_hard_link_to_a_deletion_or_a_directory_is_refused() {
    let dirs = test_dirs!(a_hard_link_to_a_deletion_or_a_directory_is_refused);
    let archive = Tar::default()
        .file(".wh.gone", b"")
        .hard_link("mine", "gone");
    assert!(dirs.refused(&archive.end()).contains("is a hard link to"));
    let dirs = test_dirs!(a_hard_link_to_a_deletion_or_a_directory_is_refused);
    let archive = Tar::default().directory("d", 0o755).hard_link("mine", "d");
    assert!(dirs.refused(&archive.end()).contains("is a hard link to"));
}

#[test]
fn devices_are_left_out_and_counted() {
    let dirs = test_dirs!(devices_are_left_out_and_counted);
    let archive = Tar::default()
        .node(EntryType::Char, "dev/mem")
        .node(EntryType::Block, "sda");
    let unpacked = dirs.unpack(&archive.file("x", b"").end()).unwrap();
    assert_eq!(unpacked.devices_left_out, 2);
    assert_eq!(names(&dirs.inside("")), ["x"]);
}

#[test]
fn a_fifo_is_kept_and_blocks_no_reader() {
    let dirs = test_dirs!(a_fifo_is_kept_and_blocks_no_reader);
    let archive = Tar::default().node(EntryType::Fifo, "pipe");
    dirs.unpack(&archive.end()).unwrap();
    let found = dirs.inside("pipe").symlink_metadata().unwrap();
    assert!(found.file_type().is_fifo());
    // A FIFO that a file replaces does not block either.
    let archive = Tar::default()
        .node(EntryType::Fifo, "pipe")
        .file("pipe", b"x");
    dirs.unpack(&archive.end()).unwrap();
    assert_eq!(fs::read(dirs.inside("pipe")).unwrap(), b"x");
}

#[test]
fn deletions_outside_the_directory_are_rejected() {
    for name in [".wh.", ".wh..", ".wh...", "a/.wh...", "../.wh.outside"] {
        let dirs = test_dirs!(deletions_outside_the_directory_are_rejected);
        let message = dirs.refused(&Tar::default().file(name, b"").end());
        assert!(
            message.contains("leads out of the root"),
            "{name}: {message}"
        );
    }
}

#[test]
fn overlay_marks_cannot_be_smuggled_in_as_attributes() {
    let dirs = test_dirs!(overlay_marks_cannot_be_smuggled_in_as_attributes);
    let redirect = [
        ("SCHILY.xattr.trusted.overlay.redirect", "/etc"),
        ("SCHILY.xattr.trusted.overlay.opaque", "y"),
        ("SCHILY.xattr.security.selinux", "x"),
        ("SCHILY.xattr.system.posix_acl_access", "x"),
    ];
    dirs.unpack(&Tar::default().pax(&redirect).directory("d", 0o755).end())
        .unwrap();
    assert!(super::faithful::attributes(&dirs.inside("d")).is_empty());
}

#[test]
fn a_bomb_stops_at_its_bounds() {
    let dirs = test_dirs!(a_bomb_stops_at_its_bounds);
    let limits = UnpackLimits {
        bytes: 1 << 20,
        entries: 100,
        ..UnpackLimits::default()
    };
    let refused = |archive: &[u8], limits| {
        let error = dirs.unpack_within(archive, limits).unwrap_err();
        assert!(matches!(error, LayerError::TooMuch { .. }), "{error}");
        error.to_string()
    };
    let large = Tar::default().file("zeros", &vec![0; 2 << 20]).end();
    assert!(refused(&gzip(&large), limits).contains("bytes"));
    assert!(
        !dirs.inside("zeros").exists(),
        "the size in the header was not checked before writing"
    );
    let many = (0..101).fold(Tar::default(), |tar, i| tar.file(&format!("f{i}"), b""));
    assert!(refused(&many.end(), limits).contains("entries"));
    // Bytes after the end of the archive are read and counted.
    let mut tail = Tar::default().file("x", b"").end();
    tail.resize(4 << 20, 0);
    assert!(refused(&gzip(&tail), limits).contains("bytes"));
    let no_time = UnpackLimits {
        time: Duration::ZERO,
        ..UnpackLimits::default()
    };
    assert!(refused(&large, no_time).contains("time"));
    let few_names = UnpackLimits {
        names: 1000,
        ..UnpackLimits::default()
    };
    // Each directory is remembered until the end, to set its time.
    let names = (0..50).fold(Tar::default(), |tar, i| {
        tar.directory(&format!("d{i}"), 0o755)
    });
    assert!(refused(&names.end(), few_names).contains("names"));
}

#[test]
fn unpacking_stops_at_the_maximum_compression_ratio() {
    let dirs = test_dirs!(unpacking_stops_at_the_maximum_compression_ratio);
    // The header claims 2 GiB of zeros, and 400 MiB follow. The ratio applies after 256 MiB
    // (`RATIO_SLACK`).
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    let header = Tar::header("zeros", EntryType::Regular, 2 << 30);
    encoder
        .write_all(&Tar::default().add(header, b"").0)
        .unwrap();
    let zeros = vec![0; 1 << 20];
    (0..400).for_each(|_| encoder.write_all(&zeros).unwrap());
    let message = dirs.refused(&encoder.finish().unwrap());
    assert!(message.contains("per compressed byte"), "{message}");
}

#[test]
fn holes_count_toward_the_size_limit() {
    let dirs = test_dirs!(holes_count_toward_the_size_limit);
    let size = (64_u64 << 40).to_string();
    let sparse = [("GNU.sparse.map", "0,0"), ("GNU.sparse.size", &size)];
    let archive = Tar::default().pax(&sparse).file("holes", b"").end();
    assert!(dirs.refused(&archive).contains("more bytes than"));
}

#[test]
fn invalid_maps_of_holes_are_refused() {
    // In this order: unsorted, overlapping, beyond the size, overflowing, longer than the content,
    // incomplete.
    let maps = [
        ("5,3,0,2", "8"),
        ("0,3,2,2", "8"),
        ("6,5", "8"),
        ("18446744073709551615,5", "8"),
        ("0,6", "8"),
        ("0,5,6", "8"),
    ];
    for (map, size) in maps {
        let dirs = test_dirs!(invalid_maps_of_holes_are_refused);
        let sparse = [("GNU.sparse.map", map), ("GNU.sparse.size", size)];
        let archive = Tar::default().pax(&sparse).file("holes", b"12345").end();
        let message = dirs.refused(&archive);
        assert!(
            message.contains("map of holes") || message.contains("number"),
            "{message}"
        );
    }
}

#[test]
fn invalid_file_names_are_rejected() {
    let long = "a".repeat(300);
    let deep = "a/".repeat(300);
    for path in [&long, &deep, "a\0b"] {
        let dirs = test_dirs!(invalid_file_names_are_rejected);
        let archive = Tar::default().pax(&[("path", path)]).file("x", b"").end();
        assert!(dirs.unpack(&archive).is_err());
        assert!(names(&dirs.inside("")).is_empty());
    }
}

#[test]
fn an_extended_header_without_end_is_not_read_into_memory() {
    let dirs = test_dirs!(an_extended_header_without_end_is_not_read_into_memory);
    for kind in [
        EntryType::XHeader,
        EntryType::GNULongName,
        EntryType::GNULongLink,
    ] {
        let header = Tar::header("x", kind, 1 << 40);
        let message = dirs.refused(&Tar::default().add(header, b"").end());
        assert!(message.contains("too large"), "{message}");
    }
}

#[test]
fn a_truncated_archive_is_distinguished_from_an_invalid_one() {
    let dirs = test_dirs!(a_truncated_archive_is_distinguished_from_an_invalid_one);
    let whole = Tar::default().file("a", &[7; 3000]).end();
    for archive in [
        whole.clone(),
        gzip(&whole),
        zstd::encode_all(&whole[..], 1).unwrap(),
    ] {
        let half = &archive[..archive.len() * 2 / 3];
        let error = dirs.unpack(half).unwrap_err();
        assert!(matches!(error, LayerError::Truncated), "{error}");
    }
    // The result reports whether the archive has an end mark. 512 bytes are the header of `a`, and
    // 3072 bytes are its padded content.
    assert!(dirs.unpack(&whole).unwrap().end_mark);
    assert!(!dirs.unpack(&whole[..512 + 3072]).unwrap().end_mark);
    // An archive must not end after an extended header, which applies to the next entry.
    let named = Tar::default().pax(&[("path", "b")]).0;
    assert!(matches!(dirs.unpack(&named), Err(LayerError::Truncated)));
    assert!(dirs.refused(&[b'x'; 2048]).contains("not a tar archive"));
    let mut flipped = whole;
    flipped[3] ^= 1;
    assert!(dirs.refused(&flipped).contains("not a tar archive"));
}

#[test]
fn a_directory_is_not_replaced_by_something_else() {
    let dirs = test_dirs!(a_directory_is_not_replaced_by_something_else);
    let archive = Tar::default().directory("d", 0o755).file("d", b"x");
    assert!(
        dirs.refused(&archive.end())
            .contains("replaces a directory")
    );
}

#[test]
fn messages_do_not_carry_control_characters() {
    let dirs = test_dirs!(messages_do_not_carry_control_characters);
    let message = dirs.refused(&Tar::default().file("../\x1b[2J\n", b"").end());
    assert!(
        !message.contains('\x1b') && !message.contains('\n'),
        "{message:?}"
    );
}
