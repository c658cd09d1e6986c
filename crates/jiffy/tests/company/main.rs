//! Sandboxes in a company's network: authorities of its own, a proxy, and templates that carry
//! neither.
#![allow(clippy::unwrap_used, clippy::panic)]

mod network;
#[path = "../support/mod.rs"]
mod support;

use network::{HELLO, PROXY, TestAuthority, serve_proxy};
use std::fs;
use support::lab::{Lab, with_lab};
use support::networked::clean;
use support::place::Place;
use support::{engine, skip};

/// Served with a certificate of the host's authority, and of a sandbox's own.
const HOSTS: &str = "https://files.corp.test:8443/";
const OWN: &str = "https://own.corp.test:8444/";
/// curl: the certificate cannot be verified.
const UNTRUSTED: i32 = 60;

/// All programs that look for authorities in their own way; the last ones without an environment.
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

struct Company {
    place: Place,
    /// Files with authorities.
    hosts: String,
    own: String,
}

impl Company {
    fn code(&self, id: &str, script: &str) -> i32 {
        let args = ["exec", id, "--", "sh", "-c", script];
        self.place.call(&args).code.unwrap()
    }

    fn curl(&self, id: &str, url: &str) -> i32 {
        self.code(id, &format!("curl -sS -o /dev/null {url}"))
    }

    fn clients(&self, id: &str, url: &str) {
        let args = ["exec", id, "--", "sh", "-c", CLIENTS, "clients", url];
        assert_eq!(self.place.ok(&args), "all", "{url}");
    }
}

