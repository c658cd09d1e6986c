//! Fixture of the tests: [`Lab`] has a server with its own certificate authority, and a proxy whose
//! connections lead to it. A test opens connections to the proxy like the guest of a sandbox. The
//! proxy adds the value of a secret to requests for [`HOST`].

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiffy_api_types::{HeaderRule, IdentityToken, IdentityTokenType};
use jiffy_engine_api::{HeaderRules, HeaderUse, RefusalReason, Workload};
use jiffy_header_proxy::{HeaderProxy, SandboxAuthority};
use jiffy_identity::TokenIssuer;
use jiffy_network::{Connecting, GuestStream, HeaderConnection, HeaderInjector, ServerConnector};
use jiffy_secrets::{NewSecret, Secrets};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::DuplexStream;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Name of the server, for which the guest's connections are intended.
pub const HOST: &str = "api.example";
/// Value of the secret `token`.
pub const SECRET: &str = "value-of-the-secret";
/// API key that owns the secret and the sandbox.
pub const OWNER: &str = "alice";

/// Request that the server received.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

pub type Requests = Arc<Mutex<Vec<Seen>>>;

/// Records of the proxy.
#[derive(Clone, Default)]
struct Records {
    uses: Arc<Mutex<Vec<HeaderUse>>>,
    refusals: Arc<Mutex<Vec<RefusalReason>>>,
}

pub struct Lab {
    pub secrets: Secrets,
    pub proxy: Arc<HeaderProxy>,
    pub authority: SandboxAuthority,
    pub server: SocketAddr,
    pub requests: Requests,
    /// Number of bytes of endless bodies that the server has written.
    pub written: Arc<AtomicUsize>,
    records: Records,
    _home: tempfile::TempDir,
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Server of a test.
#[derive(Clone, Copy)]
pub struct ServerKind {
    pub is_tls: bool,
    pub protocols: &'static [&'static [u8]],
    /// True if the proxy knows the authority of the server.
    pub is_trusted: bool,
    /// Name in the certificate.
    pub name: &'static str,
}

impl Default for ServerKind {
    fn default() -> Self {
        Self {
            is_tls: true,
            protocols: &[b"h2", b"http/1.1"],
            is_trusted: true,
            name: HOST,
        }
    }
}

