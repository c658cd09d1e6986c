//! Tests that a hostile registry affects only builds of its user, and reaches no resources of the
//! host.
//!
//! A *slot* is a network namespace with its devices and rules.
//!
//! The *puller* is the confined process that downloads images from registries.

use super::registry::{Image, Request, Seen, page, send, serve, serve_tls};
use super::two_keys::TwoKeys;
use crate::support::lab::{Lab, with_lab};
use crate::support::network_probe::assert_clean;
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_proto::vm::jail::FIRST_UID;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout of a build that must fail as soon as its registry answers or does not answer.
const FAILURE_LIMIT: Duration = Duration::from_secs(60);

/// Runs `work` with a daemon in a lab.
fn tenants(options: &[&str], work: impl FnOnce(&TwoKeys, &Lab) + Send) {
    with_lab(|lab| {
        let networked = [&["--network", "on", "--warm-pool", "0"], options].concat();
        let keys = TwoKeys::new(&networked);
        keys.remote.test_home.own_templates();
        work(&keys, lab);
        // Remove the network also if a test has killed the daemon: the next daemon removes it.
        keys.remote
            .test_home
            .ok(&["daemon", "start", "--no-listen"]);
        keys.remote
            .test_home
            .ok(&["daemon", "stop", "--kill-sandboxes"]);
        drop(keys);
        assert_clean();
    });
}

/// Running build.
struct Build<'a> {
    keys: &'a TwoKeys,
    key: &'a str,
    path: String,
}

impl<'a> Build<'a> {
    /// Starts a build of an image, optionally with a user and a password.
    fn of(keys: &'a TwoKeys, key: &'a str, image: &str, user: Option<(&str, &str)>) -> Self {
        static BUILDS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("pulled-{}", BUILDS.fetch_add(1, Relaxed));
        let (status, asked) = keys.http(key, "POST", "/v3/templates", &json!({ "name": name }));
        assert_eq!(status, 202, "{asked}");
        let id = |field: &str| asked[field].as_str().unwrap().to_owned();
        let (template, build) = (id("templateID"), id("buildID"));
        let mut body = json!({ "fromImage": image, "steps": [] });
        if let Some((name, password)) = user {
            body["fromImageRegistry"] =
                json!({ "type": "registry", "username": name, "password": password });
        }
        let path = format!("/v2/templates/{template}/builds/{build}");
        let (status, answer) = keys.http(key, "POST", &path, &body);
        assert_eq!(status, 202, "{answer}");
        let path = format!("/templates/{template}/builds/{build}");
        Self { keys, key, path }
    }

    /// Waits for the end. Returns `ready`, or the reason of the failure.
    fn end(&self) -> String {
        wait_for("the end of a build", || {
            let path = format!("{}/status", self.path);
            let (status, report) = self.keys.http(self.key, "GET", &path, &Value::Null);
            assert_eq!(status, 200, "{report}");
            match report["status"].as_str().unwrap() {
                "ready" => Some("ready".to_owned()),
                "error" => Some(report["reason"]["message"].as_str().unwrap().to_owned()),
                _ => None,
            }
        })
    }

    fn cancel(&self) {
        let path = format!("{}/cancel", self.path);
        let (status, answer) = self.keys.http(self.key, "POST", &path, &Value::Null);
        assert!((200..300).contains(&status), "{answer}");
    }
}

/// Returns the pullers of a daemon.
fn pullers(daemon: u32) -> Vec<PathBuf> {
    let ours = |process: &Path| {
        let command = fs::read(process.join("cmdline")).ok()?;
        let status = fs::read_to_string(process.join("status")).ok()?;
        let parent = status.contains(&format!("PPid:\t{daemon}\n"));
        (parent && command.starts_with(b"jiffy\0--as-puller\0")).then(|| process.to_owned())
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|p| ours(&p.path())).collect()
}

/// Returns a field of a process's status.
fn status(process: &Path, name: &str) -> String {
    let text = fs::read_to_string(process.join("status")).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    let line = line.unwrap().trim_start_matches(':');
    line.split_whitespace().next().unwrap().to_owned()
}

/// Starts a listener at a port on all addresses of the lab's internet.
fn listen_in_internet(
    lab: &Lab,
    port: u16,
    answer: impl Fn(&Request, &mut dyn Write) + Send + Sync + 'static,
) -> Seen {
    lab.in_internet(move || serve(TcpListener::bind(("0.0.0.0", port)).unwrap(), answer))
}

