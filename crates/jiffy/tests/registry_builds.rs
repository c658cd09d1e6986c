//! Tests for templates built from Dockerfiles that download packages or images.

use crate::support::build_project::{BuildProject, cached};
use crate::support::{skip, wait_for};
use jiffy_test_attributes::jiffy_test;
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Certificate authorities of this host. Its internet access may require a custom authority.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Returns whether sandboxes reach the registries of pip and npm. If not, reports the test as
/// skipped.
fn registries(project: &BuildProject) -> bool {
    let id = project.test_home.ok(&["create", "--template", "node"]);
    let authorities = fs::read_to_string(AUTHORITIES).unwrap_or_default();
    project.file("authorities.pem", &authorities);
    let file = project.context.join("authorities.pem");
    let to = format!("{id}:/tmp/authorities.pem");
    project.test_home.ok(&["cp", file.to_str().unwrap(), &to]);
    let ask = "export NODE_EXTRA_CA_CERTS=/tmp/authorities.pem PIP_CERT=/tmp/authorities.pem; cd /tmp && \
        timeout 30 pip download --quiet --retries 0 --no-deps six==1.17.0 && timeout 30 npm view is-odd@3.0.1 version";
    let request = project
        .test_home
        .call(&["exec", &id, "--", "sh", "-c", ask]);
    project.test_home.ok(&["kill", &id]);
    if request.code != Some(0) {
        let last = request.stderr.lines().last().unwrap_or_default().to_owned();
        skip(&format!("no package registry answers: {last}"));
    }
    request.code == Some(0)
}

#[jiffy_test(root)]
fn stages_with_pip_and_npm_are_built_and_rebuilt_from_the_cache() {
    let project = BuildProject::new();
    let real = std::env::var_os("JIFFY_HOME").unwrap_or_else(|| "/var/lib/jiffy".into());
    let node = Path::new(&real).join("templates/node");
    if !node.exists() {
        return skip("template node is not built");
    }
    symlink(node, project.test_home.dir.path().join("templates/node")).unwrap();
    if !registries(&project) {
        return;
    }
    project.file(
        "Dockerfile",
        "FROM node AS page\n\
         USER root\n\
         COPY authorities.pem /etc/ssl/certs/ca-certificates.crt\n\
         ENV NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt\n\
         WORKDIR /src\n\
         RUN npm init --yes && npm install --no-audit --no-fund is-odd@3.0.1\n\
         RUN node -p \"require('is-odd')(3)\" > answer\n\
         FROM base\n\
         USER root\n\
         COPY authorities.pem /etc/ssl/certs/ca-certificates.crt\n\
         RUN pip install --no-cache-dir six==1.17.0\n\
         COPY --from=page /src/answer /srv/answer\n\
         USER user\n",
    );
    let first = project.built("app", &[]);
    assert_eq!(cached(&first), 0, "{first:?}");
    let script = "cat /srv/answer; python3 -c 'import six; print(six.__version__)'";
    assert_eq!(project.run("app", script), "true\n1.17.0");

    let began = Instant::now();
    let second = project.built("app", &[]);
    let took = began.elapsed();
    // Each `COPY`, `WORKDIR` and `RUN` is a step.
    assert_eq!(cached(&second), 7, "{second:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// Prints the file `/word` and its command line arguments.
const PROGRAM: &str = r#"
#include <stdio.h>
int main(int argc, char **argv) {
    char word[64] = "";
    FILE *file = fopen("/word", "r");
    if (file) fgets(word, sizeof word, file);
    printf("%s", word);
    for (int i = 1; i < argc; i++) printf(" %s", argv[i]);
    puts("");
}
"#;

fn sum(path: &Path) -> String {
    let said = Command::new("sha256sum").arg(path).output().unwrap();
    String::from_utf8(said.stdout).unwrap()[..64].to_owned()
}

/// Starts a registry on the loopback device with one image, `app:1`, of a program and a file.
/// Returns its address.
fn registry(directory: &Path) -> String {
    fs::create_dir_all(directory.join("root")).unwrap();
    let path = |name: &str| directory.join(name);
    fs::write(path("app.c"), PROGRAM).unwrap();
    let mut compile = Command::new("cc");
    compile.arg("-static").arg("-o").arg(path("root/app"));
    assert!(compile.arg(path("app.c")).status().unwrap().success());
    fs::write(path("root/word"), "from a registry").unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "-C"]).arg(path("root"));
    tar.arg("-cf").arg(path("layer")).arg(".");
    assert!(tar.status().unwrap().success());
    let config = serde_json::json!({
        "os": "linux", "architecture": "amd64", "config": { "Cmd": ["/app"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", sum(&path("layer")))] },
    });
    fs::write(path("config"), config.to_string()).unwrap();
    let described = |name: &str, kind: &str| {
        serde_json::json!({ "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{}", sum(&path(name))), "size": fs::metadata(path(name)).unwrap().len() })
    };
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": kind,
        "config": described("config", "config.v1+json"), "layers": [described("layer", "layer.v1.tar")],
    });
    fs::write(path("manifest"), manifest.to_string()).unwrap();
    let mut pages = HashMap::from([("/v2/".to_owned(), (kind, b"{}".to_vec()))]);
    let manifest = fs::read(path("manifest")).unwrap();
    for tag in ["1", &format!("sha256:{}", sum(&path("manifest")))] {
        pages.insert(format!("/v2/app/manifests/{tag}"), (kind, manifest.clone()));
    }
    for name in ["config", "layer"] {
        let at = format!("/v2/app/blobs/sha256:{}", sum(&path(name)));
        let content = fs::read(path(name)).unwrap();
        pages.insert(at, ("application/octet-stream", content));
    }
    serve(pages)
}

