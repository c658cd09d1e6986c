//! Hosts that must not join the fleet, although they have a token (the permission to join).

use super::lab::{Lab, facts, free_address, rejected};
use bytes::Bytes;
use jiffy_fleet::channel;
use jiffy_fleet::join::{JoinOptions, JoinRequest, join_fleet};
use jiffy_fleet::{HostFacts, SetupError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[tokio::test]
async fn hosts_that_cannot_exchange_sandboxes_are_rejected() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    for (facts, reason) in [
        (
            HostFacts {
                cpu_level: 2,
                ..facts()
            },
            "x86-64-v2, but the fleet requires x86-64-v3",
        ),
        (
            HostFacts {
                kernel: Some("k2".to_owned()),
                ..facts()
            },
            "guest kernel k2, but the fleet has k1",
        ),
        (
            HostFacts {
                gvisor: Some("g2".to_owned()),
                ..facts()
            },
            "gVisor g2, but the fleet has g1",
        ),
        (
            HostFacts {
                format: facts().format + 1,
                ..facts()
            },
            "upgrade the fleet",
        ),
    ] {
        let options = member.options("two").await;
        let error = rejected(&home, join_fleet(&home, &options, facts).await);
        assert!(error.contains(reason), "{error}");
    }
    // A rejected host has not used its token.
    let options = member.options("two").await;
    let slow = HostFacts {
        cpu_level: 0,
        ..facts()
    };
    rejected(&home, join_fleet(&home, &options, slow).await);
    join_fleet(&home, &options, facts()).await.unwrap();
}

#[tokio::test]
async fn a_host_with_an_address_that_members_cannot_reach_is_rejected() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    let silent = free_address().await.to_string();
    // An address at which no program listens, the address of another host (the member), and an
    // address without a port.
    for (address, reason) in [
        (silent.as_str(), "cannot reach the host at"),
        (member.address.as_str(), "cannot reach the host at"),
        ("10.0.0.1", "is not an address"),
    ] {
        let options = JoinOptions {
            address: address.to_owned(),
            ..member.options("two").await
        };
        let error = rejected(&home, join_fleet(&home, &options, facts()).await);
        assert!(error.contains(reason), "{error}");
    }
}

#[tokio::test]
async fn the_name_of_a_living_member_is_rejected() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    let error = rejected(&home, member.join(&home, "host1").await);
    assert!(
        error.contains("the name host1 belongs to h1, which is alive"),
        "{error}"
    );
    let error = rejected(&home, member.join(&home, "Host 1").await);
    assert!(error.contains("is not a name of a host"), "{error}");
}

#[tokio::test]
async fn a_data_directory_joins_once() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    member.join(&home, "two").await.unwrap();
    let error = member.join(&home, "other").await.unwrap_err();
    assert!(matches!(error, SetupError::Member { .. }), "{error}");
    assert!(error.to_string().contains("is already h2"), "{error}");
}

#[tokio::test]
async fn a_host_with_a_wrong_clock_is_rejected_with_the_difference() {
    let lab = Lab::new();
    let member = lab.member().await;
    let token = member.token(1).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let hour = Duration::from_secs(3600);
    for (time, reason) in [
        (now + hour, "ahead of the clock of this member"),
        (now - hour, "behind the clock of this member"),
        (Duration::from_millis(u64::MAX), "ahead of"),
    ] {
        let request = JoinRequest {
            format: jiffy_fleet_core::MESSAGE_FORMAT,
            token: token.to_string(),
            name: "two".to_owned(),
            address: "127.0.0.1:1".to_owned(),
            nonce: "n".to_owned(),
            installation: "i".to_owned(),
            is_front: false,
            facts: facts(),
            certificate_request: String::new(),
            unix_ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
        };
        let bytes = Bytes::from(serde_json::to_vec(&request).unwrap());
        let limit = Duration::from_secs(20);
        let error = channel::join(&member.address, token.authority, bytes, limit)
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(reason) && error.contains("NTP"), "{error}");
    }
}

#[tokio::test]
async fn damaged_join_requests_are_rejected() {
    let lab = Lab::new();
    let member = lab.member().await;
    let authority = member.token(1).await.authority;
    for request in [&b""[..], b"{}", b"[1,2", b"{\"format\":1}", &[0xff; 1000]] {
        let bytes = Bytes::copy_from_slice(request);
        let limit = Duration::from_secs(20);
        let answer = channel::join(&member.address, authority, bytes, limit).await;
        let error = answer.unwrap_err().to_string();
        assert!(error.contains("join request"), "{error}");
    }
}
