//! Tests of connections through a SOCKS5 proxy that requires TLS, is silent, or lacks its
//! credentials.

#![allow(clippy::unwrap_used)]
use super::*;
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::TlsAcceptor;

/// Reply of a proxy that has connected: version, success, reserved byte, and the IPv4 address
/// 0.0.0.0 with port 0.
const REPLY: [u8; 10] = [5, 0, 0, 1, 0, 0, 0, 0, 0, 0];

/// Returns the certificate of a proxy (PEM) and an acceptor of its connections.
fn certificate(name: &str) -> (String, TlsAcceptor) {
    let signed = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der());
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let settings = builder
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], PrivateKeyDer::from(key));
    (
        signed.cert.pem(),
        TlsAcceptor::from(Arc::new(settings.unwrap())),
    )
}

fn proxy(tls: Option<EgressProxyTls>) -> EgressProxy {
    EgressProxy {
        address: "proxy.example:1080".to_owned(),
        tls,
        sealed_credentials: None,
    }
}

/// Connects through a proxy whose certificate is for `certified`. Returns the first bytes of the
/// server.
async fn through_tls(
    certified: &str,
    tls: impl FnOnce(String) -> EgressProxyTls,
) -> Option<String> {
    let (pem, acceptor) = certificate(certified);
    let (ours, theirs) = duplex(64 * 1024);
    let served = tokio::spawn(async move {
        let mut stream = acceptor.accept(theirs).await.ok()?;
        // Greeting of the client (3 bytes), the method without a password (5, 0), and the request:
        // 7 bytes and the name.
        let mut greeting = [0; 3];
        stream.read_exact(&mut greeting).await.ok()?;
        stream.write_all(&[5, 0]).await.ok()?;
        stream.flush().await.ok()?;
        let mut request = [0; 7 + "a.example".len()];
        stream.read_exact(&mut request).await.ok()?;
        let answers = [&REPLY[..], b"hello"].concat();
        stream.write_all(&answers).await.ok()?;
        stream.shutdown().await.ok()
    });
    let connector = SocksConnector::new(None, &[]);
    let proxy = proxy(Some(tls(pem)));
    let target = EgressTarget::Name("a.example", 443);
    let opened = connector
        .open_tunnel(Box::new(ours), &proxy, None, target)
        .await;
    let mut text = String::new();
    match opened {
        Some(mut stream) => stream.read_to_string(&mut text).await.ok()?,
        None => return None,
    };
    served.await.unwrap()?;
    Some(text)
}

#[tokio::test]
async fn the_certificate_of_a_proxy_is_verified() {
    let tls = |server_name: Option<&str>| {
        let server_name = server_name.map(str::to_owned);
        move |pem| EgressProxyTls {
            server_name,
            ca_certificates: Some(pem),
        }
    };
    let hello = Some("hello".to_owned());
    assert_eq!(through_tls("proxy.example", tls(None)).await, hello);
    assert_eq!(
        through_tls("other.example", tls(Some("other.example"))).await,
        hello
    );
    assert_eq!(through_tls("other.example", tls(None)).await, None);
    assert_eq!(
        through_tls("proxy.example", tls(Some("other.example"))).await,
        None
    );
    // The authorities of the host do not include the certificate.
    let unknown = |_| EgressProxyTls::default();
    assert_eq!(through_tls("proxy.example", unknown).await, None);
}

#[tokio::test]
async fn without_readable_credentials_nothing_is_sent() {
    let home = tempfile::tempdir().unwrap();
    let key = HostKey::open(home.path()).unwrap();
    let credentials = ProxyCredentials {
        username: "user".to_owned(),
        password: "password".to_owned(),
    };
    let sealed = credentials.seal(&key, "a").unwrap();
    let proxy = EgressProxy {
        sealed_credentials: Some(sealed),
        ..proxy(None)
    };
    let target = || EgressTarget::Name("a.example", 443);
    for (key, owner) in [(Some(key.clone()), "b"), (None, "a")] {
        let (ours, mut theirs) = duplex(4096);
        let connector = SocksConnector::new(key, &[]);
        let opened = connector.open_tunnel(Box::new(ours), &proxy, Some(owner), target());
        assert!(opened.await.is_none());
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).await.unwrap();
        assert!(sent.is_empty());
    }
    let (ours, mut theirs) = duplex(4096);
    // The proxy selects user name and password (5, 2), accepts them (1, 0), and connects.
    let answers = [&[5, 2, 1, 0][..], &REPLY].concat();
    theirs.write_all(&answers).await.unwrap();
    let connector = SocksConnector::new(Some(key), &[]);
    let opened = connector
        .open_tunnel(Box::new(ours), &proxy, Some("a"), target())
        .await;
    assert!(opened.is_some());
    // 3 bytes of the greeting, and 15 bytes with user name and password.
    let mut sent = [0; 18];
    theirs.read_exact(&mut sent).await.unwrap();
    let expected = [&[5, 1, 2, 1, 4][..], b"user", &[8], b"password"].concat();
    assert_eq!(sent, *expected);
}

#[tokio::test(start_paused = true)]
async fn a_silent_proxy_times_out() {
    for tls in [None, Some(EgressProxyTls::default())] {
        let (ours, _theirs) = duplex(4096);
        let connector = SocksConnector::new(None, &[]);
        let (proxy, target) = (proxy(tls), EgressTarget::Name("a.example", 443));
        let opened = connector
            .open_tunnel(Box::new(ours), &proxy, None, target)
            .await;
        assert!(opened.is_none());
    }
}
