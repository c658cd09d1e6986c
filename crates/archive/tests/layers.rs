//! Layers of images, whose marks delete files.
#![allow(clippy::unwrap_used, reason = "tests")]

use jiffy_archive::{
    ArchiveEntry, ArchiveEntryKind, ArchiveWriter, UnpackOptions, UnpackOwner, unpack,
};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Returns an archive of empty files and directories. Names of directories end with `/`.
fn archive(names: &[&str]) -> Vec<u8> {
    let mut writer = ArchiveWriter::new(Vec::new());
    for name in names {
        let kind = if name.ends_with('/') {
            ArchiveEntryKind::Directory
        } else {
            ArchiveEntryKind::File
        };
        let path = name.trim_end_matches('/').as_bytes().to_vec();
        let entry = ArchiveEntry::new(kind, path, 0o755);
        writer.add(&entry, b"").unwrap();
    }
    writer.finish().unwrap()
}

/// Returns the paths below a directory. Names of directories end with `/`.
fn tree(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.push(format!("{name}/"));
            let below = tree(&entry.path());
            found.extend(below.iter().map(|inner| format!("{name}/{inner}")));
        } else {
            found.push(name);
        }
    }
    found.sort();
    found
}

fn options(layer: bool) -> UnpackOptions {
    UnpackOptions {
        owner: UnpackOwner::Process,
        mode: None,
        confined: false,
        rename: None,
        max_bytes: None,
        max_entries: None,
        layer,
    }
}

#[test]
fn marks_of_a_layer_delete_files_and_directories_and_follow_no_link() {
    let outer = tempfile::tempdir().unwrap();
    let root = outer.path().join("root");
    for directory in ["root/gone/deep", "root/opaque/old", "root/kept", "outside"] {
        fs::create_dir_all(outer.path().join(directory)).unwrap();
    }
    for file in [
        "root/gone/deep/f",
        "root/opaque/old/f",
        "root/kept/f",
        "root/kept/g",
    ] {
        fs::write(outer.path().join(file), "x").unwrap();
    }
    fs::write(root.join("becomes-directory"), "x").unwrap();
    fs::create_dir_all(root.join("becomes-file/with")).unwrap();
    fs::write(outer.path().join("outside/f"), "x").unwrap();
    symlink("../outside", root.join("link")).unwrap();
    symlink("../outside", root.join("opaque/link")).unwrap();
    let layer = archive(&[
        ".wh.gone",
        ".wh.never",
        ".wh.link",
        "opaque/",
        "opaque/.wh..wh..opq",
        "opaque/new",
        "kept/",
        "kept/.wh.f",
        "becomes-directory/",
        "becomes-directory/f",
        "becomes-file",
    ]);
    let fd = File::open(&root).unwrap();
    unpack(&layer[..], fd.as_fd(), &options(true)).unwrap();
    assert_eq!(
        tree(&root),
        [
            "becomes-directory/",
            "becomes-directory/f",
            "becomes-file",
            "kept/",
            "kept/g",
            "opaque/",
            "opaque/new",
        ]
    );
    assert!(outer.path().join("outside/f").exists());

    for name in [".wh.", ".wh..", "kept/.wh...", ".wh..wh.x"] {
        let refused = unpack(&archive(&[name])[..], fd.as_fd(), &options(true));
        assert!(refused.unwrap_err().is_malformed(), "{name}");
    }
    // In an archive that is no layer, the names have no meaning.
    unpack(&archive(&["kept/.wh.g"])[..], fd.as_fd(), &options(false)).unwrap();
    assert!(root.join("kept/g").exists() && root.join("kept/.wh.g").exists());
}
