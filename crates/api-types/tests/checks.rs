//! Checks of sizes and hosts. They are a program of their own: in the library, they would compile
//! the code of all types a second time.

use jiffy_api_types::{HeaderRule, SandboxSize, SizeError};

#[test]
fn each_bound_is_enforced_and_named() {
    let good = SandboxSize::default();
    assert_eq!(good.check(), Ok(()));
    let with = |vcpus, memory_mib, disk_mib| SandboxSize {
        vcpus,
        memory_mib,
        disk_mib,
    };
    assert_eq!(with(0, 512, 1024).check(), Err(SizeError::Vcpus(0)));
    assert_eq!(with(9, 512, 1024).check(), Err(SizeError::Vcpus(9)));
    assert_eq!(with(1, 127, 1024).check(), Err(SizeError::Memory(127)));
    assert_eq!(
        with(1, 65_537, 1024).check(),
        Err(SizeError::Memory(65_537))
    );
    let error = with(1, 512, 63).check().unwrap_err();
    assert!(error.to_string().contains("63 MiB of disk"));
}

#[test]
fn a_wildcard_names_the_hosts_below_a_domain() {
    let rule = |host: &str| HeaderRule {
        host: host.to_owned(),
        ..HeaderRule::default()
    };
    let below = rule("*.example.com");
    assert!(below.names("a.example.com") && below.names("A.B.Example.COM"));
    for other in [
        "example.com",
        ".example.com",
        "aexample.com",
        "a.example.com.",
        "a.example.org",
        "",
    ] {
        assert!(!below.names(other), "{other}");
    }
    assert!(rule("a.example").names("A.example") && !rule("a.example").names("b.a.example"));
}
