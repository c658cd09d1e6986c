//! Tests for sandboxes in a company network: custom certificate authorities, a proxy, and templates
//! that contain neither.

pub mod network;
use crate::support::lab::{Lab, with_lab};
use crate::support::network_probe::assert_clean;
use crate::support::skip;
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use network::{HELLO, PROXY, TestAuthority, serve_proxy};
use std::fs;

/// URL that is served with a certificate of the host's authority.
const HOSTS: &str = "https://files.corp.test:8443/";
/// URL that is served with a certificate of the sandbox's own authority.
const OWN_AUTHORITY: &str = "https://own.corp.test:8444/";
/// curl's exit code for a certificate that cannot be verified.
const UNTRUSTED: i32 = 60;

/// Programs with different methods to find authorities. The last ones run without an environment.
const CLIENTS: &str = r#"set -e
ask='import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())'
said() { test "$2" = 'hello from the company' || { echo "$1 was told: $2"; exit 1; }; }
said curl "$(curl -sS $1)"
said urllib "$(python3 -c "$ask" $1)"
said requests "$(python3 -c 'import sys; from pip._vendor import requests; print(requests.get(sys.argv[1]).text)' $1)"
test "$(git ls-remote ${1}repo.git refs/heads/main | cut -c1-8)" = 01234567
! command -v wget >/dev/null || said wget "$(wget -qO- $1)"
! command -v node >/dev/null || said node "$(node -e 'fetch(process.argv[1]).then(a => a.text()).then(console.log)' $1)"
said 'curl without environment' "$(env -i /usr/bin/curl -sS $1)"
said 'urllib without environment' "$(env -i /usr/bin/python3 -c "$ask" $1)"
said sudo "$(sudo curl -sS $1)"
echo all"#;

/// Daemon in a company network.
struct Company {
    test_home: TestHome,
    /// Files with authorities.
    hosts: String,
    own: String,
}

impl Company {
    /// Returns the exit code of a shell script in a sandbox.
    fn code(&self, id: &str, script: &str) -> i32 {
        let args = ["exec", id, "--", "sh", "-c", script];
        self.test_home.call(&args).code.unwrap()
    }

    /// Returns the exit code of curl for a URL.
    fn curl(&self, id: &str, url: &str) -> i32 {
        self.code(id, &format!("curl -sS -o /dev/null {url}"))
    }

    /// Asserts that all programs of [`CLIENTS`] receive the answer of a URL.
    fn clients(&self, id: &str, url: &str) {
        let args = ["exec", id, "--", "sh", "-c", CLIENTS, "clients", url];
        assert_eq!(self.test_home.ok(&args), "all", "{url}");
    }
}

