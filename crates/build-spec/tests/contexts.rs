//! Tests of build contexts. A *context* is the directory whose files the `COPY` instructions of a
//! Dockerfile refer to. The tests check which files are packed into archives, and how the archives
//! are named.
#![allow(clippy::unwrap_used, reason = "tests")]

use flate2::read::GzDecoder;
use jiffy_archive::{ArchiveEntryKind, ArchiveReader};
use jiffy_build_spec::context::{PreparedBuild, prepare};
use jiffy_build_spec::dockerfile::{DockerfileOptions, parse};
use jiffy_build_spec::spec::{CopySource, StepAction};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// Creates a context with these files. Names that end with a slash are directories.
fn context(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        if name.ends_with('/') {
            fs::create_dir_all(path).unwrap();
            continue;
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

/// Prepares the build of the Dockerfile `text` with the context `directory`.
fn build(directory: &Path, text: &str) -> Result<PreparedBuild, String> {
    let parsed = parse(text, &DockerfileOptions::default()).unwrap();
    prepare(parsed, directory, Some(&directory.join("Dockerfile"))).map_err(|e| e.to_string())
}

/// Returns the archive and the sources of each `COPY`.
fn copies(prepared: &PreparedBuild) -> Vec<(String, Vec<String>)> {
    let steps = prepared.spec.stages.iter().flat_map(|stage| &stage.steps);
    let copies = steps.filter_map(|step| match &step.action {
        StepAction::Copy(copy) => Some(copy),
        _ => None,
    });
    let named = copies.filter_map(|copy| match &copy.from {
        CopySource::Files(name) => Some((name.clone(), copy.sources.clone())),
        _ => None,
    });
    named.collect()
}

/// Returns the names in the archive of the first upload, with `/` after directories and `@` after
/// symbolic links.
fn names(prepared: &PreparedBuild) -> Vec<String> {
    let mut packed = Vec::new();
    prepared.uploads[0].write_to(&mut packed).unwrap();
    let mut reader = ArchiveReader::new(GzDecoder::new(&packed[..]));
    let mut names = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        let mark = match entry.kind {
            ArchiveEntryKind::Directory => "/",
            ArchiveEntryKind::Symlink => "@",
            _ => "",
        };
        names.push(format!("{}{mark}", String::from_utf8(entry.path).unwrap()));
    }
    names
}

/// Returns the names in the archive for `COPY sources`.
fn of(directory: &Path, sources: &str) -> Vec<String> {
    names(&build(directory, &format!("FROM a\nCOPY {sources} /x/")).unwrap())
}

#[test]
fn sources_are_files_directories_and_patterns() {
    let dir = context(&[
        ("a.txt", "a"),
        ("b.txt", "b"),
        ("c.md", ""),
        ("src/lib/x.rs", ""),
        ("src/main.rs", ""),
        ("empty/", ""),
    ]);
    let path = dir.path();
    assert_eq!(of(path, "a.txt"), ["a.txt"]);
    assert_eq!(of(path, "/a.txt ./c.md"), ["a.txt", "c.md"]);
    assert_eq!(of(path, "*.txt"), ["a.txt", "b.txt"]);
    assert_eq!(
        of(path, "src"),
        ["src/", "src/lib/", "src/lib/x.rs", "src/main.rs"]
    );
    assert_eq!(
        of(path, "src/*"),
        ["src/lib/", "src/lib/x.rs", "src/main.rs"]
    );
    assert_eq!(
        of(path, "*/*.rs [a-b].txt"),
        ["a.txt", "b.txt", "src/main.rs"]
    );
    // Five files and three directories.
    assert_eq!(of(path, ".").len(), 8);
    assert_eq!(of(path, "src/../empty/"), ["empty/"]);
}

#[test]
fn excluded_files_are_not_copied() {
    let dir = context(&[
        (
            ".dockerignore",
            "node_modules\n*.log\n!keep.log\ndist/*\n!dist/index.html\nsecret",
        ),
        ("node_modules/a/b", ""),
        ("x.log", ""),
        ("keep.log", ""),
        ("dist/index.html", ""),
        ("dist/other.js", ""),
        ("secret/key", ""),
        ("sub/x.log", ""),
    ]);
    let path = dir.path();
    let expected = [
        ".dockerignore",
        "dist/",
        "dist/index.html",
        "keep.log",
        "sub/",
        "sub/x.log",
    ];
    assert_eq!(of(path, "."), expected);
    let refused = build(path, "FROM a\n\nCOPY secret /").unwrap_err();
    assert!(
        refused.contains("line 3: 'secret' is excluded by .dockerignore"),
        "{refused}"
    );
    assert!(build(path, "FROM a\nCOPY x.* /").is_err());

    // The ignore file of the Dockerfile takes precedence.
    fs::write(path.join("Dockerfile.dockerignore"), "**\n!sub").unwrap();
    assert_eq!(of(path, "."), ["sub/", "sub/x.log"]);
}

#[test]
fn files_outside_of_the_context_are_not_copied() {
    let dir = context(&[("in/a", "a"), ("in/sub/b", ""), ("out/secret", "secret")]);
    let path = dir.path().join("in");
    symlink("../out/secret", path.join("leak")).unwrap();
    symlink("../out", path.join("leaks")).unwrap();
    symlink("sub", path.join("link")).unwrap();
    symlink("/etc/passwd", path.join("sub/absolute")).unwrap();
    for source in [
        "../out/secret",
        "sub/../../out",
        "leak",
        "leaks/secret",
        "leaks/*",
        "l*",
    ] {
        let refused = build(&path, &format!("FROM a\nCOPY {source} /x/")).unwrap_err();
        assert!(
            refused.contains("is outside of the build's context"),
            "{source}: {refused}"
        );
    }
    // A symbolic link as a source is followed. A symbolic link in a directory is copied.
    assert_eq!(of(&path, "link"), ["link/", "link/absolute@", "link/b"]);
    assert_eq!(of(&path, "sub"), ["sub/", "sub/absolute@", "sub/b"]);
    let missing = build(&path, "FROM a\nCOPY a none /x/").unwrap_err();
    assert!(
        missing.contains("line 2: 'none' does not exist in the build context"),
        "{missing}"
    );
    assert!(build(&path, "FROM a\nCOPY *.none /x/").is_err());
    assert!(
        build(&path, "FROM a\nCOPY a/b /x/")
            .unwrap_err()
            .contains("'a/b' does not exist")
    );
}

#[test]
fn an_archive_is_named_by_its_content() {
    let dir = context(&[("a", "a"), ("d/b", "b"), ("other", "")]);
    let name = |text: &str| copies(&build(dir.path(), text).unwrap())[0].0.clone();
    let text = "FROM a\nCOPY a d /x/";
    let first = name(text);
    assert_eq!(first.len(), 64);
    let a = fs::File::options()
        .write(true)
        .open(dir.path().join("a"))
        .unwrap();
    a.set_modified(SystemTime::now() - Duration::from_secs(86_400))
        .unwrap();
    fs::write(dir.path().join("other"), "changed").unwrap();
    assert_eq!(
        name(text),
        first,
        "the name depends on a time or on a file that is not copied"
    );
    fs::set_permissions(dir.path().join("a"), fs::Permissions::from_mode(0o755)).unwrap();
    let executable = name(text);
    assert_ne!(executable, first);
    fs::write(dir.path().join("d/b"), "B").unwrap();
    assert_ne!(name(text), executable);
    let twice = build(dir.path(), "FROM a\nCOPY a /x\nCOPY a /y\nCOPY d /z").unwrap();
    assert_eq!((twice.uploads.len(), copies(&twice).len()), (2, 3));
}

#[test]
fn sources_may_have_variables_of_the_dockerfile() {
    let dir = context(&[("app-2/x", ""), ("$odd", "")]);
    let text = "ARG V=2\nFROM a AS one\nENV NAME=app\nFROM one\nARG V\nENV DIR=$NAME-$V\nCOPY $DIR ${NAME:+app}-$V/x /x/";
    assert_eq!(
        copies(&build(dir.path(), text).unwrap())[0].1,
        ["app-2", "app-2/x"]
    );
    let escaped = build(dir.path(), "FROM a\nCOPY \\$odd /x").unwrap();
    assert_eq!(copies(&escaped)[0].1, ["\\$odd"]);
    // `IMAGES` may be a variable of the base image, whose environment the client does not know.
    let unknown = build(dir.path(), "FROM a\nENV DIR=$IMAGES\nCOPY $DIR /x").unwrap_err();
    assert!(
        unknown.contains("line 3: the value of '$DIR' depends on 'DIR'"),
        "{unknown}"
    );
}