/// Pages and their types, by path.
type Pages = HashMap<String, (&'static str, Vec<u8>)>;

/// Serves the pages on the loopback device until the test program exits. Returns the address.
fn serve(pages: Pages) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("localhost:{}", listener.local_addr().unwrap().port());
    let pages = Arc::new(pages);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let pages = Arc::clone(&pages);
            std::thread::spawn(move || answer(&stream, &pages));
        }
    });
    address
}

/// Answers one request.
fn answer(mut stream: &TcpStream, pages: &Pages) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    let mut words = first.split(' ');
    let (method, path) = (words.next(), words.next().unwrap_or_default());
    let (status, kind, body) = match pages.get(path) {
        Some((kind, body)) => ("200 OK", *kind, &body[..]),
        None => ("404 Not Found", "text/plain", &b""[..]),
    };
    let length = body.len();
    let body = if method == Some("HEAD") { b"" } else { body };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    // Ignore a disconnected client.
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(body);
}

#[jiffy_test(root)]
fn a_dockerfile_is_based_on_a_registry_image_and_copies_from_it() {
    let project = BuildProject::new();
    let at = registry(&project.test_home.dir.path().join("registry"));
    let plain = ["daemon", "start", "--no-listen", "--plain-http", &at];
    project.test_home.ok(&plain);
    // The image has no shell: copying requires none.
    project.file("more", "more");
    project.file("Dockerfile", &format!("FROM {at}/app:1\nCOPY more /more\n"));
    project.built("thin", &[]);
    let said = project
        .test_home
        .ok(&["run", "--template", "thin", "--", "/app", "and", "more"]);
    assert_eq!(said, "from a registry and more");

    let taken = format!(
        "FROM base\nUSER root\nCOPY --from={at}/app:1 /app /usr/local/bin/app\nRUN app in a step > /said\nUSER user\n"
    );
    project.file("Dockerfile", &taken);
    project.built("thick", &[]);
    assert_eq!(project.run("thick", "cat /said"), " in a step");
    // The steps are `COPY` and `RUN`.
    assert_eq!(cached(&project.built("thick", &[])), 2);

    project.file("Dockerfile", &format!("FROM {at}/nothing:1\n"));
    let refused = project.build("none", &[]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("nothing"), "{refused:?}");
}

#[jiffy_test(root)]
fn an_image_on_demand_is_imported_once_and_removed_when_unused() {
    let project = BuildProject::new();
    let test_home = &project.test_home;
    let at = registry(&test_home.dir.path().join("registry"));
    let pool = ["--warm-pool", "0"];
    let plain = ["daemon", "start", "--no-listen", "--plain-http", &at];
    test_home.ok(&[&plain[..], &pool].concat());
    let image = format!("{at}/app:1");
    let create = [
        "create", "--image", &image, "--cpu", "1", "--memory", "256Mi",
    ];
    let created = test_home.json(&[&create[..], &["--persist"]].concat());
    let template = created["template"].as_str().unwrap().to_owned();
    assert!(template.starts_with("img-app-1-"), "{template}");
    let said = test_home.ok(&[
        "exec",
        created["id"].as_str().unwrap(),
        "--",
        "/app",
        "and",
        "more",
    ]);
    assert_eq!(said, "from a registry and more");
    let version = || {
        let all = test_home.json(&["template", "ls"]);
        let all = all.as_array().unwrap().iter();
        let mut own = all.filter(|t| t["name"] == template.as_str());
        own.next().map(|t| t["version"].clone())
    };
    let first = version().unwrap();
    assert_eq!(test_home.json(&create)["template"], template.as_str());
    assert_eq!(version().as_ref(), Some(&first));
    // `jiffy run` uses the imported template as well, in a temporary sandbox of the daemon.
    let run = ["run", "--image", &image, "--memory", "256Mi", "--"];
    let done = test_home.call(&[&run[..], &["/app", "in", "a", "run"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(done.stdout, "from a registry in a run\n");
    assert_eq!(version(), Some(first));
    let found = test_home.call(&[&run[..], &["/nothing"]].concat());
    // 127 = the image has no such program.
    assert_eq!(found.code, Some(127), "{found:?}");
    // The two sandboxes of `jiffy create` remain.
    wait_for("the sandboxes of runs to be removed", || {
        let remaining = test_home.json(&["ls"]);
        (remaining.as_array().unwrap().len() == 2).then_some(())
    });
    // Only a daemon imports images.
    let unable = test_home.call(&["run", "--no-daemon", "--image", &image, "--", "/app"]);
    assert_eq!(unable.code, Some(2), "{unable:?}");
    let missing = format!("{at}/nothing:1");
    let refused = test_home.call(&["run", "--image", &missing, "--", "/app"]);
    assert_eq!(refused.code, Some(125), "{refused:?}");
    assert!(
        refused.stderr.contains("cannot import image"),
        "{refused:?}"
    );
    let refused = test_home.call(&["create", "--image", &missing]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(
        refused.stderr.contains("cannot import image"),
        "{refused:?}"
    );

    let report = test_home.ok(&["prune", "--dry-run", "--older-than", "0s"]);
    let has = |text: &str| {
        let line = |line: &str| line.starts_with("template") && line.contains(&template);
        text.lines().any(line)
    };
    assert!(!has(&report), "sandboxes are of it: {report}");
    test_home.ok(&["rm", "--all", "--yes"]);
    let removed = test_home.ok(&["prune", "--yes", "--older-than", "0s"]);
    assert!(has(&removed), "{removed}");
    assert_eq!(version(), None);
}
