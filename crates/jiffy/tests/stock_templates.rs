//! Tests for the intended use of the stock templates `base`, `node`, `browser` and `docker`, in
//! sandboxes created from their snapshots. A *stock template* is a template whose recipe Jiffy
//! contains.

use crate::support::devtools::{self, Page};
use crate::support::test_home::TestHome;
use crate::support::{engine, requirements, skip, wait_for};
use jiffy_test_attributes::jiffy_test;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;

fn test_home() -> TestHome {
    let test_home = TestHome::new();
    let domain = ["--domain", devtools::DOMAIN];
    test_home.ok(&[&["daemon", "start", "--no-listen"][..], &domain].concat());
    test_home
}

#[jiffy_test]
fn all_stock_templates_share_the_image_of_base() {
    for template in ["node", "browser", "docker", "code-interpreter-v1"] {
        if !requirements::home()
            .join("templates")
            .join(template)
            .exists()
        {
            return skip(&format!("template {template} is not built"));
        }
        let test_home = test_home();
        let images = |name: &str| {
            let shown = test_home.json(&["template", "inspect", name]);
            shown["images"].as_array().unwrap().clone()
        };
        let (base, own) = (images("base"), images(template));
        // The image of `base` and its own.
        assert_eq!(own.len(), 2, "{own:?}");
        assert_eq!(own[0]["sha256"], base[0]["sha256"]);
    }
}

#[jiffy_test(engine = "each")]
fn base_has_common_tools_that_work_for_the_user() {
    let test_home = test_home();
    let id = test_home.ok(&["create"]);
    let script = "set -e
        for tool in vi ssh scp ssh-keygen rsync unzip wget jq file ping less strace lsof; do
            command -v $tool >/dev/null || { echo \"$tool is missing\"; exit 1; }
        done
        test $(id -u) -ne 0
        ping -c 1 -W 5 127.0.0.1 >/dev/null
        echo '{\"a\": [1, 2]}' | jq -c .a
        file --brief --mime-type /bin/bash
        strace -o /tmp/calls true && grep -q execve /tmp/calls
        sleep 60 >/tmp/held & lsof -t /tmp/held | grep -qx $! && kill $!
        vi -es -c 'normal ihello' -c 'wq! /tmp/written' </dev/null; cat /tmp/written
        rsync -a /tmp/written /tmp/copied && cmp /tmp/written /tmp/copied
        ssh-keygen -q -t ed25519 -N '' -f /tmp/key && ssh-keygen -l -f /tmp/key | grep -q ED25519
        http_proxy=http://proxy:1 sudo printenv http_proxy";
    let output = test_home.sh(&id, script);
    let mime = "application/x-pie-executable";
    assert_eq!(output, format!("[1,2]\n{mime}\nhello\nhttp://proxy:1"));
    let script = r#"set -e
        case $PATH in /home/user/.local/bin:*) ;; *) echo "PATH is $PATH"; exit 1 ;; esac
        mkdir -p /tmp/built && cd /tmp/built
        printf '#include <stdio.h>\nint main(void) { puts("compiled"); }\n' >hello.c
        printf 'hello: hello.c\n\tgcc -o $@ $<\n' >Makefile
        make --silent && ./hello
        node -e 'console.log(6 * 7)'
        sqlite3 :memory: 'select 1 + 1'
        for tool in 'gzip' 'bzip2' 'xz'; do tar -c hello.c | $tool | $tool -d | tar -t; done
        zip -q hello.zip hello.c && unzip -p hello.zip | cmp - hello.c
        sed s/compiled/patched/ hello.c >new.c; diff -u hello.c new.c | patch -s hello.c && cmp hello.c new.c"#;
    let output = test_home.sh(&id, script);
    assert_eq!(output, "compiled\n42\n2\nhello.c\nhello.c\nhello.c");
}

#[jiffy_test(template = "node")]
fn node_runs_code_and_npm_installs_packages_for_the_user() {
    let test_home = test_home();
    let id = test_home.ok(&["create", "--template", "node"]);
    let code = "import('node:os').then(os => console.log(process.version.split('.')[0], 6 * 7, os.userInfo().username))";
    let output = test_home.ok(&["exec", &id, "--", "node", "-e", code]);
    assert_eq!(output, "v24 42 user");
    // A local package, because the registry is not tested here.
    let script = "mkdir -p /tmp/hello && cd /tmp/hello && npm init --yes >/dev/null && \
        printf '#!/usr/bin/env node\\nconsole.log(\"hello\")\\n' > hello.js && npm pkg set bin.hello=hello.js && \
        npm install --global --offline . >/dev/null && hello && npx --offline hello && npm --version";
    let output = test_home.sh(&id, script);
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[..2], ["hello", "hello"], "{output}");
    assert!(lines[2].starts_with("11."), "{output}");
    // Headers for packages with native code.
    test_home.sh(&id, "test -e /usr/local/include/node/node_api.h");
}

