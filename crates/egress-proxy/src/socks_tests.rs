//! Tests of the SOCKS5 messages: exact bytes of requests, and hostile answers.

#![allow(clippy::unwrap_used)]
use super::*;
use tokio::io::{DuplexStream, duplex};

fn credentials() -> ProxyCredentials {
    ProxyCredentials {
        username: "u".to_owned(),
        password: "pw".to_owned(),
    }
}

/// Returns the result of a client whose proxy sends `answers` at once, and the bytes that the
/// client sent. The first bytes after the handshake are returned with a success.
async fn talk(
    credentials: Option<&ProxyCredentials>,
    target: EgressTarget<'_>,
    answers: &[u8],
) -> (Result<Vec<u8>, SocksError>, Vec<u8>) {
    let (mut ours, mut theirs): (DuplexStream, DuplexStream) = duplex(4096);
    theirs.write_all(answers).await.unwrap();
    theirs.shutdown().await.unwrap();
    let connected = connect(&mut ours, credentials, target).await;
    let mut rest = Vec::new();
    ours.read_to_end(&mut rest).await.unwrap();
    drop(ours);
    let mut sent = Vec::new();
    theirs.read_to_end(&mut sent).await.unwrap();
    (connected.map(|()| rest), sent)
}

/// Reply of a proxy that has connected: version, success, reserved byte, and the IPv4 address
/// 0.0.0.0 with port 0.
const REPLY: [u8; 10] = [5, 0, 0, 1, 0, 0, 0, 0, 0, 0];

#[tokio::test]
async fn requests_have_the_form_of_the_standard_and_no_byte_after_the_reply_is_lost() {
    let name = EgressTarget::Name("a.example", 443);
    let answers = [&[5, 0][..], &REPLY, b"banner"].concat();
    let (rest, sent) = talk(None, name, &answers).await;
    assert_eq!(rest.unwrap(), b"banner");
    // The greeting has the version, one method, and no authentication. The request has the version,
    // CONNECT, a reserved byte, a name of 9 bytes, and port 443.
    let request = [&[5, 1, 0, 5, 1, 0, 3, 9][..], b"a.example", &[1, 187]].concat();
    assert_eq!(sent, request);

    let address = EgressTarget::Address("9.8.7.6:22".parse().unwrap());
    // A reply with a name instead of an address.
    let named = [&[5, 0, 0, 3, 2][..], b"ab", &[0, 0]].concat();
    let answers = [&[5, 2, 1, 0][..], &named].concat();
    let (rest, sent) = talk(Some(&credentials()), address, &answers).await;
    assert_eq!(rest.unwrap(), b"");
    // The greeting offers user name and password only (2). Then follow version 1 of the messages
    // with the two texts, and the request with the IPv4 address.
    let request = [
        &[5, 1, 2, 1, 1, b'u', 2][..],
        b"pw",
        &[5, 1, 0, 1, 9, 8, 7, 6, 0, 22],
    ]
    .concat();
    assert_eq!(sent, request);

    let six = EgressTarget::Address("[2600::1]:22".parse().unwrap());
    let answers = [&[5, 0, 5, 0, 0, 4][..], &[0; 18]].concat();
    let (rest, sent) = talk(None, six, &answers).await;
    assert_eq!(rest.unwrap(), b"");
    // The greeting has 3 bytes. The request has 4 bytes, the address of 16 bytes, and the port.
    assert_eq!(sent.len(), 3 + 22);
}

#[tokio::test]
async fn hostile_and_failed_answers_are_errors() {
    // The answers of the proxy are: version (5) and method (0 none, 2 password, 0xff none of them).
    // With a password, version (1) and status (0) of the authentication follow. The reply has the
    // version, a code (0 success), a reserved byte and an address: its type (1 IPv4, 3 name, 4
    // IPv6), the address and the port.
    let target = || EgressTarget::Name("a.example", 443);
    let password = credentials();
    let with = Some(&password);
    let reply = |reply: &[u8]| [&[5, 0][..], reply].concat();
    for (credentials, answers, expected) in [
        (None, b"HTTP/1.1 400 Bad".to_vec(), "not a SOCKS5 proxy"),
        (None, vec![], "connection to the proxy failed"),
        (None, vec![5], "connection to the proxy failed"),
        (None, vec![5, 0xff], "authentication method"),
        // A method that was not offered.
        (None, vec![5, 2], "authentication method"),
        (with, vec![5, 0], "authentication method"),
        (with, vec![5, 2, 1, 1], "user name and password"),
        (with, vec![5, 2, 5, 0], "not a SOCKS5 proxy"),
        (None, reply(&[4, 0, 0, 1]), "not a SOCKS5 proxy"),
        (None, reply(&[5, 2, 0, 1]), "its rules do not allow"),
        (None, reply(&[5, 200, 0, 1]), "unknown reply"),
        (None, reply(&[5, 0, 0, 9]), "not a SOCKS5 proxy"),
        (
            None,
            reply(&[5, 0, 0, 3, 255, 1, 2]),
            "connection to the proxy failed",
        ),
        (
            None,
            reply(&[5, 0, 0, 4, 1]),
            "connection to the proxy failed",
        ),
    ] {
        let (result, _) = talk(credentials, target(), &answers).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{answers:?}: {error}");
        assert!(!error.contains("pw"), "{error}");
    }
    // Without a valid request, nothing is sent.
    let long = "a".repeat(256);
    for name in ["", &long] {
        let (result, sent) = talk(None, EgressTarget::Name(name, 1), &[5, 0]).await;
        assert!(matches!(result, Err(SocksError::Length)) && sent.is_empty());
    }
}
