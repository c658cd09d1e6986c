//! Untrusted archives are unpacked only below the directory, and grant no privileges.
#![allow(clippy::unwrap_used, reason = "tests")]

use jiffy_archive::{
    ArchiveEntry, ArchiveEntryKind, ArchiveError, ArchiveWriter, UnpackOptions, UnpackOwner,
    UnpackStats, unpack,
};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use tempfile::TempDir;

/// Directory `in` for an unpacked archive, and a directory `out` with a secret.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("in")).unwrap();
        fs::create_dir(dir.path().join("out")).unwrap();
        fs::write(dir.path().join("out/secret"), "secret").unwrap();
        Self { dir }
    }

    /// Unpacks an untrusted archive into `in`.
    fn unpack(&self, archive: &[u8], rename: Option<&str>) -> Result<UnpackStats, ArchiveError> {
        let root = File::open(self.dir.path().join("in")).unwrap();
        let rules = UnpackOptions {
            owner: UnpackOwner::Process,
            mode: None,
            confined: true,
            rename: rename.map(|name| name.as_bytes().to_vec()),
            max_bytes: None,
            max_entries: None,
            layer: false,
        };
        unpack(archive, root.as_fd(), &rules)
    }

    /// Checks that no file outside the directory has changed.
    fn check(&self) {
        let out = self.dir.path().join("out");
        assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
        assert_eq!(fs::read(out.join("secret")).unwrap(), b"secret");
        assert_eq!(fs::metadata(out.join("secret")).unwrap().nlink(), 1);
        assert_eq!(fs::read_dir(self.dir.path()).unwrap().count(), 2);
    }
}

/// Returns an entry without content. `link` is the target of a link.
fn entry(kind: ArchiveEntryKind, path: &str, link: &str) -> ArchiveEntry {
    let mut entry = ArchiveEntry::new(kind, path, 0o6777);
    entry.link = link.into();
    entry
}

/// Returns a file of four bytes with the set-user-id and set-group-id bits.
fn file(path: &str) -> ArchiveEntry {
    ArchiveEntry::new(ArchiveEntryKind::File, path, 0o6777).with_size(4)
}

