//! Clusters of etcd that Jiffy rejects with a reason: replaced clusters, clusters that returned to
//! an older revision, and unsuitable settings.

use super::contract::{key, value};
use super::servers::{self, Server, tool};
use jiffy_fleet::{EtcdRecords, RecordError, Written};

#[tokio::test]
async fn a_cluster_that_was_replaced_is_rejected() {
    let Some(program) = tool("etcd") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let Some((server, address)) = servers::etcd(&dir.path().join("old")) else {
        return;
    };
    let records = servers::etcd_records(address, false);
    let key = key("fleet/root");
    let Written::Done(version) = records.create(&key, value("one")).await.unwrap() else {
        panic!("not created");
    };
    drop(server);
    // Another cluster at the same address, as after the restore of a backup.
    let new = dir.path().join("new");
    let _server: Server =
        servers::etcd_member(&program, &new, address, servers::free_port(), "two");
    // Each call is rejected, not only the first one.
    for _ in 0..2 {
        let error = records.get(&key).await.unwrap_err();
        assert!(matches!(error, RecordError::Regressed { .. }), "{error}");
        let error = records
            .replace(&key, value("two"), &version)
            .await
            .unwrap_err();
        assert!(matches!(error, RecordError::Regressed { .. }), "{error}");
    }
    // A new client has not seen the former cluster.
    let fresh = servers::etcd_records(address, false);
    assert_eq!(fresh.get(&key).await.unwrap(), None);
}

#[tokio::test]
async fn a_cluster_that_returned_to_an_older_revision_is_rejected() {
    let Some(program) = tool("etcd") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], servers::free_port()));
    let peer = servers::free_port();
    let start = |data: &std::path::Path| servers::etcd_member(&program, data, address, peer, "one");
    let server = start(&data);
    let records = servers::etcd_records(address, false);
    let key = key("fleet/root");
    for number in 0..3 {
        let current = records.get(&key).await.unwrap();
        let content = value(&number.to_string());
        let written = match current {
            Some(current) => records.replace(&key, content, &current.version).await,
            None => records.create(&key, content).await,
        };
        assert!(matches!(written.unwrap(), Written::Done(_)));
    }
    drop(server);
    // An empty data directory with the same members and token has the same cluster id.
    let _server = start(&dir.path().join("older"));
    let error = records.get(&key).await.unwrap_err();
    assert!(
        error.to_string().contains("returned from revision"),
        "{error}"
    );
}

#[tokio::test]
async fn credentials_are_required_unless_the_address_is_local() {
    let url = "etcd://etcd.example.com:2379".parse().unwrap();
    let error = EtcdRecords::new(&jiffy_fleet::EtcdSettings::new(url)).unwrap_err();
    assert!(error.to_string().contains("--records-ca"), "{error}");
}

#[tokio::test]
async fn a_server_without_the_gateway_is_rejected_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    // The records use the gateway, the HTTP interface of etcd, which is disabled here.
    let Some(program) = tool("etcd") else {
        return;
    };
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], servers::free_port()));
    let (client, peer) = (
        format!("http://{address}"),
        format!("http://127.0.0.1:{}", servers::free_port()),
    );
    let mut command = std::process::Command::new(program);
    command
        .args(["--name", "m0", "--enable-grpc-gateway=false", "--data-dir"])
        .arg(dir.path())
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("m0={peer}")]);
    let _server = Server::start(&mut command, address);
    let error = servers::etcd_records(address, true)
        .get(&key("a"))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("gateway is disabled"), "{error}");
}
