//! TLS at the listener.

use crate::support;

use axum::Router;
use axum::routing::any;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use jiffy_gateway::{SandboxAccess, Tls};
use std::path::Path;
use std::sync::Arc;
use support::client::{Http1, Http2, Raw, body, get, send_request};
use support::guest::Guests;
use support::{DOMAIN, ID, Setup, collected, config, with_timeout};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Returns a server that responds with the protocol of the client and the URI.
fn echo_router() -> Router {
    Router::new().fallback(any(|request: axum::extract::Request| async move {
        let proto = request.headers().get("x-forwarded-proto").unwrap();
        format!("{:?} {}", proto, request.uri())
    }))
}

/// Returns a sandbox with this server.
fn echo_request() -> Guests {
    Guests::one(ID, 3000, echo_router())
}

/// Returns an acceptor with a generated certificate, whose authority no client trusts.
fn acceptor() -> TlsAcceptor {
    let directory = tempfile::tempdir().unwrap();
    Tls::generated(directory.path(), &[]).unwrap();
    let chain = CertificateDer::pem_file_iter(directory.path().join("certificate.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(directory.path().join("key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.map(Result::unwrap).collect(), key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// Connects as a client that trusts only `trust`.
async fn connect(
    setup: &Setup,
    trust: &Path,
    name: &str,
    alpn: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(trust).unwrap())
        .unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    let stream = TcpStream::connect(setup.address).await.unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    with_timeout(TlsConnector::from(Arc::new(config)).connect(name, stream)).await
}

#[tokio::test]
async fn a_client_that_trusts_the_generated_authority_is_served_with_either_protocol() {
    let directory = tempfile::tempdir().unwrap();
    let tls = Tls::generated(directory.path(), &config().domains).unwrap();
    let trust = tls.trust().unwrap().to_owned();
    let setup = Setup::with(config(), &echo_request(), Some(tls)).await;
    let host = format!("3000-{ID}.{DOMAIN}");
    for name in [&host[..], DOMAIN, "localhost", "127.0.0.1"] {
        let stream = connect(&setup, &trust, name, b"http/1.1").await.unwrap();
        let request = hyper::Request::builder()
            .uri("/one")
            .header("host", &host)
            .body(body(""))
            .unwrap();
        let answer = Http1::over(stream).await.send(request).await;
        assert_eq!(collected(answer.into_body()).await, "\"https\" /one");
    }
    let stream = connect(&setup, &trust, &host, b"h2").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let request = hyper::Request::builder()
        .uri(format!("https://{host}/two"))
        .body(body(""))
        .unwrap();
    let answer = Http2::over(stream).await.send(request).await;
    assert_eq!(collected(answer.into_body()).await, "\"https\" /two");
    assert!(
        connect(&setup, &trust, "other.example", b"h2")
            .await
            .is_err(),
        "it is not valid for other names"
    );
}

#[tokio::test]
async fn a_certificate_from_files_is_used_and_an_error_names_the_invalid_file() {
    let directory = tempfile::tempdir().unwrap();
    // A domain with a single label gets no wildcard, which would invalidate the certificate.
    let generated = Tls::generated(directory.path(), &["intranet".to_owned()]).unwrap();
    let trust = generated.trust().unwrap().to_owned();
    let certificate = directory.path().join("certificate.pem");
    let key = directory.path().join("key.pem");
    let tls = Tls::from_files(&certificate, &key).unwrap();
    // Only a generated authority has a file that clients must trust.
    assert_eq!(tls.trust(), None);
    let setup = Setup::with(config(), &echo_request(), Some(tls)).await;
    for name in ["localhost", "intranet"] {
        connect(&setup, &trust, name, b"h2").await.unwrap();
    }
    // A key in place of the certificate, a certificate in place of the key, and the certificate of
    // the authority, to which the key does not belong.
    for (certificate, key) in [(&key, &key), (&certificate, &certificate), (&trust, &key)] {
        let error = Tls::from_files(certificate, key).unwrap_err().to_string();
        assert!(error.contains(".pem"), "{error}");
    }
    let missing = Tls::from_files(Path::new("/nowhere.pem"), &key).unwrap_err();
    assert!(missing.to_string().contains("/nowhere.pem"));
}

#[tokio::test]
async fn a_client_without_tls_is_counted_and_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let tls = Tls::generated(directory.path(), &[]).unwrap();
    let mut config = config();
    config.limits.handshake = std::time::Duration::from_millis(200);
    let setup = Setup::with(config, &echo_request(), Some(tls)).await;
    let mut plain = Raw::new(setup.address).await;
    plain.write_text("GET / HTTP/1.1\r\n\r\n").await;
    plain.rest().await;
    // A client that sends nothing is disconnected, too.
    Raw::new(setup.address).await.rest().await;
    setup
        .wait_for_counters(|t| t.handshakes_failed == 2 && t.connections_open == 0)
        .await;
}

#[tokio::test]
async fn only_https_ports_receive_tls_with_a_certificate_of_any_authority() {
    let guests = echo_request();
    let access = |https_ports: Vec<u16>, mask: Option<&str>| SandboxAccess {
        https_ports,
        mask_request_host: mask.map(str::to_owned),
        ..SandboxAccess::default()
    };
    guests.add(ID, access(vec![8443, 9000], None));
    let (acceptor, (names, mut server_names)) = (acceptor(), mpsc::unbounded_channel());
    guests.program(ID, 8443, move |stream| {
        let (acceptor, names) = (acceptor.clone(), names.clone());
        async move {
            let Ok(stream) = acceptor.accept(stream).await else {
                return;
            };
            let name = stream.get_ref().1.server_name().map(str::to_owned);
            names.send(name).unwrap();
            let service = TowerToHyperService::new(echo_router());
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        }
    });
    guests.web(ID, 9000, echo_router());
    let setup = Setup::new(&guests).await;
    let answer = |port| send_request(setup.address, get(port, "/x"));
    let plain = (200, "\"http\" /x".to_owned());
    // The second request uses the connection of the first one.
    assert_eq!(answer(8443).await, plain);
    assert_eq!(answer(8443).await, plain);
    assert_eq!(guests.opened_count(), 1);
    assert_eq!(server_names.recv().await.unwrap().unwrap(), "localhost");
    assert_eq!(answer(3000).await, plain);
    // A masked host is also the name in the handshake.
    guests.add(
        ID,
        access(vec![8443, 9000], Some("${PORT}-app.example:${PORT}")),
    );
    setup.pool.invalidate(ID);
    assert_eq!(answer(8443).await, plain);
    let name = server_names.recv().await.unwrap().unwrap();
    assert_eq!(name, "8443-app.example");
    let (status, text) = answer(9000).await;
    assert!(status == 502 && text.contains("httpsPorts"), "{text}");
    // After a change, no idle connection of the other protocol is used.
    guests.add(ID, access(vec![9000], None));
    assert_eq!(answer(8443).await.0, 502);
}