/// Runs `work` in a lab with servers whose authorities are unknown to guests.
fn in_company(work: impl FnOnce(&Company, &Lab) + Send) {
    with_lab(|lab| {
        let test_home = TestHome::with_templates();
        let (host, own) = (TestAuthority::new("Host CA"), TestAuthority::new("Own CA"));
        host.serve(lab, &["files.corp.test", "far.example"], 8443);
        own.serve(lab, &["own.corp.test"], 8444);
        let file = |name: &str, pem: &str| {
            let path = test_home.dir.path().join(name);
            fs::write(&path, pem).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let company = Company {
            hosts: file("host.pem", &host.pem),
            own: file("own.pem", &own.pem),
            test_home,
        };
        work(&company, lab);
        drop(company);
        assert_clean();
    });
}

/// Runs `work` with a daemon of the company.
fn with_daemon(company: &Company, options: &[&str], work: impl FnOnce()) {
    let usual = ["--network", "on", "--warm-pool", "0"];
    let mut daemon = company.test_home.serve(&[&usual, options].concat());
    work();
    company.test_home.ok(&["daemon", "stop"]);
    daemon.wait().unwrap();
}

#[jiffy_test(engine = "each", lab)]
fn programs_trust_the_authorities_of_the_host_and_of_the_sandbox_and_templates_carry_none() {
    in_company(|company, _| {
        let test_home = &company.test_home;
        let mut retained = String::new();
        with_daemon(company, &["--guest-ca", &company.hosts], || {
            let plain = test_home.ok(&["create"]);
            company.clients(&plain, HOSTS);
            assert_eq!(company.curl(&plain, OWN_AUTHORITY), UNTRUSTED);
            // The caller's settings take precedence.
            let output = test_home.ok(&[
                "exec",
                "-e",
                "SSL_CERT_FILE=/own",
                &plain,
                "--",
                "printenv",
                "SSL_CERT_FILE",
            ]);
            assert_eq!(output, "/own");

            retained = test_home.ok(&["create", "--ca", &company.own]);
            company.clients(&retained, OWN_AUTHORITY);
            assert_eq!(company.curl(&retained, HOSTS), 0);
            test_home.ok(&["snapshot", &retained, "--name", "taken"]);
            let copy = test_home.ok(&["create", "--from", "taken"]);
            let child = test_home.ok(&["fork", &retained]);
            for id in [&copy, &child] {
                assert_eq!(company.curl(id, OWN_AUTHORITY), 0);
                test_home.ok(&["kill", id]);
            }
            test_home.ok(&["pause", &retained]);
            test_home.ok(&["kill", &plain]);
            build(company);
        });
        with_daemon(company, &[], || {
            // Neither template nor host contain the authority any longer; the sandbox has its own
            // copy.
            let built = test_home.ok(&["create", "--template", "built"]);
            assert_eq!(test_home.sh(&built, "cat /fetched"), HELLO);
            assert_eq!(company.curl(&built, HOSTS), UNTRUSTED);
            let pem = fs::read_to_string(&company.hosts).unwrap();
            // A line in the middle of the certificate, which occurs in every copy.
            let line = pem.lines().nth(2).unwrap();
            let found =
                format!("sudo grep -rlF '{line}' /etc /usr/local /copied /opt; test $? = 1");
            assert_eq!(test_home.sh(&built, &found), "");
            // No settings of the company are in the guest either.
            assert_eq!(test_home.sh(&built, "ls -A /etc/ssl/certs /usr/local/share/ca-certificates | grep -c site-ca; printenv SSL_CERT_FILE; ls /run/jiffy"), "0\ne2b\nenvironment\ngeneration");
            test_home.ok(&["resume", &retained]);
            assert_eq!(company.curl(&retained, HOSTS), UNTRUSTED);
            company.clients(&retained, OWN_AUTHORITY);
            test_home.ok(&["kill", &retained, &built]);
        });
    });
}

/// Builds a template with downloads from a server of the host's authority.
fn build(company: &Company) {
    let context = company.test_home.dir.path().join("context");
    fs::create_dir(&context).unwrap();
    let dockerfile = format!(
        "FROM base AS certificates\n\
         FROM base\n\
         USER root\n\
         RUN curl -sS {HOSTS} > /fetched && update-ca-certificates\n\
         COPY --from=certificates /etc/ssl/certs/ca-certificates.crt /copied/\n\
         USER user\n"
    );
    fs::write(context.join("Dockerfile"), dockerfile).unwrap();
    let context = context.to_str().unwrap();
    company
        .test_home
        .ok(&["template", "build", context, "--name", "built"]);
}

#[jiffy_test(engine = "each", lab)]
fn a_proxy_is_used_by_all_programs_except_for_hosts_that_need_none() {
    in_company(|company, lab| {
        let test_home = &company.test_home;
        let seen = serve_proxy(lab);
        let request = || std::mem::take(&mut *seen.lock().unwrap());
        let proxy = format!("http://{PROXY}");
        let options = [
            "--guest-ca",
            &company.hosts,
            "--guest-proxy",
            &proxy,
            "--guest-no-proxy",
            ".corp.test",
        ];
        with_daemon(company, &options, || {
            let id = test_home.ok(&["create"]);
            assert_eq!(
                test_home.sh(&id, "curl -sS http://far.example/"),
                "through the proxy"
            );
            assert_eq!(request(), ["GET http://far.example/"]);
            company.clients(&id, "https://far.example:8443/");
            let through = request();
            // At least curl, urllib, requests, git and sudo. Programs without an environment do not
            // use the proxy.
            assert!(through.len() >= 5, "{through:?}");
            assert!(
                through
                    .iter()
                    .all(|line| line == "CONNECT far.example:8443")
            );
            company.clients(&id, HOSTS);
            assert_eq!(request(), [""; 0]);
            // apt uses the proxy without variables, as under `sudo` or `cron`. A command's own
            // variables take precedence.
            let apt = "/usr/lib/apt/apt-helper auto-detect-proxy https://far.example/";
            let bare = test_home.sh(&id, &format!("env -i {apt} 2>&1"));
            assert!(bare.contains(&format!("'{proxy}'")), "{bare}");
            let own = test_home.sh(&id, &format!("https_proxy=http://own:1 {apt} 2>&1"));
            assert!(!own.contains(&proxy[..]), "{own}");

            let other = test_home.ok(&["create", "--proxy", "http://9.9.9.9:1"]);
            assert_eq!(
                test_home.sh(&other, "printenv HTTPS_PROXY"),
                "http://9.9.9.9:1"
            );
            let none = test_home.ok(&["create", "--proxy", "none"]);
            let found = "env | grep -ci _proxy; ls /etc/apt/apt.conf.d | grep -c site";
            assert_eq!(test_home.sh(&none, &format!("{found}; true")), "0\n0");
            let own = test_home.ok(&["create", "-e", "http_proxy=http://mine:1"]);
            let output = test_home.sh(&own, &format!("printenv http_proxy; {found}; true"));
            // The caller's `http_proxy`, and the host's `https_proxy` and `no_proxy` in both
            // spellings. A caller's proxy disables the host's settings for apt.
            assert_eq!(output, "http://mine:1\n5\n0");
            // Lists contain no certificates and no passwords.
            let listed = test_home.ok(&["ls", "--json"]);
            assert!(!listed.contains("BEGIN CERTIFICATE") && !listed.contains("9.9.9.9:1"));
            for id in [id, other, none, own] {
                test_home.ok(&["kill", &id]);
            }
        });
    });
}

#[jiffy_test]
fn invalid_authorities_and_proxies_are_refused_before_a_sandbox_is_made() {
    let test_home = TestHome::new();
    let key = test_home.dir.path().join("key.pem");
    fs::write(
        &key,
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    )
    .unwrap();
    let key = key.to_str().unwrap();
    for (args, why) in [
        (["create", "--ca", key], "private key"),
        (["create", "--ca", "/nowhere.pem"], "/nowhere.pem"),
        (
            ["create", "--proxy", "ftp://me:secret@x"],
            "is not a proxy URL",
        ),
        (["serve", "--guest-ca", key], "private key"),
        (["serve", "--guest-proxy", "x"], "is not a proxy URL"),
        (["serve", "--guest-no-proxy", "x"], "--guest-proxy"),
    ] {
        let done = test_home.call(&args);
        assert_ne!(done.code, Some(0), "{args:?}");
        assert!(done.stderr.contains(why), "{done:?}");
        assert!(!done.stderr.contains("secret"), "{done:?}");
    }
}

#[jiffy_test(engine = "each")]
fn a_run_trusts_its_authorities() {
    let test_home = TestHome::new();
    let authority = TestAuthority::new("CA");
    let file = test_home.dir.path().join("ca.pem");
    fs::write(&file, &authority.pem).unwrap();
    let script = "tail -n 3 $SSL_CERT_FILE; printenv https_proxy";
    let output = test_home.ok(&[
        "run",
        "--ca",
        file.to_str().unwrap(),
        "--proxy",
        "http://p:1",
        "--",
        "sh",
        "-c",
        script,
    ]);
    let end: Vec<&str> = authority.pem.trim_end().lines().rev().take(3).collect();
    let end: Vec<&str> = end.into_iter().rev().collect();
    assert_eq!(output, format!("{}\nhttp://p:1", end.join("\n")));
}

#[jiffy_test(lab)]
fn node_trusts_the_authorities_too() {
    in_company(|company, _| {
        if !company.test_home.dir.path().join("templates/node").exists() {
            let real = fs::read_link(company.test_home.dir.path().join("templates/base")).unwrap();
            let node = real.parent().unwrap().join("node");
            if !node.exists() {
                return skip("template node is not built");
            }
            let here = company.test_home.dir.path().join("templates/node");
            std::os::unix::fs::symlink(node, here).unwrap();
        }
        with_daemon(company, &["--guest-ca", &company.hosts], || {
            let id = company.test_home.ok(&["create", "--template", "node"]);
            company.clients(&id, HOSTS);
            company.test_home.ok(&["kill", &id]);
        });
    });
}
