//! Confinement of a tenant's process. Without root there are no namespaces to look at.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_proto::function::FunctionLimits;
use std::fs;
use support::{TestTenant, constant};

#[test]
fn a_tenants_process_has_no_files_network_privileges_or_core() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("one"), FunctionLimits::default());
    assert_eq!(tenant.connect().get("one", "/").status, 200);
    let process = format!("/proc/{}", tenant.process.id());
    let threads = fs::read_dir(format!("{process}/task")).unwrap();
    for thread in threads {
        let path = thread.unwrap().path();
        let status = fs::read_to_string(path.join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim_start_matches(':').trim().to_owned()
        };
        assert_eq!(
            (field("Seccomp"), field("NoNewPrivs")),
            ("2".to_owned(), "1".to_owned())
        );
        assert_eq!(field("CapEff"), "0".repeat(16));
        if nix::unistd::Uid::effective().is_root() {
            assert!(!field("Uid").starts_with('0'), "{}", field("Uid"));
        }
    }
    let limits = fs::read_to_string(format!("{process}/limits")).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    assert_eq!(fs::read_dir(format!("{process}/root")).unwrap().count(), 0);
    for kind in ["net", "mnt", "ipc", "uts", "cgroup"] {
        let theirs = fs::read_link(format!("{process}/ns/{kind}")).unwrap();
        assert_ne!(
            theirs,
            fs::read_link(format!("/proc/self/ns/{kind}")).unwrap()
        );
    }
    let network = fs::read_to_string(format!("{process}/net/dev")).unwrap();
    assert!(
        network
            .lines()
            .skip(2)
            .all(|line| line.trim_start().starts_with("lo:")),
        "{network}"
    );
}