/// Builds an image of Python without a registry, and serves a page with it.
const CONTAINER: &str = r#"set -e
mkdir -p /tmp/image/root && cd /tmp/image
cp -L --parents /usr/bin/python3 $(ldd /usr/bin/python3 | grep -o '/[^ ]*') root
cp -r --parents /usr/lib/python3.11 root
cat >Dockerfile <<'END'
FROM scratch
COPY root /
WORKDIR /www
RUN ["/usr/bin/python3", "-c", "open('page', 'w').write('made by a build step')"]
CMD ["/usr/bin/python3", "-m", "http.server", "80"]
END
docker build -q -t served . >/dev/null
docker run -d --name served -p 8080:80 served >/dev/null
docker info --format '{{.Driver}}'"#;

#[jiffy_test(template = "docker")]
fn docker_builds_and_runs_images_whose_ports_are_reached() {
    let test_home = test_home();
    if engine::is_gvisor() {
        return skip("gVisor cannot save a bridge in use");
    }
    let id = test_home.ok(&["create", "--template", "docker"]);
    // The daemon is already running, and the user may access it.
    assert_eq!(test_home.sh(&id, CONTAINER), "overlay2");
    let page = |id: &str| {
        wait_for("the container's page", || {
            let (status, body) = devtools::get_at(&test_home, id, 8080, "/page");
            (status == 200).then_some(body)
        })
    };
    assert_eq!(page(&id), "made by a build step");
    let fork = test_home.ok(&["fork", &id]);
    assert_eq!(page(&fork), "made by a build step");
    // Containers of a fork are separate.
    test_home.sh(&fork, "docker rm --force served");
    assert_eq!(test_home.sh(&fork, "docker ps --all --quiet"), "");
    assert_eq!(page(&id), "made by a build step");
}

#[jiffy_test(template = "browser")]
fn a_page_is_loaded_read_and_drawn_through_the_gateway() {
    let test_home = test_home();
    let id = test_home.ok(&["create", "--template", "browser"]);
    let (status, version) = devtools::get(&test_home, &id, "/json/version");
    assert_eq!(status, 200);
    let url = version["webSocketDebuggerUrl"].as_str().unwrap();
    let expected = format!("ws://{}/devtools/browser/", devtools::host(&id));
    assert!(url.starts_with(&expected), "{version}");

    test_home.sh(
        &id,
        "mkdir /tmp/www && cd /tmp/www && echo '<title>from a server</title><body style=\"background: #0000ff\">' > index.html && \
         (setsid python3 -m http.server 8000 >/dev/null 2>&1 &) && \
         until curl -s http://127.0.0.1:8000/ >/dev/null; do sleep 0.05; done",
    );
    let mut page = Page::first(&test_home, &id);
    page.load("http://127.0.0.1:8000/");
    assert_eq!(page.evaluate("document.title"), "from a server");
    // The page itself loads the screenshot as an image, and reads a pixel.
    let shot = page.call("Page.captureScreenshot", &json!({ "format": "png" }));
    let picture = shot["data"].as_str().unwrap();
    assert!(
        picture.starts_with("iVBORw0KGgo"),
        "the screenshot is a PNG"
    );
    let pixel = format!(
        "fetch('data:image/png;base64,{picture}').then(a => a.blob()).then(createImageBitmap).then(image => {{ \
           const canvas = new OffscreenCanvas(image.width, image.height).getContext('2d'); canvas.drawImage(image, 0, 0); \
           return [image.width, ...canvas.getImageData(600, 600, 1, 1).data].join() }})"
    );
    let drawn = page.call(
        "Runtime.evaluate",
        &json!({ "expression": pixel, "awaitPromise": true }),
    );
    // Width of the image, and red, green, blue and alpha of a pixel.
    assert_eq!(drawn["result"]["value"], "1280,0,0,255,255", "{drawn}");
}