impl Lab {
    pub async fn new(kind: ServerKind) -> Self {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let new = NewSecret {
            name: "token".to_owned(),
            value: SECRET.to_owned().into(),
            metadata: BTreeMap::new(),
        };
        secrets.create(OWNER, &new).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::from_ca_cert_pem(&authority, key).unwrap();
        let leaf_key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![kind.name.to_owned()]).unwrap();
        let leaf = leaf.signed_by(&leaf_key, &issuer).unwrap();
        let requests = Requests::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap();
        let mut tls = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![leaf.der().clone()],
                PrivateKeyDer::from(PrivatePkcs8KeyDer::from(leaf_key.serialize_der())),
            )
            .unwrap();
        tls.alpn_protocols = kind.protocols.iter().map(|p| p.to_vec()).collect();
        let acceptor = kind.is_tls.then(|| TlsAcceptor::from(Arc::new(tls)));
        let written = Arc::<AtomicUsize>::default();
        let state = (requests.clone(), written.clone());
        tokio::spawn(accept(listener, acceptor, state));
        let trusted = if kind.is_trusted {
            vec![authority]
        } else {
            Vec::new()
        };
        let url = "https://issuer.example".parse().unwrap();
        let issuer = TokenIssuer::new(home.path(), secrets.host_key().clone(), url);
        let proxy = HeaderProxy::new(secrets.clone(), &trusted).unwrap();
        Self {
            proxy: Arc::new(proxy.with_issuer(Some(Arc::new(issuer)))),
            authority: SandboxAuthority::generate(secrets.host_key()).unwrap(),
            secrets,
            server,
            requests,
            written,
            records: Records::default(),
            _home: home,
        }
    }

    /// Returns a rule that adds `authorization` with the secret.
    pub fn rule() -> HeaderRule {
        let value = "Bearer ${e2b.secrets.token}".to_owned();
        HeaderRule {
            host: HOST.to_owned(),
            headers: BTreeMap::from([("authorization".to_owned(), value)]),
            ..HeaderRule::default()
        }
    }

    /// Returns a rule that adds `authorization` with this value.
    pub fn rule_with(value: &str) -> HeaderRule {
        HeaderRule {
            headers: BTreeMap::from([("authorization".to_owned(), value.to_owned())]),
            ..Self::rule()
        }
    }

    /// Opens a connection to the proxy, as the network does for a guest.
    pub fn open(&self, rule: HeaderRule, is_tls: bool, owner: &str) -> DuplexStream {
        let (guest, client) = tokio::io::duplex(64 * 1024);
        let token = IdentityToken {
            audience: "sts.example".to_owned(),
            token_type: IdentityTokenType::JwtSvid,
        };
        let connection = HeaderConnection {
            client: Box::new(client),
            host: HOST.to_owned(),
            is_tls,
            rules: Arc::new(HeaderRules {
                rules: vec![rule],
                certificate: self.authority.certificate.clone(),
                sealed_key: self.authority.sealed_key.clone(),
                workload: Some(Workload {
                    sandbox: "sandbox1".to_owned(),
                    owner: Some(owner.to_owned()),
                    template: "base".to_owned(),
                    tokens: BTreeMap::from([("aws".to_owned(), token)]),
                }),
            }),
            owner: Some(owner.to_owned()),
            connector: Arc::new(ToServer(self.server, self.records.clone())),
        };
        let proxy = self.proxy.clone();
        tokio::spawn(async move { proxy.serve(connection).await });
        guest
    }

    /// Opens a TLS connection to the proxy that offers `protocols`. The guest trusts the authority
    /// of the sandbox only.
    pub async fn tls(
        &self,
        rule: HeaderRule,
        protocols: &[&[u8]],
        owner: &str,
    ) -> TlsStream<DuplexStream> {
        self.try_tls(rule, protocols, owner).await.unwrap()
    }

    /// Like [`Self::tls`]. Returns the error of the handshake.
    pub async fn try_tls(
        &self,
        rule: HeaderRule,
        protocols: &[&[u8]],
        owner: &str,
    ) -> std::io::Result<TlsStream<DuplexStream>> {
        let mut roots = RootCertStore::empty();
        let pem = self.authority.certificate.as_bytes();
        roots
            .add(CertificateDer::from_pem_slice(pem).unwrap())
            .unwrap();
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
        let name = ServerName::try_from(HOST).unwrap();
        let stream = self.open(rule, true, owner);
        let connector = TlsConnector::from(Arc::new(config));
        connector.connect(name, stream).await
    }

    /// Returns the requests that the server received.
    pub fn seen(&self) -> Vec<Seen> {
        self.requests.lock().unwrap().clone()
    }

    /// Returns the recorded uses of secrets and tokens.
    pub fn uses(&self) -> Vec<HeaderUse> {
        self.records.uses.lock().unwrap().clone()
    }

    /// Returns the reasons of rejected connections.
    pub fn refusals(&self) -> Vec<RefusalReason> {
        self.records.refusals.lock().unwrap().clone()
    }
}

/// Connector that leads all connections of the proxy to the server, and stores its records.
struct ToServer(SocketAddr, Records);

impl ServerConnector for ToServer {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let stream = TcpStream::connect(self.0).await.ok()?;
            Some(Box::new(stream) as Box<dyn GuestStream>)
        })
    }

    fn used(&self, used: HeaderUse) {
        self.1.uses.lock().unwrap().push(used);
    }

    fn refused(&self, reason: RefusalReason) {
        self.1.refusals.lock().unwrap().push(reason);
    }
}