/// Returns an archive with these entries. Files have `x` as content.
fn archive(entries: &[ArchiveEntry]) -> Vec<u8> {
    let mut writer = ArchiveWriter::new(Vec::new());
    for entry in entries {
        let content = vec![b'x'; usize::try_from(entry.size).unwrap()];
        writer.add(entry, &content).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn no_path_and_no_link_leads_out_of_the_directory() {
    use ArchiveEntryKind::{Directory, HardLink, Symlink};
    let to_out = |path| entry(Symlink, path, "../out");
    let cases: Vec<Vec<ArchiveEntry>> = vec![
        vec![file("../out/x")],
        vec![file("a/../../out/x")],
        vec![file("..")],
        vec![to_out("s"), file("s/x")],
        vec![to_out("s"), entry(Directory, "s", "")],
        vec![to_out("s"), entry(Directory, "s/sub", "")],
        vec![to_out("s"), entry(HardLink, "s/hard", "s/secret")],
        vec![to_out("s"), entry(HardLink, "hard", "s/secret")],
        vec![entry(HardLink, "hard", "../out/secret")],
        vec![entry(Symlink, "s", "/etc"), file("s/jiffy-was-here")],
        vec![
            entry(Symlink, "a", "."),
            entry(Symlink, "a/b", ".."),
            file("a/b/x"),
        ],
        vec![
            entry(Symlink, "s", "../out/secret"),
            entry(HardLink, "h", "s"),
            file("h/x"),
        ],
        vec![entry(Symlink, "s", "/proc/self/root"), file("s/tmp/x")],
        vec![entry(Directory, "d", ""), to_out("d/s"), file("d/s/x")],
    ];
    for entries in cases {
        let scene = Scene::new();
        let refused = scene.unpack(&archive(&entries), None);
        assert!(
            refused.as_ref().is_err_and(ArchiveError::is_malformed),
            "{entries:?}: {refused:?}"
        );
        scene.check();
        // Unpacks the same entries with another name for their first component.
        let scene = Scene::new();
        let _ = scene.unpack(&archive(&entries), Some("name"));
        scene.check();
    }
}

#[test]
fn a_file_replaces_a_link_and_not_its_target() {
    let scene = Scene::new();
    symlink("../out/secret", scene.dir.path().join("in/f")).unwrap();
    scene.unpack(&archive(&[file("f")]), None).unwrap();
    scene.check();
    assert_eq!(fs::read(scene.dir.path().join("in/f")).unwrap(), b"xxxx");
    let entries = [
        entry(ArchiveEntryKind::Symlink, "g", "../out/secret"),
        file("g"),
    ];
    scene.unpack(&archive(&entries), None).unwrap();
    scene.check();
}

#[test]
fn existing_links_are_not_followed() {
    let scene = Scene::new();
    symlink("../out", scene.dir.path().join("in/s")).unwrap();
    assert!(scene.unpack(&archive(&[file("s/x")]), None).is_err());
    scene.check();
}

#[test]
fn devices_pipes_setuid_and_attributes_are_dropped() {
    let scene = Scene::new();
    let mut f = file("f");
    f.uid = 12;
    f.xattrs = vec![
        (b"user.x".to_vec(), b"y".to_vec()),
        (b"security.capability".to_vec(), vec![1; 20]),
    ];
    let entries = [
        entry(ArchiveEntryKind::Character(1, 3), "null", ""),
        entry(ArchiveEntryKind::Block(8, 0), "disk", ""),
        entry(ArchiveEntryKind::UnknownDevice, "unknown", ""),
        entry(ArchiveEntryKind::Fifo, "pipe", ""),
        entry(ArchiveEntryKind::HardLink, "the same pipe", "pipe"),
        f,
    ];
    let done = scene.unpack(&archive(&entries), None).unwrap();
    assert_eq!(
        (done.skipped, done.first_skipped.as_deref()),
        (5, Some("null"))
    );
    let path = scene.dir.path().join("in");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
    let found = fs::metadata(path.join("f")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o777);
    assert_eq!(found.uid(), rustix::process::geteuid().as_raw());
    assert!(rustix::fs::listxattr(path.join("f"), &mut [0_u8; 64][..]).is_ok_and(|n| n == 0));
}

#[test]
fn everything_is_unpacked_below_the_requested_name() {
    let scene = Scene::new();
    let entries = [
        entry(ArchiveEntryKind::Directory, "result", ""),
        file("result/x"),
        file(".bashrc/y"),
        file("z"),
    ];
    let outcome = scene.unpack(&archive(&entries), Some("mine"));
    assert!(outcome.is_err(), "a file would replace the directory");
    let names: Vec<_> = fs::read_dir(scene.dir.path().join("in"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["mine"]);
    assert_eq!(
        fs::read_dir(scene.dir.path().join("in/mine"))
            .unwrap()
            .count(),
        2
    );
}

#[test]
fn memory_is_bounded_for_any_archive() {
    // An extended header and a map of holes that are larger than memory.
    for (kind, name) in [(b'x', "x"), (b'L', "L"), (b'K', "K")] {
        let mut header = tar::Header::new_ustar();
        header.set_path(name).unwrap();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(1 << 40);
        header.set_cksum();
        let refused = Scene::new().unpack(header.as_bytes(), None);
        assert!(refused.is_err_and(|e| e.is_malformed()));
    }
    let mut writer = ArchiveWriter::new(Vec::new());
    let mut sparse = ArchiveEntry::new(ArchiveEntryKind::File, *b"sparse", 0o644);
    sparse.size = 1 << 40;
    writer.begin(&sparse).unwrap();
    writer.end().unwrap();
    let mut bytes = writer.finish().unwrap();
    Scene::new().unpack(&bytes, None).unwrap();
    // The map follows two headers and the text of the extended header.
    let map = bytes.windows(2).rposition(|w| w == b"1\n").unwrap();
    (&mut bytes[map..map + 14])
        .write_all(b"9999999999999\n")
        .unwrap();
    let refused = Scene::new().unpack(&bytes, None);
    assert!(refused.is_err_and(|e| e.is_malformed()));
}

#[test]
fn bytes_changed_at_random_change_no_file_outside_the_directory() {
    let entries = [
        entry(ArchiveEntryKind::Directory, "d", ""),
        file("d/f"),
        entry(ArchiveEntryKind::Symlink, "d/s", "../../out"),
        entry(ArchiveEntryKind::HardLink, "d/h", "d/f"),
        file(&"long/".repeat(30)),
    ];
    let whole = archive(&entries);
    // xorshift64 with a fixed seed, so that a failure can be reproduced.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |most: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed % most as u64).unwrap()
    };
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            bytes[at] = u8::try_from(random(256)).unwrap();
            // The test corrects most checksums, in order to test the code after the check.
            let block = at / 512 * 512;
            let mut header = tar::Header::new_old();
            header
                .as_mut_bytes()
                .copy_from_slice(&bytes[block..block + 512]);
            if random(8) > 0 {
                header.set_cksum();
                bytes[block..block + 512].copy_from_slice(header.as_bytes());
            }
        }
        bytes.truncate(bytes.len() - random(600));
        let scene = Scene::new();
        let _ = scene.unpack(&bytes, None);
        scene.check();
    }
}

