//! Tests for templates from minimal images. A *stock template* is a template whose recipe Jiffy
//! contains.

use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints its identity, or listens on a port.
const PROGRAM: &str = r#"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "listen on")) {
        struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 8)) return 1;
        for (;;) close(accept(fd, 0, 0));
    }
    char cwd[4096];
    const char *value = getenv("FROM_IMAGE");
    printf("%d:%d in %s with %s", getuid(), getgid(), getcwd(cwd, sizeof cwd), value ? value : "nothing");
    for (int i = 1; i < argc; i++) printf(" %s", argv[i]);
    printf("\n");
}
"#;

/// Returns a data directory to which the test can add templates, and a directory that contains only
/// the program `/app`.
fn prepared() -> (TestHome, PathBuf) {
    let test_home = TestHome::with_templates();
    let root = test_home.dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let source = test_home.dir.path().join("app.c");
    fs::write(&source, PROGRAM).unwrap();
    let compiled = Command::new("cc")
        .args(["-static", "-o"])
        .arg(root.join("app"))
        .arg(&source)
        .status();
    assert!(compiled.unwrap().success());
    (test_home, root)
}

/// Returns `root` as an archive in the format of `docker save`.
fn save_image(test_home: &TestHome, root: &Path) -> PathBuf {
    let image = test_home.dir.path().join("image");
    fs::create_dir(&image).unwrap();
    tar(&image.join("layer.tar"), root);
    let sum = Command::new("sha256sum")
        .arg(image.join("layer.tar"))
        .output()
        .unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap();
    let config = serde_json::json!({
        "os": "linux",
        "architecture": "amd64",
        "config": { "User": "65532:65533", "WorkingDir": "/nowhere", "Env": ["FROM_IMAGE=care"],
            "Entrypoint": ["/app"], "Cmd": ["listen on", "8080"], "ExposedPorts": { "8080/tcp": {} } },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", &sum[..64])] },
    });
    fs::write(image.join("config.json"), config.to_string()).unwrap();
    fs::write(
        image.join("manifest.json"),
        r#"[{"Config":"config.json","Layers":["layer.tar"]}]"#,
    )
    .unwrap();
    let archive = test_home.dir.path().join("app.tar");
    tar(&archive, &image);
    archive
}

/// Writes the content of a directory to a tar archive.
fn tar(archive: &Path, directory: &Path) {
    let done = Command::new("tar")
        .arg("-cf")
        .arg(archive)
        .arg("-C")
        .arg(directory)
        .arg(".")
        .status();
    assert!(done.unwrap().success());
}

#[jiffy_test]
fn one_program_is_enough_for_a_sandbox() {
    let (test_home, root) = prepared();
    let from = root.to_str().unwrap();
    test_home.ok(&["template", "build", "--from-dir", from, "--name", "one"]);
    let id = test_home.ok(&["create", "--template", "one"]);
    assert_eq!(
        test_home.ok(&["exec", &id, "--", "/app", "a", "b c"]),
        "0:0 in / with nothing a b c"
    );
    let run = test_home.ok(&["run", "--template", "one", "--", "/app"]);
    assert_eq!(run, "0:0 in / with nothing");
    let missing = test_home.call(&["exec", &id, "--", "sh", "-c", "true"]);
    assert_eq!(missing.code, Some(127), "{missing:?}");
}

#[jiffy_test]
fn an_image_keeps_its_configuration_and_runs_its_command_on_request() {
    let (test_home, root) = prepared();
    let archive = save_image(&test_home, &root);
    let archive = archive.to_str().unwrap();
    // The working directory that the image names does not exist. Commands start in `/`.
    test_home.ok(&["template", "build", "--from-tar", archive]);
    let id = test_home.ok(&["create", "--template", "app"]);
    assert_eq!(
        test_home.ok(&["exec", &id, "--", "/app"]),
        "65532:65533 in / with care"
    );
    let details = test_home.json(&["template", "inspect", "app"]);
    assert_eq!(details["origin"]["exposed_ports"][0], "8080/tcp");
    assert!(details["start"].is_null(), "{details}");

    let started = [
        "--start-image-command",
        "--ready-port",
        "8080",
        "--name",
        "started",
    ];
    test_home.ok(&[&["template", "build", "--from-tar", archive], &started[..]].concat());
    test_home.ok(&["create", "--template", "started"]);
    // The image has no shell for this start command, which runs at the first create.
    let wrong = [
        "--start",
        "no shell here",
        "--ready-port",
        "8080",
        "--name",
        "wrong",
    ];
    test_home.ok(&[&["template", "build", "--from-tar", archive], &wrong[..]].concat());
    let refused = test_home.call(&["create", "--template", "wrong"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(
        refused.stderr.contains("no shell here"),
        "{}",
        refused.stderr
    );
}

#[jiffy_test]
fn invalid_images_are_rejected_and_leave_no_files() {
    let (test_home, root) = prepared();
    let app = root.join("app");
    let app = app.to_str().unwrap();
    for (args, told) in [
        (["--from-tar", app, "--name", "x"], "not a tar archive"),
        (["--from-tar", "/nowhere", "--name", "x"], "/nowhere"),
        (["--from-dir", app, "--name", "base"], "stock template"),
        (
            ["--image", "not an image", "--name", "x"],
            "not an image reference",
        ),
    ] {
        let done = test_home.call(&[&["template", "build"], &args[..]].concat());
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(done.stderr.contains(told), "{told}: {}", done.stderr);
    }
    assert!(!test_home.ok(&["template", "ls"]).contains("\nx "));
    for made in ["layers", "blobs"] {
        assert_eq!(
            fs::read_dir(test_home.dir.path().join(made))
                .unwrap()
                .count(),
            0,
            "{made}"
        );
    }
}