#[jiffy_test(lab)]
fn a_registry_of_a_key_reaches_the_public_internet_and_nothing_else() {
    // Without TLS, so that only the network rules protect the targets.
    // The first address belongs to the lab's internet; the others must be unreachable.
    let trap = [
        "9.9.9.9",
        "10.9.9.9",
        "169.254.169.254",
        "127.0.0.1",
        "11.0.0.2",
        "168.63.129.16",
    ];
    let mut options = vec!["--registry-allow".to_owned(), "localhost:5002".to_owned()];
    let plain = trap.iter().map(|address| format!("{address}:5001"));
    let plain =
        plain.chain(["8.8.8.8:5000", "localhost:5002", "127.0.0.1:5002"].map(str::to_owned));
    options.extend(plain.flat_map(|host| ["--plain-http".to_owned(), host]));
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    tenants(&options, |keys, lab| {
        let own = |request: &Request, stream: &mut dyn Write| {
            // The path has the form `/v2/<kind>-<address>/...`.
            let name = request.path.split('/').nth(2).unwrap_or_default();
            let (kind, address) = name.split_once('-').unwrap_or_default();
            let there = format!("http://{address}:5001/there");
            let header = match kind {
                "redirect" => format!("Location: {there}\r\n"),
                "realm" => format!("WWW-Authenticate: Bearer realm=\"{there}\"\r\n"),
                _ => String::new(),
            };
            let status = match kind {
                "redirect" => "307 Temporary Redirect",
                _ => "401 Unauthorized",
            };
            send(stream, status, &header, b"");
        };
        listen_in_internet(lab, 5000, own);
        let nothing = |_: &Request, stream: &mut dyn Write| send(stream, "404 Not Found", "", b"");
        let outside = listen_in_internet(lab, 5001, nothing);
        let inside = serve(TcpListener::bind("0.0.0.0:5001").unwrap(), nothing);
        let allowed = serve(TcpListener::bind("127.0.0.1:5002").unwrap(), nothing);
        let build = |image: &str| {
            let began = Instant::now();
            let end = Build::of(keys, &keys.mallory, image, None).end();
            assert!(
                began.elapsed() < FAILURE_LIMIT,
                "{image}: {:?}",
                began.elapsed()
            );
            end
        };
        let unreachable = "could not be reached, or does not speak the protocol over TLS";
        for kind in ["redirect", "realm"] {
            // The redirect does work for the public internet.
            build(&format!("8.8.8.8:5000/{kind}-9.9.9.9:1"));
            let seen = std::mem::take(&mut *outside.lock().unwrap());
            assert!(
                seen.iter().any(|s| s.contains("/there")),
                "{kind}: {seen:?}"
            );
            for address in &trap[1..] {
                let end = build(&format!("8.8.8.8:5000/{kind}-{address}:1"));
                assert!(end.contains(unreachable), "{kind} to {address}: {end}");
            }
        }
        // Registries whose names are targets themselves: open ports, closed ports, and ports with
        // another protocol, in the internet, on the host and elsewhere.
        let mut report = Vec::new();
        let hosts = trap[1..].iter().map(|address| format!("{address}:5001"));
        let others = [
            "9.9.9.9:81",
            "9.9.9.9:80",
            "127.0.0.1:80",
            "127.0.0.1:81",
            "11.0.0.2:80",
        ];
        let others =
            others
                .into_iter()
                .chain(["169.254.169.254:80", "trap.example", "127.0.0.1:5002"]);
        for host in hosts.chain(others.map(str::to_owned)) {
            report.push(build(&format!("{host}/x:1")).replace(&host, "HOST"));
        }
        report.sort_unstable();
        report.dedup();
        assert_eq!(report, [format!("HOST {unreachable}")]);
        assert_eq!(*outside.lock().unwrap(), Vec::<String>::new());
        assert_eq!(*inside.lock().unwrap(), Vec::<String>::new());
        // The registry that the operator allows is reached by its exact name.
        assert_eq!(*allowed.lock().unwrap(), Vec::<String>::new());
        let end = build("localhost:5002/x:1");
        assert!(
            end.contains("image localhost:5002/x:1 does not exist"),
            "{end}"
        );
    });
}

