//! Tests for directory copies to and from a sandbox, and for its changes as a layer.
//!
//! In a layer, a file `.wh.NAME` records that the file NAME was deleted. A file `.wh..wh..opq`
//! records that its directory replaces a directory of the template.

use crate::support::test_home::TestHome;
use crate::support::{finish, jiffy, sandbox_http};
use jiffy_test_attributes::jiffy_test;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns the paths in a tar archive.
fn names(archive: &Path) -> Vec<String> {
    let list = Command::new("tar")
        .arg("-tf")
        .arg(archive)
        .output()
        .unwrap();
    assert!(list.status.success(), "{list:?}");
    let text = String::from_utf8_lossy(&list.stdout).into_owned();
    text.lines()
        .map(|n| n.trim_end_matches('/').to_owned())
        .collect()
}

#[jiffy_test]
fn directories_are_copied_both_ways_as_docker_copies_them() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name).display().to_string();
    let there = |name: &str| format!("{id}:{name}");
    fs::create_dir_all(at("tree/sub")).unwrap();
    fs::write(at("tree/sub/f"), "one").unwrap();
    fs::set_permissions(at("tree/sub/f"), fs::Permissions::from_mode(0o750)).unwrap();
    symlink("f", at("tree/sub/link")).unwrap();

    // If the target does not exist, it becomes the tree; otherwise the tree is copied into it. `/.`
    // copies the contents of the tree.
    test_home.ok(&["cp", "-r", &at("tree"), &there("new")]);
    test_home.ok(&["cp", "-r", &at("tree"), &there("new")]);
    test_home.ok(&[
        "cp",
        "-r",
        &format!("{}/.", at("tree/sub")),
        &there("/tmp/made/deep"),
    ]);
    let seen = test_home.sh(
        &id,
        "find new /tmp/made -type f -printf '%p %m %u\\n' | sort; readlink new/sub/link",
    );
    assert_eq!(
        seen,
        "/tmp/made/deep/f 750 user\nnew/sub/f 750 user\nnew/tree/sub/f 750 user\nf"
    );

    test_home.ok(&["cp", "-r", &there("new"), &at("back")]);
    test_home.ok(&["cp", "-r", &there("new"), &at("back")]);
    test_home.ok(&["cp", "-r", &there("new/sub/."), &at("flat")]);
    for path in [
        "back/sub/f",
        "back/new/sub/f",
        "back/new/tree/sub/f",
        "flat/f",
        "flat/link",
    ] {
        assert_eq!(fs::read(at(path)).unwrap(), b"one", "{path}");
    }
    assert_eq!(fs::metadata(at("flat/f")).unwrap().mode() & 0o777, 0o750);

    let archive = at("all.tar");
    let mut out = jiffy(&["cp", "-r", &there("new/sub"), "-"]);
    out.env("JIFFY_HOME", test_home.dir.path())
        .stdout(fs::File::create(&archive).unwrap());
    assert!(out.status().unwrap().success());
    assert_eq!(names(Path::new(&archive)).first().unwrap(), "sub");
    let mut into = jiffy(&["cp", "-r", "-", &there("/tmp/unpacked")]);
    into.env("JIFFY_HOME", test_home.dir.path())
        .stdin(fs::File::open(&archive).unwrap());
    let done = finish(
        into.stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(test_home.sh(&id, "cat /tmp/unpacked/sub/f"), "one");

    let refused = test_home.call(&["cp", "-r", &there("/no/such"), &at("x")]);
    assert!(refused.stderr.contains("/no/such"), "{refused:?}");
    let refused = test_home.call(&["cp", &at("tree"), &there("x")]);
    assert!(refused.stderr.contains("jiffy cp -r"), "{refused:?}");
}

