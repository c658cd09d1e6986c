//! Tokens that cannot be used. With a *token*, an operator permits a number of hosts to join the
//! fleet before a time.

use super::lab::{Lab, facts, free_address, rejected};
use jiffy_fleet::join::{JoinOptions, join_fleet};
use jiffy_fleet::tokens::Token;
use std::time::{Duration, Instant};

#[tokio::test]
async fn a_token_is_used_as_often_as_it_permits() {
    let lab = Lab::new();
    let member = lab.member().await;
    let token = member.token(2).await;
    for name in ["two", "three", "four"] {
        let home = lab.home(name);
        let options = JoinOptions {
            token: token.clone(),
            ..member.options(name).await
        };
        let joined = join_fleet(&home, &options, facts()).await;
        if name == "four" {
            let error = rejected(&home, joined);
            assert!(error.contains("was used by 2 hosts already"), "{error}");
        } else {
            joined.unwrap();
        }
    }
}

#[tokio::test]
async fn an_expired_token_is_rejected() {
    let lab = Lab::new();
    let member = lab.member().await;
    let options = JoinOptions {
        token: member.access.create_token(1, Duration::ZERO).await.unwrap(),
        ..member.options("two").await
    };
    let home = lab.home("two");
    let error = rejected(&home, join_fleet(&home, &options, facts()).await);
    assert!(error.contains("the token is expired"), "{error}");
}

#[tokio::test]
async fn a_token_of_another_fleet_is_rejected_before_it_is_sent() {
    let (lab, other) = (Lab::new(), Lab::new());
    let (member, foreign) = (lab.member().await, other.member().await);
    let options = JoinOptions {
        token: foreign.token(1).await,
        ..member.options("two").await
    };
    let home = lab.home("two");
    let error = rejected(&home, join_fleet(&home, &options, facts()).await);
    assert!(
        error.contains("is not a member of the fleet of this token"),
        "{error}"
    );
}

#[tokio::test]
async fn guesses_are_rejected_without_records_and_then_limited() {
    let lab = Lab::new();
    let member = lab.member().await;
    // Tokens of a fleet with the same authority, but another secret.
    let mut impostor = member.access.clone();
    *impostor.secret = [7; 32];
    let guess = impostor
        .create_token(1, Duration::from_secs(60))
        .await
        .unwrap();
    // Hide the records. A check that read them would fail with another error.
    let store = lab.dir.path().join("store");
    let hidden = lab.dir.path().join("hidden");
    std::fs::rename(&store, &hidden).unwrap();
    let home = lab.home("two");
    let listen = free_address().await;
    let options = JoinOptions {
        token: guess,
        listen,
        address: listen.to_string(),
        ..with_any_token(&member.address)
    };
    let started = Instant::now();
    let mut limited = 0;
    for _ in 0..100 {
        let error = rejected(&home, join_fleet(&home, &options, facts()).await);
        if error.contains("too many joins with wrong tokens") {
            limited += 1;
        } else {
            assert!(error.contains("does not belong to this fleet"), "{error}");
        }
    }
    // An address may fail ten times per minute.
    assert_eq!(limited, 90);
    assert!(started.elapsed() < Duration::from_secs(30));
    std::fs::rename(&hidden, &store).unwrap();
}

/// Returns options of a join through `member` with a token that no fleet created.
fn with_any_token(member: &str) -> JoinOptions {
    let listen = "127.0.0.1:1".parse().unwrap();
    JoinOptions {
        member: member.to_owned(),
        token: any_token(),
        name: "two".to_owned(),
        listen,
        address: "127.0.0.1:1".to_owned(),
        role: jiffy_fleet::settings::Role::Host,
        import: false,
    }
}

/// Returns a token that no fleet created.
fn any_token() -> Token {
    // 36 bytes of zeros, and a checksum of 2 bytes.
    let mut bytes = vec![0_u8; 36];
    let hash = blake3::hash(&bytes);
    bytes.extend(&hash.as_bytes()[..2]);
    let text = data_encoding::BASE32_NOPAD.encode(&bytes);
    format!("jft_{}", text.to_ascii_lowercase())
        .parse()
        .unwrap()
}
