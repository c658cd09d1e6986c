//! Tests for modules in a shared store, deployed by digest.

use super::client::FunctionClient;
use super::constant;
use crate::support::remote::Remote;
use crate::support::store::TestStore;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;

const BOUNDARY: &str = "boundary";

/// Deploys a digest with the key of a host, over HTTP.
fn deploy(host: &Remote, digest: &str) -> (u16, String) {
    let headers = format!(
        "host: localhost\r\nx-api-key: {}\r\n\
         content-type: multipart/form-data; boundary={BOUNDARY}\r\n",
        host.key
    );
    let form = format!(
        "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"settings\"\r\n\r\n\
         {{\"digest\":\"{digest}\"}}\r\n--{BOUNDARY}--\r\n"
    );
    let mut client = FunctionClient::connect(&host.url, &headers);
    let answer = client.send("POST", "/functions/hello", form.as_bytes());
    answer.unwrap().refusal()
}

#[jiffy_test]
fn a_module_is_deployed_by_its_digest_on_a_host_that_shares_the_store() {
    let store = TestStore::new();
    let options = [&store.options()[..], &["--warm-pool", "0"]].concat();
    let one = Remote::new(&options);
    let two = Remote::new(&options);
    let file = store.dir.path().join("hello.wasm");
    std::fs::write(&file, constant("of one")).unwrap();
    // By the operator, who is the same owner on all hosts.
    let one_home = &one.test_home;
    let deployed = one_home.json(&["function", "deploy", "hello", file.to_str().unwrap()]);
    let state = deployed["storeState"].as_str().unwrap();
    assert!(["uploading", "stored"].contains(&state), "{deployed}");
    let digest = deployed["digest"].as_str().unwrap();
    wait_for("the upload", || {
        let versions = one_home.json(&["function", "versions", "hello"]);
        assert_eq!(versions[0]["digest"], digest);
        (versions[0]["storeState"] == "stored").then_some(())
    });
    let digest = format!("blake3:{digest}");
    let info = one_home.ok(&["function", "info", "hello"]);
    assert!(info.contains(&digest) && info.contains("stored"), "{info}");

    // A key has separate modules, even on the host that has the file.
    let unknown = (404, "module_not_found".to_owned());
    for host in [&one, &two] {
        assert_eq!(deploy(host, &digest), unknown);
    }
    assert_eq!(
        deploy(&two, "blake3:12"),
        (400, "invalid_request".to_owned())
    );
    let by_digest = ["function", "deploy", "hello", "--digest", &digest];
    two.test_home.ok(&by_digest);
    let answer = two.test_home.ok(&["function", "invoke", "hello"]);
    assert_eq!(answer, "of one");
    let versions = two.test_home.ok(&["function", "versions", "hello"]);
    assert!(
        versions.contains("STORE") && versions.contains(&digest),
        "{versions}"
    );
    let both = [&by_digest[..], &[file.to_str().unwrap()]].concat();
    assert_eq!(two.test_home.call(&both).code, Some(2));
}