#[jiffy_test]
fn malicious_archive_entries_have_no_effect_on_the_host() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name).display().to_string();
    fs::create_dir_all(at("outside")).unwrap();
    fs::write(at("outside/f"), "mine").unwrap();
    let script = format!(
        "cd /root; mkdir -p t/d; mknod t/null c 1 3; mknod t/disk b 8 0; cp /bin/true t/setuid; chmod 6755 t/setuid; \
         chown 12:34 t/setuid; ln -s {} t/away; echo x >t/d/f; mkfifo t/pipe",
        at("outside")
    );
    test_home.ok(&["exec", &id, "-u", "root", "--", "sh", "-ec", &script]);
    let copied = test_home.call(&["cp", "-r", "-u", "root", &format!("{id}:t"), &at("t")]);
    assert_eq!(copied.code, Some(0), "{copied:?}");
    let message = "skipped 3 devices and named pipes";
    assert!(copied.stderr.contains(message), "{copied:?}");
    for special in ["t/null", "t/disk", "t/pipe"] {
        assert!(!Path::new(&at(special)).exists(), "{special}");
    }
    let found = fs::metadata(at("t/setuid")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o755);
    assert_eq!(found.uid(), fs::metadata(here.path()).unwrap().uid());
    // In the guest, a directory with a file replaces `away`, which is a link on the host. The copy
    // must not follow the link.
    let script = "cd /root; rm t/away; mkdir t/away; echo theirs >t/away/f";
    test_home.ok(&["exec", &id, "-u", "root", "--", "sh", "-ec", script]);
    let refused = test_home.call(&["cp", "-r", "-u", "root", &format!("{id}:t/."), &at("t")]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("away"), "{refused:?}");
    assert_eq!(fs::read(at("outside/f")).unwrap(), b"mine");
}

#[jiffy_test]
fn a_layer_holds_what_a_sandbox_changed_and_nothing_else() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let script = "rm /etc/motd /usr/bin/git; rm -rf /usr/share/doc; mkdir /usr/share/doc; echo n >/usr/share/doc/n
        mkdir -p /srv/a; echo one >/srv/a/f; ln /srv/a/f /srv/hard; echo more >>/etc/profile; mv /srv/a /srv/b
        chmod 4711 /srv/b/f; mkfifo /srv/pipe; echo r >/run/r; touch /tmp/.jiffy-x; chmod 700 /opt
        ln -s /nowhere /srv/sym; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/srv/sock\")'
        python3 -c 'import os; os.setxattr(\"/srv/b/f\", \"user.note\", b\"hello\")'; touch /srv/.wh.strange";
    test_home.ok(&["exec", &id, "-u", "root", "--", "sh", "-ec", script]);
    let (status, bytes) = sandbox_http::bytes(&test_home, &id, "/layer?username=root");
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&bytes));
    let here = tempfile::tempdir().unwrap();
    let archive = here.path().join("layer.tar");
    fs::write(&archive, &bytes).unwrap();
    let names = names(&archive);
    let has = |name: &str| names.iter().any(|n| n == name);
    for name in [
        "etc/.wh.motd",
        "usr/bin/.wh.git",
        "usr/share/doc/.wh..wh..opq",
        "usr/share/doc/n",
        "srv/b/f",
        "srv/hard",
        "srv/pipe",
        "srv/sym",
        "etc/profile",
        "opt",
    ] {
        assert!(has(name), "{name} is missing: {names:?}");
    }
    for name in [
        "srv/a",
        "srv/sock",
        "tmp/.jiffy-x",
        "run/r",
        "etc/hosts",
        "srv/.wh.strange",
        "usr/bin/git",
    ] {
        assert!(!has(name), "{name} is there: {names:?}");
    }
    assert!(
        !names
            .iter()
            .any(|n| n.starts_with("proc/") || n.starts_with("dev/") || n.starts_with("run/"))
    );
    let out = here.path().join("out");
    fs::create_dir(&out).unwrap();
    let unpacked = Command::new("tar")
        .args(["-xpf"])
        .arg(&archive)
        .arg("-C")
        .arg(&out)
        .output()
        .unwrap();
    assert!(unpacked.status.success(), "{unpacked:?}");
    let f = fs::metadata(out.join("srv/b/f")).unwrap();
    // `srv/hard` is the other link.
    assert_eq!((f.mode() & 0o7777, f.nlink()), (0o4711, 2));
    let profile = fs::read_to_string(out.join("etc/profile")).unwrap();
    assert!(
        profile.len() > 100 && profile.ends_with("more\n"),
        "the whole file, not only the appended part"
    );
    // The archive has the file's own extended attribute, of which 27 bytes are compared, and none
    // of overlayfs.
    assert!(
        bytes
            .windows(27)
            .any(|w| w == b"SCHILY.xattr.user.note=hell")
    );
    assert!(!bytes.windows(15).any(|w| w == b"trusted.overlay"));
}
