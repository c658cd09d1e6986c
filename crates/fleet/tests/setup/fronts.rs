//! Fronts: machines without sandboxes that pass requests of clients to the hosts. A front receives
//! a certificate and the addresses of the hosts, and nothing else.

use super::lab::{Lab, Member, facts, rejected};
use bytes::Bytes;
use jiffy_fleet::HostFacts;
use jiffy_fleet::channel::{Client, Server};
use jiffy_fleet::front::{FRONT_PATH, FrontHost, FrontService, KnownHosts, follow_hosts};
use jiffy_fleet::join::{JoinOptions, join_fleet};
use jiffy_fleet::settings::{Role, Settings};
use jiffy_fleet_core::MemberId;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

const LIMIT: Duration = Duration::from_secs(30);

/// Returns the options of a front that joins through `member`.
async fn options(member: &Member, name: &str) -> JoinOptions {
    JoinOptions {
        address: String::new(),
        role: Role::Front,
        ..member.options(name).await
    }
}

/// Returns the properties of a front.
fn front_facts() -> HostFacts {
    HostFacts::new("0.1.0")
}

/// Returns the files below a directory, relative to it.
fn files(home: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![home.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(home).unwrap();
                files.push(name.display().to_string());
            }
        }
    }
    files.sort();
    files
}

#[tokio::test]
async fn a_front_receives_a_certificate_and_neither_store_keys_nor_records() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("front");
    // A front needs no guest kernel and no processor level.
    let options_of_front = options(&member, "front").await;
    let joined = join_fleet(&home, &options_of_front, front_facts()).await;
    let settings = joined.unwrap().settings;
    assert_eq!(settings.member, MemberId(2).front());
    assert_eq!(settings.member.to_string(), "f2");
    assert_eq!(settings.domains, ["sbx.example.com"]);
    assert_eq!((&*settings.store, settings.records.as_ref()), ("", None));
    assert_eq!(Settings::load(&home).unwrap(), Some(settings.clone()));
    assert_eq!(
        files(&home),
        [
            "fleet.toml",
            "fleet/authority.pem",
            "fleet/certificate.pem",
            "fleet/hosts.json",
            "fleet/installation",
            "fleet/key.pem"
        ]
    );
    let text = std::fs::read_to_string(home.join("fleet.toml")).unwrap();
    let secret = std::fs::read_to_string(lab.home("one").join("store/keys.toml")).unwrap();
    // The file contains no key of the store. Shorter lines are no keys.
    assert!(
        secret
            .lines()
            .all(|line| line.len() < 32 || !text.contains(line))
    );
    // A repeated join has the same number, which is never the number of a host.
    std::fs::remove_file(home.join("fleet.toml")).unwrap();
    let again = join_fleet(&home, &options(&member, "front").await, front_facts()).await;
    assert_eq!(again.unwrap().settings.member, settings.member);
    std::fs::remove_file(home.join("fleet.toml")).unwrap();
    let host = join_fleet(&home, &member.options("front").await, facts()).await;
    assert_eq!(host.unwrap().settings.member, MemberId(3));
    // A removed front has another number when it joins again.
    let home = lab.home("removed");
    let joined = join_fleet(&home, &options(&member, "removed").await, front_facts()).await;
    let removed = joined.unwrap().settings.member;
    lab.remove_front(&member, removed).await;
    std::fs::remove_file(home.join("fleet.toml")).unwrap();
    let again = join_fleet(&home, &options(&member, "removed").await, front_facts()).await;
    assert!(again.unwrap().settings.member > removed);
    // Another version of the protocol is rejected.
    let old = HostFacts {
        format: 0,
        ..front_facts()
    };
    let home = lab.home("old");
    let joined = join_fleet(&home, &options(&member, "old").await, old).await;
    assert!(rejected(&home, joined).contains("format"));
    // A file whose role does not match its number is rejected. This data directory now belongs to
    // host 3.
    let home = lab.home("front");
    // 2147483650 is the number of the front f2: bit 31 distinguishes fronts.
    for (from, to) in [("member = 3", "member = 2147483650"), ("host", "front")] {
        let text = std::fs::read_to_string(home.join("fleet.toml")).unwrap();
        std::fs::write(home.join("fleet.toml"), text.replacen(from, to, 1)).unwrap();
        assert!(Settings::load(&home).is_err(), "{to}");
        std::fs::write(home.join("fleet.toml"), text).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_follows_the_hosts_and_may_call_nothing_else() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("front");
    let options_of_front = options(&member, "front").await;
    let joined = join_fleet(&home, &options_of_front, front_facts()).await;
    let settings = joined.unwrap().settings;
    let (host_home, host) = (lab.home("one"), MemberId(1));
    let host_settings = Settings::load(&host_home).unwrap().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let hosts = vec![
        FrontHost {
            member: host,
            address: address.clone(),
        },
        FrontHost {
            member: MemberId(3),
            address: "192.0.2.1:7946".to_owned(),
        },
    ];
    let live = hosts.clone();
    let service = FrontService::new(member.access.clone(), Box::new(move || live.clone()));
    let service = Arc::new(service);
    let host_identity = host_settings.identity(&host_home).unwrap();
    let _server = Server::new(host_identity.clone(), Arc::new(|_| Ok(())))
        .messages(FRONT_PATH, service.clone())
        .for_fronts(FRONT_PATH)
        .messages("/fleet/message", service)
        .start(listener)
        .unwrap();
    // As if the address of the host had changed since the join: only the file has the new one.
    let known_before = [FrontHost {
        member: host,
        address: address.clone(),
    }];
    let path = home.join("fleet/hosts.json");
    std::fs::write(&path, serde_json::to_vec(&known_before).unwrap()).unwrap();
    let identity = settings.identity(&home).unwrap();
    let client = Client::new(identity.clone());
    let known = KnownHosts::load(&home).unwrap();
    let task = tokio::spawn(follow_hosts(client.clone(), identity, known.clone()));
    let updated = async {
        while known.in_turn().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, updated).await.unwrap();
    task.abort();
    // Connections are distributed, and the hosts are known after a restart.
    let first: Vec<_> = (0..4).map(|_| known.in_turn()[0].member.0).collect();
    assert!(first.contains(&1) && first.contains(&3), "{first:?}");
    assert_eq!(KnownHosts::load(&home).unwrap().in_turn(), hosts);
    let call = async |client: &Client, path: &str| {
        let sent = client.message(host, &address, path, Bytes::from_static(b"{}"), LIMIT);
        sent.await.unwrap_err().to_string()
    };
    for path in [
        "/fleet/message",
        "/fleet/query",
        "/tables",
        "/api/keys",
        "/front",
    ] {
        let denied = call(&client, path).await;
        assert!(denied.contains("403"), "{path}: {denied}");
    }
    // A front may send this message. Its content `{}` is rejected as invalid.
    assert!(call(&client, FRONT_PATH).await.contains("400"));
    // Only fronts receive certificates by this message.
    let denied = call(&Client::new(host_identity), FRONT_PATH).await;
    assert!(denied.contains("403"), "{denied}");
    for damaged in ["", "[]", "{", r#"[{"member":1,"address":"x"}]"#] {
        std::fs::write(&path, damaged).unwrap();
        assert!(KnownHosts::load(&home).is_err(), "{damaged}");
    }
}
