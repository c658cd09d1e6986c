//! Tests for deployments from source: an example of each language, built in a sandbox of
//! `functions-builder`.

use crate::support::remote::Remote;
use jiffy_test_attributes::jiffy_test;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

/// Language, and for the function that `jiffy function new` creates: body of a request, and answer.
const LANGUAGES: [(&str, &str, &str); 5] = [
    ("c", "123456789", "cbf43926"),
    (
        "go",
        "abc",
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    ),
    (
        "rust",
        "one two\nthrée\n",
        r#"{"lines":2,"words":3,"characters":14}"#,
    ),
    ("js", r#"{"b":1,"a":[]}"#, "{\n  \"a\": [],\n  \"b\": 1\n}"),
    (
        "python",
        "name,note\nAda,\"a, b\"\n",
        r#"[{"name": "Ada", "note": "a, b"}]"#,
    ),
];

/// Creates a new function whose build requires no network.
fn new_function(remote: &Remote, within: &Path, language: &str) -> String {
    let name = format!("in-{language}");
    let mut new = remote.command(&["function", "new", "--lang", language, &name]);
    let done = crate::support::finish(new.current_dir(within).spawn().unwrap());
    assert_eq!(done.code, Some(0), "{done:?}");
    let directory = within.join(&name);
    if language == "rust" {
        fs::create_dir(directory.join(".cargo")).unwrap();
        fs::write(directory.join(".cargo/config.toml"), "net.offline = true\n").unwrap();
    }
    name
}

/// All languages use one daemon, because the template's first sandbox takes longer than the others.
#[jiffy_test(template = "functions-builder")]
fn functions_are_deployed_from_source() {
    let remote = Remote::new(&[]);
    let work = tempfile::tempdir().unwrap();
    failing_builds(&remote, work.path());
    each_language_is_deployed(&remote, work.path());
    assert_eq!(remote.json(&["ls"]), serde_json::json!([]));
}

fn each_language_is_deployed(remote: &Remote, work: &Path) {
    for (language, body, answer) in LANGUAGES {
        let name = new_function(remote, work, language);
        let directory = work.join(&name);
        let start = Instant::now();
        let deploy = ["function", "deploy", &name, directory.to_str().unwrap()];
        remote.ok(&[&deploy[..], &["--cpu-ms", "5000", "--memory", "256MiB"]].concat());
        println!("{language}: deployed within {:?}", start.elapsed());
        let output = remote.ok(&["function", "invoke", &name, "-d", body]);
        assert_eq!(output, answer, "{language}");
        assert!(!directory.join("function.wasm").exists());
    }
}

/// Tests that failing builds report the compiler's output, and change no local file.
fn failing_builds(remote: &Remote, work: &Path) {
    let name = new_function(remote, work, "c");
    let directory = work.join(&name);
    let build = ["function", "build", directory.to_str().unwrap()];
    remote.ok(&build);
    let module = fs::read(directory.join("function.wasm")).unwrap();
    assert!(module.starts_with(b"\0asm"));

    fs::write(
        directory.join("handler.c"),
        "int handle(void) { return undeclared; }\n",
    )
    .unwrap();
    let failed = remote.call(&build);
    assert!(
        failed.code == Some(1)
            && failed.stderr.contains("undeclared identifier")
            && failed.stderr.contains("the build failed"),
        "{failed:?}"
    );
    // The previous module remains.
    assert_eq!(fs::read(directory.join("function.wasm")).unwrap(), module);

    let program = directory.join("build");
    fs::write(&program, "#!/bin/sh\ntrue\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let failed = remote.call(&build);
    assert!(
        failed.code == Some(1) && failed.stderr.contains("did not create a function.wasm"),
        "{failed:?}"
    );
    fs::remove_dir_all(directory).unwrap();
}
