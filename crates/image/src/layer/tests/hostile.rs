//! Attacks on files outside of the directory that an archive is unpacked into.

use super::*;
use std::time::Duration;

#[test]
fn a_path_with_dots_is_refused() {
    for path in ["../outside/x", "a/../../outside/x", "/../outside/x", ".."] {
        let ground = ground!(a_path_with_dots_is_refused);
        let message = ground.refused(&Tar::default().file(path, b"x").end());
        assert!(message.contains("leads out of the root"), "{message}");
    }
}

#[test]
fn an_absolute_path_is_relative_to_the_layer() {
    let ground = ground!(an_absolute_path_is_relative_to_the_layer);
    let outside = ground.dir.path().join("outside/secret");
    let name = outside.to_str().unwrap();
    ground
        .unpack(&Tar::default().file(name, b"x").end())
        .unwrap();
    let landed = ground.inside(name.trim_start_matches('/'));
    assert_eq!(fs::read(landed).unwrap(), b"x");
}

#[test]
fn nothing_is_written_through_a_symbolic_link_to_a_directory() {
    for target in ["../outside", "/", "/tmp", "sub"] {
        let ground = ground!(nothing_is_written_through_a_symbolic_link_to_a_directory);
        let archive = Tar::default()
            .directory("sub", 0o755)
            .symlink("door", target);
        let message = ground.refused(&archive.file("door/secret", b"x").end());
        assert!(
            message.contains("goes through a symbolic link"),
            "{message}"
        );
        assert!(names(&ground.inside("sub")).is_empty());
    }
}

#[test]
fn a_link_in_the_middle_of_a_path_is_not_followed_either() {
    let ground = ground!(a_link_in_the_middle_of_a_path_is_not_followed_either);
    let archive = Tar::default()
        .symlink("a", "..")
        .directory("a/outside/new", 0o755);
    assert!(ground.refused(&archive.end()).contains("goes through"));
}

#[test]
fn a_file_replaces_a_symbolic_link_and_not_its_target() {
    let ground = ground!(a_file_replaces_a_symbolic_link_and_not_its_target);
    let archive = Tar::default().symlink("door", "../outside/secret");
    ground.unpack(&archive.file("door", b"mine").end()).unwrap();
    assert!(ground.inside("door").symlink_metadata().unwrap().is_file());
    assert_eq!(fs::read(ground.inside("door")).unwrap(), b"mine");
}

#[test]
fn a_directory_replaces_a_symbolic_link_and_does_not_adopt_its_target() {
    let ground = ground!(a_directory_replaces_a_symbolic_link_and_does_not_adopt_its_target);
    let archive = Tar::default().symlink("door", "../outside");
    let archive = archive.directory("door", 0o777).file("door/new", b"x");
    ground.unpack(&archive.end()).unwrap();
    assert!(ground.inside("door").symlink_metadata().unwrap().is_dir());
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
        let ground = ground!(a_hard_link_to_outside_is_refused);
        let archive = Tar::default().symlink("door", "../outside");
        let message = ground.refused(&archive.hard_link("mine", target).end());
        let is_rejected = message.contains("is a hard link to") || message.contains("leads out");
        assert!(is_rejected, "{target}: {message}");
        assert_eq!(names(&ground.inside("")), ["door"]);
    }
}

#[test]
fn a_hard_link_to_a_symbolic_link_links_that_and_not_its_target() {
    let ground = ground!(a_hard_link_to_a_symbolic_link_links_that_and_not_its_target);
    let archive = Tar::default()
        .symlink("door", "../outside/secret")
        .hard_link("too", "door");
    // Writing to the linked name creates a new file.
    ground.unpack(&archive.file("too", b"mine").end()).unwrap();
    assert!(
        ground
            .inside("door")
            .symlink_metadata()
            .unwrap()
            .is_symlink()
    );
}