#[jiffy_test(lab)]
fn a_hostile_registry_delays_and_costs_its_callers_build_only() {
    let options = [5000, 5001].map(|port| ["--plain-http".to_owned(), format!("9.9.9.9:{port}")]);
    let options: Vec<&str> = options.iter().flatten().map(String::as_str).collect();
    tenants(&options, |keys, lab| {
        let daemon = keys.remote.test_home.daemon();
        let private = Image::of_file("secret", &b"of alice".repeat(1000));
        let pages = private.pages("app");
        let alices = move |request: &Request, stream: &mut dyn Write| {
            // The header contains `alice:secret` in base64.
            if request.head.contains("Basic YWxpY2U6c2VjcmV0") {
                page(&pages, request, stream)
            } else {
                send(
                    stream,
                    "401 Unauthorized",
                    "WWW-Authenticate: Basic realm=\"a\"\r\n",
                    b"",
                )
            }
        };
        listen_in_internet(lab, 5000, alices);
        let hostile = listen_in_internet(lab, 5001, mallory_registry(&private));

        // This registry sends one byte per second.
        let slow = Build::of(keys, &keys.mallory, "9.9.9.9:5001/slow:1", None);
        wait_for("the download", || {
            let seen = hostile.lock().unwrap();
            seen.iter()
                .any(|s| s.contains("/slow/blobs/") && s.contains("0000"))
                .then_some(())
        });
        let puller = pullers(daemon);
        assert_eq!(puller.len(), 1, "{puller:?}");
        confined(&puller[0]);
        // A build of alice completes while the slow build continues.
        let began = Instant::now();
        let alice = Build::of(
            keys,
            &keys.alice,
            "9.9.9.9:5000/app:1",
            Some(("alice", "secret")),
        );
        assert_eq!(alice.end(), "ready");
        assert!(began.elapsed() < FAILURE_LIMIT, "{:?}", began.elapsed());
        assert_eq!(pullers(daemon), puller, "the slow build continues");
        slow.cancel();
        let cancelled = Instant::now();
        wait_for("the puller to exit", || {
            pullers(daemon).is_empty().then_some(())
        });
        assert!(
            cancelled.elapsed() < Duration::from_secs(2),
            "{:?}",
            cancelled.elapsed()
        );
        assert!(slow.end().contains("cancelled"));

        // The manifest has 600 MiB. "5" resets the daemon's maximum of resident memory (`VmHWM`).
        fs::write(format!("/proc/{daemon}/clear_refs"), "5").unwrap();
        let before = memory(daemon, "VmRSS");
        let huge = Build::of(keys, &keys.mallory, "9.9.9.9:5001/huge:1", None);
        let end = huge.end();
        assert!(end.contains("is longer than"), "{end}");
        let most = memory(daemon, "VmHWM");
        assert!(most < before + 16 * 1024, "{before} KiB, then {most} KiB");

        // Layers that mallory's registry names but does not have.
        for name in ["named", "lying"] {
            let end = Build::of(keys, &keys.mallory, &format!("9.9.9.9:5001/{name}:1"), None).end();
            let report = ["does not exist", "sha256"];
            assert!(report.iter().any(|t| end.contains(t)), "{name}: {end}");
        }
        // The image is not accessible without alice's password.
        let end = Build::of(keys, &keys.mallory, "9.9.9.9:5000/app:1", None).end();
        assert!(end.contains("denies access to"), "{end}");

        // A killed daemon leaves no puller, and the next daemon removes its slot.
        let remaining = Build::of(keys, &keys.mallory, "9.9.9.9:5001/slow:1", None);
        wait_for("the next puller", || {
            (!pullers(daemon).is_empty()).then_some(())
        });
        drop(remaining);
        let puller = pullers(daemon).remove(0);
        keys.remote.test_home.kill_daemon();
        wait_for("the puller to exit", || (!puller.exists()).then_some(()));
    });
}

/// Registry of mallory: a slow layer, a manifest of 600 MiB, and images that name the layer of
/// `private`.
fn mallory_registry(private: &Image) -> impl Fn(&Request, &mut dyn Write) + Send + Sync + 'static {
    let layer = super::registry::sha256(&private.layer);
    let slow = Image::naming(vec![0; 1 << 20], &"0".repeat(64), &"0".repeat(64));
    // The layer's own digest without its bytes, and other bytes with a false diff id.
    let named = Image::naming(private.layer.clone(), &layer, &layer);
    let other = Image::of_file("other", b"of mallory");
    let lying = Image::naming(
        other.layer.clone(),
        &super::registry::sha256(&other.layer),
        &layer,
    );
    let mut pages = slow.documents("slow");
    pages.extend(named.documents("named"));
    pages.extend(lying.documents("lying"));
    pages.insert(lying.layer_path("lying"), lying.layer.clone());
    move |request, stream| {
        if request.method == "HEAD" {
            // The registry claims to have every blob.
            let length = private_length(&request.path, &named);
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
            let _ = stream.write_all(head.as_bytes());
            return;
        }
        if request.path.contains("/slow/blobs/sha256:0000") {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n");
            while stream.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_secs(1));
            }
            return;
        }
        if request.path.contains("/huge/") {
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{{\"a\":\"",
                600 << 20
            );
            let mut sent = stream.write_all(head.as_bytes());
            let chunk = vec![b'x'; 1 << 20];
            for _ in 0..600 {
                sent = sent.and_then(|()| stream.write_all(&chunk));
            }
            return;
        }
        page(&pages, request, stream);
    }
}

