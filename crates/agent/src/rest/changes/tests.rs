//! Tests of the list of changed files: directories stand for the layers of an overlay file
//! system.

use super::*;

/// Compares a directory with the layers below it. Returns a letter and path per change (A: added,
/// C: changed, D: deleted), and whether the limit was reached.
fn changes(upper: &Path, lowers: &[&Path], limit: usize) -> (Vec<String>, bool) {
    let mut found = FileChanges::default();
    let lowers = lowers.iter().map(|l| l.to_path_buf()).collect();
    let mut walk = ChangeWalk {
        limit,
        detailed: false,
        step: &|| (),
        merged: Path::new("/no-overlay"),
        out: &mut found,
    };
    walk.directory(upper, lowers, Path::new(""), WalkLevel::default())
        .unwrap();
    let shown = found
        .changes
        .iter()
        .map(|c| format!("{:?} {}", c.kind, c.path));
    (shown.collect(), found.more)
}

#[test]
fn files_are_added_or_modified_relative_to_all_lower_layers() {
    let dir = tempfile::tempdir().unwrap();
    let [upper, high, low] = ["upper", "high", "low"].map(|name| dir.path().join(name));
    for (root, files) in [
        (&low, &["etc/a", "etc/b", "usr/x"][..]),
        (&high, &["etc/c"]),
        (
            &upper,
            &[
                "etc/a",
                "etc/c",
                "etc/new",
                "home/me/f",
                "run/passing",
                "usr/x",
            ],
        ),
    ] {
        for file in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
    }
    let expected = [
        "C /etc",
        "C /etc/a",
        "C /etc/c",
        "A /etc/new",
        "A /home",
        "A /home/me",
        "A /home/me/f",
        // The content of /run belongs to a boot, and is not listed.
        "A /run",
        "C /usr",
        "C /usr/x",
    ];
    let (found, more) = changes(&upper, &[&high, &low], 100);
    assert_eq!((found, more), (expected.map(str::to_owned).to_vec(), false));
    let (found, more) = changes(&upper, &[&high, &low], 2);
    assert_eq!((found.len(), more), (2, true));
}

#[test]
fn overlayfs_whiteouts_are_deleted_files() {
    // SAFETY: the call takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [upper, low] = ["upper", "low"].map(|name| dir.path().join(name));
    for path in [&upper, &low] {
        fs::create_dir_all(path.join("d/again")).unwrap();
    }
    for name in ["gone", "kept", "d/hidden", "d/again/hidden"] {
        fs::write(low.join(name), "x").unwrap();
    }
    // Whiteouts. No lower layer has `never`, so it is not listed as deleted.
    for name in ["gone", "never"] {
        let path = sys::cpath(&upper.join(name)).unwrap();
        // SAFETY: the path is zero-terminated.
        let made = unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR, 0) };
        assert_eq!(made, 0);
    }
    // An opaque directory hides its entries in lower layers, which therefore count as deleted.
    let opaque = sys::cpath(&upper.join("d")).unwrap();
    // SAFETY: the strings are zero-terminated, and the buffer has one byte.
    let set = unsafe {
        libc::setxattr(
            opaque.as_ptr(),
            OPAQUE_XATTR.as_ptr(),
            b"y".as_ptr().cast(),
            1,
            0,
        )
    };
    if set != 0 {
        // The file system of the test does not support these attributes.
        return;
    }
    let (found, _) = changes(&upper, &[&low], 100);
    assert_eq!(
        found,
        [
            "C /d",
            "D /d/hidden",
            "C /d/again",
            "D /d/again/hidden",
            "D /gone"
        ]
    );
}