#[test]
fn a_hard_link_to_a_deletion_or_a_directory_is_refused() {
    let ground = ground!(a_hard_link_to_a_deletion_or_a_directory_is_refused);
    let archive = Tar::default()
        .file(".wh.gone", b"")
        .hard_link("mine", "gone");
    assert!(ground.refused(&archive.end()).contains("is a hard link to"));
    let ground = ground!(a_hard_link_to_a_deletion_or_a_directory_is_refused);
    let archive = Tar::default().directory("d", 0o755).hard_link("mine", "d");
    assert!(ground.refused(&archive.end()).contains("is a hard link to"));
}

#[test]
fn devices_are_left_out_and_counted() {
    let ground = ground!(devices_are_left_out_and_counted);
    let archive = Tar::default()
        .node(EntryType::Char, "dev/mem")
        .node(EntryType::Block, "sda");
    let unpacked = ground.unpack(&archive.file("x", b"").end()).unwrap();
    assert_eq!(unpacked.devices_left_out, 2);
    assert_eq!(names(&ground.inside("")), ["x"]);
}

#[test]
fn a_fifo_is_kept_and_blocks_no_reader() {
    let ground = ground!(a_fifo_is_kept_and_blocks_no_reader);
    let archive = Tar::default().node(EntryType::Fifo, "pipe");
    ground.unpack(&archive.end()).unwrap();
    let found = ground.inside("pipe").symlink_metadata().unwrap();
    assert!(found.file_type().is_fifo());
    // A FIFO that a file replaces does not block either.
    let archive = Tar::default()
        .node(EntryType::Fifo, "pipe")
        .file("pipe", b"x");
    ground.unpack(&archive.end()).unwrap();
    assert_eq!(fs::read(ground.inside("pipe")).unwrap(), b"x");
}

#[test]
fn deletions_cannot_be_aimed_outside() {
    for name in [".wh.", ".wh..", ".wh...", "a/.wh...", "../.wh.outside"] {
        let ground = ground!(deletions_cannot_be_aimed_outside);
        let message = ground.refused(&Tar::default().file(name, b"").end());
        assert!(
            message.contains("leads out of the root"),
            "{name}: {message}"
        );
    }
}

#[test]
fn overlay_marks_cannot_be_smuggled_in_as_attributes() {
    let ground = ground!(overlay_marks_cannot_be_smuggled_in_as_attributes);
    let redirect = [
        ("SCHILY.xattr.trusted.overlay.redirect", "/etc"),
        ("SCHILY.xattr.trusted.overlay.opaque", "y"),
        ("SCHILY.xattr.security.selinux", "x"),
        ("SCHILY.xattr.system.posix_acl_access", "x"),
    ];
    ground
        .unpack(&Tar::default().pax(&redirect).directory("d", 0o755).end())
        .unwrap();
    assert!(super::faithful::attributes(&ground.inside("d")).is_empty());
}