fn in_company(test: &str, work: impl FnOnce(&Company, &Lab) + Send) {
    with_lab(test, |lab| {
        let Some(place) = Place::with_templates(test) else {
            return;
        };
        let (host, own) = (TestAuthority::new("Host CA"), TestAuthority::new("Own CA"));
        host.serve(lab, &["files.corp.test", "far.example"], 8443);
        own.serve(lab, &["own.corp.test"], 8444);
        let file = |name: &str, pem: &str| {
            let path = place.dir.path().join(name);
            fs::write(&path, pem).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let company = Company {
            hosts: file("host.pem", &host.pem),
            own: file("own.pem", &own.pem),
            place,
        };
        work(&company, lab);
        drop(company);
        clean();
    });
}

/// A daemon of the company's while `work` is done.
fn served(company: &Company, options: &[&str], work: impl FnOnce()) {
    let usual = ["--network", "on", "--warm-pool", "0"];
    let mut daemon = company.place.serve(&[&usual, options].concat());
    work();
    company.place.ok(&["daemon", "stop"]);
    daemon.wait().unwrap();
}

#[test]
fn programs_trust_the_authorities_of_the_host_and_of_the_sandbox_and_templates_carry_none() {
    let test = "company::programs_trust_the_authorities_of_the_host_and_of_the_sandbox";
    in_company(&engine::name_of(test), |company, _| {
        let place = &company.place;
        let mut kept = String::new();
        served(company, &["--guest-ca", &company.hosts], || {
            let plain = place.ok(&["create"]);
            company.clients(&plain, HOSTS);
            assert_eq!(company.curl(&plain, OWN), UNTRUSTED);
            // The caller's settings win.
            let said = place.ok(&[
                "exec",
                "-e",
                "SSL_CERT_FILE=/own",
                &plain,
                "--",
                "printenv",
                "SSL_CERT_FILE",
            ]);
            assert_eq!(said, "/own");

            kept = place.ok(&["create", "--ca", &company.own]);
            company.clients(&kept, OWN);
            assert_eq!(company.curl(&kept, HOSTS), 0);
            place.ok(&["snapshot", &kept, "--name", "taken"]);
            let copy = place.ok(&["create", "--from", "taken"]);
            let child = place.ok(&["fork", &kept]);
            for id in [&copy, &child] {
                assert_eq!(company.curl(id, OWN), 0);
                place.ok(&["kill", id]);
            }
            place.ok(&["pause", &kept]);
            place.ok(&["kill", &plain]);
            build(company);
        });
        served(company, &[], || {
            // Neither template nor host have it any more; the sandbox has its own.
            let built = place.ok(&["create", "--template", "built"]);
            assert_eq!(place.sh(&built, "cat /fetched"), HELLO);
            assert_eq!(company.curl(&built, HOSTS), UNTRUSTED);
            let pem = fs::read_to_string(&company.hosts).unwrap();
            let line = pem.lines().nth(2).unwrap();
            let found =
                format!("sudo grep -rlF '{line}' /etc /usr/local /copied /opt; test $? = 1");
            assert_eq!(place.sh(&built, &found), "");
            assert_eq!(place.sh(&built, "ls -A /etc/ssl/certs /usr/local/share/ca-certificates | grep -c site-ca; printenv SSL_CERT_FILE; ls /run/jiffy"), "0\nenvironment\ngeneration");
            place.ok(&["resume", &kept]);
            assert_eq!(company.curl(&kept, HOSTS), UNTRUSTED);
            company.clients(&kept, OWN);
            place.ok(&["kill", &kept, &built]);
        });
    });
}

/// Builds a template with what the host's authority vouches for.
fn build(company: &Company) {
    let context = company.place.dir.path().join("context");
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
        .place
        .ok(&["template", "build", context, "--name", "built"]);
}

#[test]
fn a_proxy_is_used_by_all_programs_except_for_hosts_that_need_none() {
    let test = "company::a_proxy_is_used_by_all_programs_except_for_hosts_that_need_none";
    in_company(&engine::name_of(test), |company, lab| {
        let place = &company.place;
        let seen = serve_proxy(lab);
        let asked = || std::mem::take(&mut *seen.lock().unwrap());
        let proxy = format!("http://{PROXY}");
        let options = [
            "--guest-ca",
            &company.hosts,
            "--guest-proxy",
            &proxy,
            "--guest-no-proxy",
            ".corp.test",
        ];
        served(company, &options, || {
            let id = place.ok(&["create"]);
            assert_eq!(
                place.sh(&id, "curl -sS http://far.example/"),
                "through the proxy"
            );
            assert_eq!(asked(), ["GET http://far.example/"]);
            company.clients(&id, "https://far.example:8443/");
            let through = asked();
            // Those that were given no environment know of none.
            assert!(through.len() >= 5, "{through:?}");
            assert!(
                through
                    .iter()
                    .all(|line| line == "CONNECT far.example:8443")
            );
            company.clients(&id, HOSTS);
            assert_eq!(asked(), [""; 0]);
            // Without variables, as under `sudo` or `cron`; a command's own counts for more.
            let apt = "/usr/lib/apt/apt-helper auto-detect-proxy https://far.example/";
            let bare = place.sh(&id, &format!("env -i {apt} 2>&1"));
            assert!(bare.contains(&format!("'{proxy}'")), "{bare}");
            let own = place.sh(&id, &format!("https_proxy=http://own:1 {apt} 2>&1"));
            assert!(!own.contains(&proxy[..]), "{own}");

            let other = place.ok(&["create", "--proxy", "http://9.9.9.9:1"]);
            assert_eq!(place.sh(&other, "printenv HTTPS_PROXY"), "http://9.9.9.9:1");
            let none = place.ok(&["create", "--proxy", "none"]);
            let found = "env | grep -ci _proxy; ls /etc/apt/apt.conf.d | grep -c site";
            assert_eq!(place.sh(&none, &format!("{found}; true")), "0\n0");
            let own = place.ok(&["create", "-e", "http_proxy=http://mine:1"]);
            let said = place.sh(&own, &format!("printenv http_proxy; {found}; true"));
            assert_eq!(said, "http://mine:1\n5\n0");
            // Lists have no certificates and no passwords.
            let listed = place.ok(&["ls", "--json"]);
            assert!(!listed.contains("BEGIN CERTIFICATE") && !listed.contains("9.9.9.9:1"));
            for id in [id, other, none, own] {
                place.ok(&["kill", &id]);
            }
        });
    });
}

#[test]
fn what_cannot_be_an_authority_or_a_proxy_is_refused_before_anything_is_made() {
    let test = "company::what_cannot_be_an_authority_or_a_proxy_is_refused";
    let Some(place) = Place::new(test) else {
        return;
    };
    let key = place.dir.path().join("key.pem");
    fs::write(
        &key,
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    )
    .unwrap();
    let key = key.to_str().unwrap();
    for (args, why) in [
        (["create", "--ca", key], "private key"),
        (["create", "--ca", "/nowhere.pem"], "/nowhere.pem"),
        (["create", "--proxy", "ftp://me:secret@x"], "is no proxy"),
        (["serve", "--guest-ca", key], "private key"),
        (["serve", "--guest-proxy", "x"], "is no proxy"),
        (["serve", "--guest-no-proxy", "x"], "--guest-proxy"),
    ] {
        let done = place.call(&args);
        assert_ne!(done.code, Some(0), "{args:?}");
        assert!(done.stderr.contains(why), "{done:?}");
        assert!(!done.stderr.contains("secret"), "{done:?}");
    }
}

#[test]
fn a_run_trusts_what_it_is_told_to() {
    let test = "company::a_run_trusts_what_it_is_told_to";
    let Some(place) = Place::new(&engine::name_of(test)) else {
        return;
    };
    let authority = TestAuthority::new("CA");
    let file = place.dir.path().join("ca.pem");
    fs::write(&file, &authority.pem).unwrap();
    let script = "tail -n 3 $SSL_CERT_FILE; printenv https_proxy";
    let said = place.ok(&[
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
    assert_eq!(said, format!("{}\nhttp://p:1", end.join("\n")));
}

#[test]
fn node_trusts_them_too() {
    let test = "company::node_trusts_them_too";
    in_company(test, |company, _| {
        if !company.place.dir.path().join("templates/node").exists() {
            let real = fs::read_link(company.place.dir.path().join("templates/base")).unwrap();
            let node = real.parent().unwrap().join("node");
            if !node.exists() {
                return skip(test, "template node is not built");
            }
            let here = company.place.dir.path().join("templates/node");
            std::os::unix::fs::symlink(node, here).unwrap();
        }
        served(company, &["--guest-ca", &company.hosts], || {
            let id = company.place.ok(&["create", "--template", "node"]);
            company.clients(&id, HOSTS);
            company.place.ok(&["kill", &id]);
        });
    });
}

on_gvisor!(
    programs_trust_the_authorities_of_the_host_and_of_the_sandbox_and_templates_carry_none,
    a_proxy_is_used_by_all_programs_except_for_hosts_that_need_none,
    a_run_trusts_what_it_is_told_to,
);