/// Returns the length that the hostile registry claims for a blob: the real length of the private
/// layer, and 0 for other blobs.
fn private_length(path: &str, named: &Image) -> usize {
    if path == named.layer_path("named") {
        named.layer.len()
    } else {
        0
    }
}

/// Asserts that a puller has no rights, files, network or environment of the host.
fn confined(puller: &Path) {
    let uid: u32 = status(puller, "Uid").parse().unwrap();
    let pid: u32 = puller
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(uid, FIRST_UID + pid);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(puller, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(puller, "NoNewPrivs"), "1");
    assert_eq!(status(puller, "Seccomp"), "2");
    assert_eq!(status(puller, "Threads"), "1");
    for namespace in ["net", "mnt", "ipc", "uts", "cgroup"] {
        let of = |process: &Path| {
            fs::metadata(process.join("ns").join(namespace))
                .unwrap()
                .ino()
        };
        assert_ne!(
            of(puller),
            of(Path::new("/proc/thread-self")),
            "{namespace}"
        );
    }
    assert_eq!(
        fs::read_dir(puller.join("root")).unwrap().count(),
        0,
        "its root is empty"
    );
    let devices = fs::read_to_string(puller.join("net/dev")).unwrap();
    // Two lines of headings, and the loopback device.
    assert_eq!(devices.lines().count(), 3, "{devices}");
    for descriptor in fs::read_dir(puller.join("fd")).unwrap().flatten() {
        let leads = fs::read_link(descriptor.path()).unwrap();
        let leads = leads.to_str().unwrap();
        let own = ["socket:", "anon_inode:", "pipe:", "/dev/null"];
        assert!(own.iter().any(|o| leads.starts_with(o)), "{leads}");
    }
    let environment = fs::read(puller.join("environ")).unwrap();
    let mut variables = environment.split(|b| *b == 0).filter(|v| !v.is_empty());
    assert!(variables.all(|v| v.starts_with(b"SSL_CERT_")));
    let limits = fs::read_to_string(puller.join("limits")).unwrap();
    assert!(
        limits.contains("Max address space         536870912"),
        "{limits}"
    );
}

/// Returns a memory field of a process in KiB.
fn memory(process: u32, name: &str) -> u64 {
    status(Path::new(&format!("/proc/{process}")), name)
        .parse()
        .unwrap()
}

#[jiffy_test(root)]
fn a_layer_is_accepted_without_its_bytes_only_from_the_repository_that_served_it() {
    let test_home = TestHome::with_templates();
    let image = Image::of_file("file", &b"content".repeat(1000));
    let again = image.with_environment("A=b");
    let mut pages = image.pages("app");
    pages.extend(again.documents_of("app", "2"));
    pages.extend(image.pages("other"));
    // The other repository has only the documents, not the layer.
    pages.remove(&image.layer_path("other"));
    let length = image.layer.len();
    let answer = move |request: &Request, stream: &mut dyn Write| match &request.method[..] {
        "HEAD" => {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
            let _ = stream.write_all(head.as_bytes());
        }
        _ => page(&pages, request, stream),
    };
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let authority = test_home.dir.path().join("authority.pem");
    let seen = serve_tls(listener, "127.0.0.2", &authority, answer);
    let authority = authority.to_str().unwrap();
    let mut daemon = test_home.serve_with(&["--network", "off"], &[("SSL_CERT_FILE", authority)]);
    let context = test_home.dir.path().join("context");
    fs::create_dir(&context).unwrap();
    let build = |name: &str, image: &str| {
        seen.lock().unwrap().clear();
        fs::write(context.join("Dockerfile"), format!("FROM {at}/{image}\n")).unwrap();
        test_home.call(&[
            "template",
            "build",
            context.to_str().unwrap(),
            "--name",
            name,
        ])
    };
    let asked = |method: &str, repository: &str| {
        let line = format!("{method} {}", image.layer_path(repository));
        seen.lock().unwrap().contains(&line)
    };
    let first = build("first", "app:1");
    assert_eq!(first.code, Some(0), "{first:?}");
    assert!(asked("GET", "app") && !asked("HEAD", "app"));
    // The repository has served this layer before: HEAD suffices for another of its images.
    let second = build("second", "app:2");
    assert_eq!(second.code, Some(0), "{second:?}");
    assert!(asked("HEAD", "app") && !asked("GET", "app"));
    // `other` answers each HEAD as if it had the layer, but has not served it. So the layer is
    // requested with GET.
    let third = build("third", "other:1");
    assert_eq!(third.code, Some(1), "{third:?}");
    assert!(third.stderr.contains("does not exist"), "{third:?}");
    assert!(asked("GET", "other") && !asked("HEAD", "other"));
    test_home.ok(&["daemon", "stop"]);
    daemon.wait().unwrap();
}