#[test]
fn entries_beyond_the_limit_are_refused_before_they_are_created() {
    let count = |path: &std::path::Path| {
        let all = std::process::Command::new("find").arg(path).output();
        all.unwrap().stdout.iter().filter(|b| **b == b'\n').count() - 1
    };
    let listed: Vec<_> = (0..5).map(|n| file(&n.to_string())).collect();
    // Implicitly created directories count as well.
    let implied = [file("a/b/c/d/f")];
    let links = [file("f"), entry(ArchiveEntryKind::HardLink, "g", "f")];
    let directory = ArchiveEntryKind::Directory;
    let directories = [entry(directory, ".", ""), entry(directory, "d", "")];
    for (entries, needed) in [
        (&listed[..], 5),
        (&implied[..], 5),
        (&links[..], 2),
        (&directories[..], 1),
    ] {
        for most in 0..=needed {
            let scene = Scene::new();
            let path = scene.dir.path().join("in");
            let root = File::open(&path).unwrap();
            let rules = UnpackOptions {
                owner: UnpackOwner::Process,
                mode: None,
                confined: true,
                rename: None,
                max_bytes: None,
                max_entries: Some(most),
                layer: false,
            };
            let done = unpack(&archive(entries)[..], root.as_fd(), &rules);
            let created = u64::try_from(count(&path)).unwrap();
            assert!(created <= most, "{created} of {most}");
            match done {
                Ok(_) => assert_eq!((most, created), (needed, needed)),
                Err(e) => {
                    assert!(most < needed && e.is_malformed(), "{e}");
                    assert!(e.to_string().contains("maximum number of entries"), "{e}");
                }
            }
        }
    }
}

#[test]
fn permissions_are_never_set_through_a_link() {
    let scene = Scene::new();
    let (inside, secret) = (
        scene.dir.path().join("in"),
        scene.dir.path().join("out/secret"),
    );
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    let before = mode(&secret);
    // A link replaces a file that existed a moment ago.
    symlink("../out/secret", inside.join("link")).unwrap();
    fs::write(inside.join("file"), "").unwrap();
    let root = File::open(&inside).unwrap();
    let wanted = rustix::fs::Mode::from_raw_mode(0o4001);
    let refused = jiffy_archive::set_mode(&root, "link", wanted);
    assert_eq!(refused, Err(rustix::io::Errno::LOOP));
    assert_eq!(mode(&secret), before);
    jiffy_archive::set_mode(&root, "file", wanted).unwrap();
    assert_eq!(mode(&inside.join("file")), 0o4001);
}

#[test]
fn content_beyond_the_limit_is_refused_before_it_is_read() {
    let scene = Scene::new();
    let root = File::open(scene.dir.path().join("in")).unwrap();
    let rules = |max| UnpackOptions {
        owner: UnpackOwner::Process,
        mode: None,
        confined: true,
        rename: None,
        max_bytes: Some(max),
        max_entries: None,
        layer: false,
    };
    let two = archive(&[file("a"), file("b")]);
    unpack(&two[..], root.as_fd(), &rules(8)).unwrap();
    let refused = unpack(&two[..], root.as_fd(), &rules(7)).unwrap_err();
    assert!(refused.to_string().contains("maximum total size"));
    scene.check();
}