/// Received requests, and the number of written bytes of endless bodies.
type ServerState = (Requests, Arc<AtomicUsize>);

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, state: ServerState) {
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, state) = (tls.clone(), state.clone());
        tokio::spawn(async move {
            let (stream, is_http2): (Box<dyn GuestStream>, bool) = match tls {
                None => (Box::new(stream), false),
                Some(tls) => {
                    let Ok(stream) = tls.accept(stream).await else {
                        return;
                    };
                    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    (Box::new(stream), is_http2)
                }
            };
            let service = service_fn(move |request| {
                let state = state.clone();
                async move { Ok::<_, Infallible>(answer(request, &state).await) }
            });
            let io = TokioIo::new(stream);
            if is_http2 {
                let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                // Tests count the bytes that leave the server.
                builder.max_send_buf_size(16 * 1024);
                let _ = builder.serve_connection(io, service).await;
            } else {
                let builder = hyper::server::conn::http1::Builder::new();
                let _ = builder.serve_connection(io, service).with_upgrades().await;
            }
        });
    }
}

type Answered = Response<BoxBody<Bytes, Infallible>>;

/// Records a request and answers it, depending on its path. Answers a request for an upgrade with
/// 101, and then returns all bytes of the stream.
async fn answer(mut request: Request<Incoming>, (requests, written): &ServerState) -> Answered {
    let upgrade = request.headers().get(UPGRADE).cloned();
    let switched = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let (head, body) = request.into_parts();
    let collected = body.collect().await.unwrap();
    requests.lock().unwrap().push(Seen {
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        headers: head.headers,
        body: collected.to_bytes(),
    });
    let text = |text: &'static str| Full::new(Bytes::from_static(text.as_bytes())).boxed();
    let mut response = match head.uri.path() {
        "/endless" => Response::new(endless(written.clone())),
        "/large" => Response::new(Full::new(Bytes::from(vec![b'x'; 8 << 20])).boxed()),
        "/events" => {
            let frames = ["data: 1\n\n", "data: 2\n\n"].map(Bytes::from_static_text);
            let mut frames: Vec<_> = frames.into_iter().map(Frame::data).collect();
            let mut trailers = HeaderMap::new();
            trailers.insert("x-end", HeaderValue::from_static("yes"));
            frames.push(Frame::trailers(trailers));
            let stream = tokio_stream(frames);
            let mut response = Response::new(stream);
            let names = HeaderValue::from_static("x-end");
            response.headers_mut().insert("trailer", names);
            response
        }
        "/headers" => {
            let mut response = Response::new(text(""));
            let long = HeaderValue::from_bytes(&vec![b'a'; 30_000]).unwrap();
            // Values of one name are separate lines.
            for _ in 0..10 {
                response.headers_mut().append("x-long", long.clone());
            }
            response
        }
        _ => Response::new(text("answer")),
    };
    // The proxy must remove this offer of another protocol, which would bypass it.
    let alternative = HeaderValue::from_static("h3=\":443\"");
    response.headers_mut().insert("alt-svc", alternative);
    if let (Some(protocol), Some(switched)) = (upgrade, switched) {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.body_mut() = text("");
        let headers = response.headers_mut();
        headers.insert(UPGRADE, protocol);
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        tokio::spawn(async move {
            let mut stream = TokioIo::new(switched.await.unwrap());
            let (mut read, mut write) = tokio::io::split(&mut stream);
            let _ = tokio::io::copy(&mut read, &mut write).await;
        });
    }
    response
}

trait StaticText {
    fn from_static_text(text: &'static str) -> Self;
}

impl StaticText for Bytes {
    fn from_static_text(text: &'static str) -> Self {
        Bytes::from_static(text.as_bytes())
    }
}

fn tokio_stream(frames: Vec<Frame<Bytes>>) -> BoxBody<Bytes, Infallible> {
    let frames = frames.into_iter().map(Ok::<_, Infallible>);
    BodyExt::boxed(StreamBody::new(futures_util::stream::iter(frames)))
}

/// Returns a body without end, which counts the bytes that were taken from it.
fn endless(written: Arc<AtomicUsize>) -> BoxBody<Bytes, Infallible> {
    const PART: usize = 16 * 1024;
    let frames = futures_util::stream::repeat_with(move || {
        written.fetch_add(PART, Ordering::Relaxed);
        Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[0; PART])))
    });
    BodyExt::boxed(StreamBody::new(frames))
}