#[jiffy_test(template = "browser")]
fn sandboxes_of_one_snapshot_have_independent_browsers() {
    let test_home = test_home();
    let ids = [(); 2].map(|()| test_home.ok(&["create", "--template", "browser"]));
    let mut pages = [0, 1].map(|i| Page::first(&test_home, &ids[i]));
    pages[0].load("data:text/html,<title>first</title>");
    pages[1].load("data:text/html,<title>second</title>");
    let titles = pages
        .each_mut()
        .map(|page| page.evaluate("document.title").to_string());
    assert_eq!(titles, ["\"first\"", "\"second\""]);
    // The browsers are copies of one memory, but each draws its own two numbers.
    let draw = "crypto.getRandomValues(new Uint32Array(4)).join() + ' ' + Math.random()";
    let drawn: BTreeSet<String> = pages
        .iter_mut()
        .flat_map(|page| {
            page.evaluate(draw)
                .as_str()
                .unwrap()
                .split(' ')
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(drawn.len(), 4, "{drawn:?}");
    // A fork continues with the open page.
    let fork = test_home.ok(&["fork", &ids[0]]);
    let fork = fork.lines().next_back().unwrap();
    assert_eq!(
        Page::first(&test_home, fork).evaluate("document.title"),
        "first"
    );
}

#[jiffy_test(template = "browser")]
fn a_browser_trusts_the_authorities_of_its_sandbox_and_no_others() {
    let test_home = test_home();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let file = |name: &str, text: &str| {
        let path = test_home.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let authority = file("ca.pem", &params.self_signed(&key).unwrap().pem());
    let issuer = Issuer::new(params, key);
    let own = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let server = params.signed_by(&own, &issuer).unwrap().pem() + &own.serialize_pem();
    let server = file("server.pem", &server);
    let program = file(
        "server.py",
        "import http.server, ssl\n\
         server = http.server.ThreadingHTTPServer(('127.0.0.1', 8443), http.server.SimpleHTTPRequestHandler)\n\
         context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n\
         context.load_cert_chain('/tmp/server.pem')\n\
         server.socket = context.wrap_socket(server.socket, server_side=True)\n\
         server.serve_forever()\n",
    );
    // Both browsers ran in the template's snapshot, which contains no authority.
    let cases = [
        (&["--ca", &authority][..], "https: reached"),
        (&[], "chrome-error: "),
    ];
    for (more, shown) in cases {
        let id = test_home.ok(&[&["create", "--template", "browser"], more].concat());
        for path in [&server, &program] {
            test_home.ok(&["cp", path, &format!("{id}:/tmp/")]);
        }
        test_home.sh(
            &id,
            "mkdir /tmp/www && cd /tmp/www && echo '<title>reached</title>' > index.html && \
             (setsid python3 ../server.py >/dev/null 2>&1 &) && \
             until curl -sk https://localhost:8443/ >/dev/null; do sleep 0.05; done",
        );
        let mut page = Page::first(&test_home, &id);
        page.load("https://localhost:8443/");
        let page = page.evaluate("`${location.protocol} ${document.title}`");
        assert_eq!(page, shown);
        test_home.ok(&["kill", &id]);
    }
}

#[jiffy_test(template = "browser")]
fn pages_are_confined_and_cannot_reach_the_devtools() {
    let test_home = test_home();
    let id = test_home.ok(&["create", "--template", "browser"]);
    let confined = "pid=$(pgrep -f -- --type=renderer | head -n 1); grep Seccomp: /proc/$pid/status; \
        test \"$(readlink /proc/$pid/ns/user)\" != \"$(readlink /proc/1/ns/user 2>/dev/null || readlink /proc/self/ns/user)\" && echo apart; \
        stat -c %U /proc/$pid";
    let output = test_home.ok(&["exec", "--user", "root", &id, "--", "sh", "-c", confined]);
    assert_eq!(output, "Seccomp:\t2\napart\nuser");

    // A page with a rebound name, and a page that connects from its own origin.
    let status = "curl -s -o /dev/null -w %{http_code} http://127.0.0.1:9222/json/version";
    assert_eq!(test_home.sh(&id, status), "200");
    let foreign = format!("{status} -H 'Host: evil.test:9222'");
    assert_eq!(test_home.sh(&id, &foreign), "403");
    let (_, pages) = devtools::get(&test_home, &id, "/json/list");
    let path = format!("/devtools/page/{}", pages[0]["id"].as_str().unwrap());
    let (_, answer) = devtools::upgrade(&test_home, &id, &path, "\r\nOrigin: http://evil.test");
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
}

#[jiffy_test(template = "browser")]
fn a_closed_browser_is_restarted() {
    let test_home = test_home();
    let id = test_home.ok(&["create", "--template", "browser"]);
    let before = devtools::get(&test_home, &id, "/json/version").1;
    Page::first(&test_home, &id).call("Browser.close", &json!({}));
    let after = wait_for("another browser", || {
        let (status, version) = devtools::get(&test_home, &id, "/json/version");
        let another = version["webSocketDebuggerUrl"] != before["webSocketDebuggerUrl"];
        (status == 200 && another).then_some(version)
    });
    assert_eq!(after["Browser"], before["Browser"]);
    assert_eq!(Page::first(&test_home, &id).evaluate("1 + 1"), 2);
}
