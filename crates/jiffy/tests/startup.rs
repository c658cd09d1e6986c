//! Tests for templates with a start command: it runs in every sandbox, and a template that does not
//! become ready is rejected with a message.
//!
//! The *working set* of a snapshot consists of the pages that a restored guest touches first. They
//! are recorded once, and read in advance at later starts.
//!
//! The *first use* is the request or command with which most uses of a template's sandboxes start.

use crate::support::page_faults;
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

/// Timeout for the copy of the pages of the first use.
const COPY_LIMIT: Duration = Duration::from_secs(20);
/// Interval without a further start after which the start of a guest counts as isolated.
const START_PAUSE: Duration = Duration::from_millis(100);

/// Creates a template from `base` with a start command.
fn derived(test_home: &TestHome, startup: &Value) -> &'static str {
    let shared = test_home.dir.path().join("templates");
    let real = fs::read_link(&shared).unwrap();
    fs::remove_file(&shared).unwrap();
    let derived = shared.join("derived");
    fs::create_dir_all(&derived).unwrap();
    symlink(real.join("base"), shared.join("base")).unwrap();
    for entry in fs::read_dir(real.join("base")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "template.json" {
            symlink(entry.path(), derived.join(entry.file_name())).unwrap();
        }
    }
    let text = fs::read(real.join("base/template.json")).unwrap();
    let mut manifest: Value = serde_json::from_slice(&text).unwrap();
    manifest["name"] = json!("derived");
    for (key, value) in startup.as_object().unwrap() {
        manifest[key] = value.clone();
    }
    fs::write(derived.join("template.json"), manifest.to_string()).unwrap();
    "derived"
}

#[jiffy_test]
fn start_commands_run_in_every_sandbox_of_a_template() {
    let test_home = TestHome::new();
    let serve = "echo start >>/tmp/started; sleep 0.3; cd /usr/share; exec python3 -m http.server 8000 --bind 127.0.0.1";
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": serve, "user": "root", "workdir": "/" },
            "ready": { "port": 8000, "path": "/", "timeout_s": 60 },
        }),
    );
    // The server answers, and its start command ran exactly once, as root.
    let look = "curl -sf http://127.0.0.1:8000/ | grep -c python3; wc -l </tmp/started; stat -c %U /tmp/started";
    let one = test_home.ok(&["create", "--template", template]);
    assert_eq!(test_home.sh(&one, look), "1\n1\nroot");
    let two = test_home.ok(&["create", "--template", template]);
    assert_eq!(test_home.sh(&two, look), "1\n1\nroot");
    let run = test_home.ok(&["run", "--template", template, "--", "sh", "-c", look]);
    assert_eq!(run, "1\n1\nroot");
}

#[jiffy_test]
fn a_template_that_never_becomes_ready_is_rejected_with_its_last_output() {
    let test_home = TestHome::new();
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": "echo warming up; echo no coffee >&2; sleep 1000" },
            "ready": { "port": 8000, "timeout_s": 2 },
        }),
    );
    for args in [
        &["create", "--template", template][..],
        &["run", "--template", template, "--", "true"],
    ] {
        let done = test_home.call(args);
        assert_ne!(done.code, Some(0), "{done:?}");
        for word in ["derived", "not ready after 2 s", "8000", "no coffee"] {
            assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
        }
    }
    assert_eq!(test_home.ok(&["ls", "--json"]), "[]");
    assert_eq!(test_home.ok(&["snapshots", "--json"]), "[]");
}

#[jiffy_test]
fn a_failing_start_command_is_reported_at_once() {
    let test_home = TestHome::new();
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": "echo cannot find my config; exit 7" },
            "ready": { "command": "test -e /never", "timeout_s": 3000 },
        }),
    );
    let done = test_home.call(&["create", "--template", template]);
    assert_ne!(done.code, Some(0), "{done:?}");
    for word in ["exit status 7", "cannot find my config"] {
        assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
    }
}

/// Allocates 16 MiB of memory before it is ready, and writes to all of it on request.
const LARGE_SERVER: &str = r#"exec python3 -c '
import http.server
memory = bytearray(b"x" * (16 << 20))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        memory[::4096] = b"y" * (len(memory) // 4096)
        open("/tmp/used", "a").write("used\n")
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()'"#;

#[jiffy_test]
fn pages_of_the_first_use_are_writable_at_once_without_having_been_used() {
    let test_home = TestHome::new();
    let template = derived(
        &test_home,
        &json!({
            "start": { "command": LARGE_SERVER },
            "ready": { "port": 8000, "timeout_s": 60 },
            "first_use": { "port": 8000, "path": "/use", "body": "{}" },
        }),
    );
    // The second sandbox is restored like the first, which created the snapshot.
    let first = test_home.ok(&["create", "--template", template]);
    test_home.ok(&["rm", &first]);
    std::thread::sleep(START_PAUSE);
    let id = test_home.ok(&["create", "--template", template]);
    // The first use left no trace in the sandbox: its request would have created `/tmp/used`.
    assert_eq!(test_home.sh(&id, "ls /tmp"), "");
    let vmms = test_home.vmms();
    let vmm = *vmms.first().unwrap();
    // The pages are copied concurrently with the start.
    let limit = Instant::now() + COPY_LIMIT;
    while page_faults(vmm) < 4096 {
        assert!(Instant::now() < limit, "{} page faults", page_faults(vmm));
        std::thread::sleep(Duration::from_millis(10));
    }
    let before = page_faults(vmm);
    test_home.sh(&id, "curl -sf -d {} http://127.0.0.1:8000/use");
    // Without a recorded working set, each of its 4,096 pages would cause a fault.
    let faults = page_faults(vmm) - before;
    assert!(faults < 3000, "{faults} page faults");
    assert_eq!(test_home.sh(&id, "cat /tmp/used"), "used");
}