#[test]
fn a_bomb_stops_at_its_bounds() {
    let ground = ground!(a_bomb_stops_at_its_bounds);
    let limits = UnpackLimits {
        bytes: 1 << 20,
        entries: 100,
        ..UnpackLimits::default()
    };
    let refused = |archive: &[u8], limits| {
        let error = ground.unpack_within(archive, limits).unwrap_err();
        assert!(matches!(error, LayerError::TooMuch { .. }), "{error}");
        error.to_string()
    };
    let large = Tar::default().file("zeros", &vec![0; 2 << 20]).end();
    assert!(refused(&gzip(&large), limits).contains("bytes"));
    assert!(
        !ground.inside("zeros").exists(),
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
    let names = (0..50).fold(Tar::default(), |tar, i| {
        tar.directory(&format!("d{i}"), 0o755)
    });
    assert!(refused(&names.end(), few_names).contains("names"));
}

#[test]
fn a_small_archive_of_much_is_stopped_by_its_ratio() {
    let ground = ground!(a_small_archive_of_much_is_stopped_by_its_ratio);
    // An endless file of zeros with a high compression ratio.
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    let header = Tar::header("zeros", EntryType::Regular, 2 << 30);
    encoder
        .write_all(&Tar::default().add(header, b"").0)
        .unwrap();
    let zeros = vec![0; 1 << 20];
    (0..400).for_each(|_| encoder.write_all(&zeros).unwrap());
    let message = ground.refused(&encoder.finish().unwrap());
    assert!(message.contains("per compressed byte"), "{message}");
}

#[test]
fn holes_count_toward_the_size_limit() {
    let ground = ground!(holes_count_toward_the_size_limit);
    let size = (64_u64 << 40).to_string();
    let sparse = [("GNU.sparse.map", "0,0"), ("GNU.sparse.size", &size)];
    let archive = Tar::default().pax(&sparse).file("holes", b"").end();
    assert!(ground.refused(&archive).contains("more bytes than"));
}

#[test]
fn invalid_maps_of_holes_are_refused() {
    let maps = [
        ("5,3,0,2", "8"),
        ("0,3,2,2", "8"),
        ("6,5", "8"),
        ("18446744073709551615,5", "8"),
        ("0,6", "8"),
        ("0,5,6", "8"),
    ];
    for (map, size) in maps {
        let ground = ground!(invalid_maps_of_holes_are_refused);
        let sparse = [("GNU.sparse.map", map), ("GNU.sparse.size", size)];
        let archive = Tar::default().pax(&sparse).file("holes", b"12345").end();
        let message = ground.refused(&archive);
        assert!(
            message.contains("map of holes") || message.contains("number"),
            "{message}"
        );
    }
}

#[test]
fn names_that_no_file_system_has_are_refused() {
    let long = "a".repeat(300);
    let deep = "a/".repeat(300);
    for path in [&long, &deep, "a\0b"] {
        let ground = ground!(names_that_no_file_system_has_are_refused);
        let archive = Tar::default().pax(&[("path", path)]).file("x", b"").end();
        assert!(ground.unpack(&archive).is_err());
        assert!(names(&ground.inside("")).is_empty());
    }
}

#[test]
fn an_extended_header_without_end_is_not_read_into_memory() {
    let ground = ground!(an_extended_header_without_end_is_not_read_into_memory);
    for kind in [
        EntryType::XHeader,
        EntryType::GNULongName,
        EntryType::GNULongLink,
    ] {
        let header = Tar::header("x", kind, 1 << 40);
        let message = ground.refused(&Tar::default().add(header, b"").end());
        assert!(message.contains("too large"), "{message}");
    }
}

#[test]
fn a_truncated_archive_is_distinguished_from_an_invalid_one() {
    let ground = ground!(a_truncated_archive_is_distinguished_from_an_invalid_one);
    let whole = Tar::default().file("a", &[7; 3000]).end();
    for archive in [
        whole.clone(),
        gzip(&whole),
        zstd::encode_all(&whole[..], 1).unwrap(),
    ] {
        let half = &archive[..archive.len() * 2 / 3];
        let error = ground.unpack(half).unwrap_err();
        assert!(matches!(error, LayerError::Truncated), "{error}");
    }
    // A missing end mark between entries is reported in the result; after the header of a long name
    // it is an error.
    assert!(ground.unpack(&whole).unwrap().end_mark);
    assert!(!ground.unpack(&whole[..512 + 3072]).unwrap().end_mark);
    let named = Tar::default().pax(&[("path", "b")]).0;
    assert!(matches!(ground.unpack(&named), Err(LayerError::Truncated)));
    assert!(ground.refused(&[b'x'; 2048]).contains("not a tar archive"));
    let mut flipped = whole;
    flipped[3] ^= 1;
    assert!(ground.refused(&flipped).contains("not a tar archive"));
}

#[test]
fn a_directory_is_not_replaced_by_something_else() {
    let ground = ground!(a_directory_is_not_replaced_by_something_else);
    let archive = Tar::default().directory("d", 0o755).file("d", b"x");
    assert!(
        ground
            .refused(&archive.end())
            .contains("replaces a directory")
    );
}

#[test]
fn messages_do_not_carry_control_characters() {
    let ground = ground!(messages_do_not_carry_control_characters);
    let message = ground.refused(&Tar::default().file("../\x1b[2J\n", b"").end());
    assert!(
        !message.contains('\x1b') && !message.contains('\n'),
        "{message:?}"
    );
}
