//! Peers with wrong, expired or missing certificates. A server answers the message `who` with the
//! id of the sender, which is `h2` for the client of these tests.

use super::members::{CLIENT, Fleet, Host, LIMIT, REMOVED, SERVER};
use bytes::Bytes;
use hyper::client::conn::http2;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiffy_fleet::channel::{
    ChannelError, Client, JoinError, authority_fingerprint, empty_body, join,
};
use jiffy_fleet_core::MemberId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test]
async fn a_message_reaches_the_member_with_the_id_of_its_sender() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
    let rejected = host.message(&client, "no").await.unwrap_err();
    assert!(
        rejected.starts_with("h1 rejected the message with status 409: not now"),
        "{rejected}"
    );
}

#[tokio::test]
async fn a_host_of_another_authority_is_not_served_and_not_trusted() {
    let (ours, theirs) = (Fleet::new(), Fleet::new());
    let host = Host::start(ours.identity(SERVER)).await;
    let error = host.message(&theirs.client(), "who").await.unwrap_err();
    assert!(error.contains("Untrusted"), "{error}");

    // A client that trusts the host, but whose own certificate is of another authority. In TLS 1.3,
    // the server checks the client's certificate after the client's handshake: the client sees only
    // a lost connection.
    let key = jiffy_fleet::certificates::MemberKey::generate().unwrap();
    let id = super::members::fleet();
    let now = SystemTime::now();
    let foreign = theirs.0.issue(&id, CLIENT, &key.request, now, DAY).unwrap();
    let identity =
        jiffy_fleet::channel::Identity::new(id, ours.0.certificate(), &foreign, &key.key).unwrap();
    let error = host
        .message(&Client::new(identity), "who")
        .await
        .unwrap_err();
    assert!(error.contains("lost the connection"), "{error}");
    assert_eq!(host.calls(), 0);
}

#[tokio::test]
async fn expired_certificates_are_rejected_in_both_directions() {
    let fleet = Fleet::new();
    let past = SystemTime::now() - 2 * DAY;
    let expired = |member| fleet.identity_valid(member, past, DAY);
    let host = Host::start(expired(SERVER)).await;
    let error = host.message(&fleet.client(), "who").await.unwrap_err();
    assert!(
        error.contains("Untrusted") && error.contains("expired"),
        "{error}"
    );

    let host = Host::start(fleet.identity(SERVER)).await;
    let client = Client::new(expired(CLIENT));
    let error = host.message(&client, "who").await.unwrap_err();
    assert!(error.contains("lost the connection"), "{error}");
    assert_eq!(host.calls(), 0);
}

#[tokio::test]
async fn a_certificate_that_expires_ends_the_use_of_open_connections() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let now = SystemTime::now();
    let identity = fleet.identity_valid(CLIENT, now, Duration::from_secs(3));
    let client = Client::new(identity.clone());
    assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
    while identity.expires() > SystemTime::now() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let error = host.message(&client, "who").await.unwrap_err();
    assert!(error.contains("expired"), "{error}");
}

#[tokio::test]
async fn another_member_at_the_address_is_reported() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let sent = client
        .message(
            MemberId(3),
            &host.address,
            "/message",
            Bytes::from("x"),
            LIMIT,
        )
        .await;
    let error = sent.unwrap_err();
    assert!(
        matches!(error, ChannelError::OtherMember { .. }) && error.is_unsent(),
        "{error:?}"
    );
    assert_eq!(host.calls(), 0);
}

#[tokio::test]
async fn a_removed_member_is_not_served() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = Client::new(fleet.identity(REMOVED));
    let error = host.message(&client, "who").await.unwrap_err();
    assert!(error.contains("h9 was removed from the fleet"), "{error}");
    assert_eq!(host.calls(), 0);
}

#[tokio::test]
async fn a_renewed_certificate_is_used_for_the_next_connection() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let past = SystemTime::now() - 2 * DAY;
    let identity = fleet.identity_valid(CLIENT, past, DAY);
    let client = Client::new(identity.clone());
    host.message(&client, "who").await.unwrap_err();
    let request = identity.renewal_request().unwrap();
    let issue = |member| {
        let id = super::members::fleet();
        fleet
            .0
            .issue(&id, member, &request, SystemTime::now(), DAY)
            .unwrap()
    };
    // A certificate of another member is rejected.
    assert!(identity.renew(&issue(MemberId(3))).is_err());
    identity.renew(&issue(CLIENT)).unwrap();
    assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
}

#[tokio::test]
async fn a_peer_without_certificate_can_only_join() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let fingerprint = authority_fingerprint(fleet.0.certificate()).unwrap();
    let answer = join(&host.address, fingerprint, Bytes::from("hello"), LIMIT).await;
    assert_eq!(answer.unwrap(), "hello");
    for path in ["/message", "/requests/body", "/", "/join/x"] {
        let status = anonymous(&host.address, path).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}");
    }
    assert_eq!(host.calls(), 0);
    assert_eq!(host.echo.joins.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_host_joins_only_the_fleet_of_its_token() {
    let (fleet, other) = (Fleet::new(), Fleet::new());
    let host = Host::start(fleet.identity(SERVER)).await;
    let fingerprint = authority_fingerprint(other.0.certificate()).unwrap();
    let answer = join(&host.address, fingerprint, Bytes::from("secret"), LIMIT).await;
    let error = answer.unwrap_err();
    assert!(matches!(error, JoinError::Untrusted { .. }), "{error}");
    assert_eq!(host.echo.joins.load(Ordering::SeqCst), 0);
}

/// Sends a request without a certificate, and returns the status.
async fn anonymous(address: &str, path: &str) -> StatusCode {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("any.example").unwrap();
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .unwrap();
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let mut request = Request::new(empty_body());
    *request.uri_mut() = format!("https://any.example{path}").parse().unwrap();
    *request.method_mut() = hyper::Method::POST;
    sender.send_request(request).await.unwrap().status()
}

/// Trusts all servers.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
