//! Company network in a lab's internet: servers with certificates of a custom authority, and a
//! proxy.

use crate::support::lab::Lab;
use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// Answer of every server.
pub const HELLO: &str = "hello from the company";
/// Address of servers for all names: the lab's name server answers only with this address.
const SERVERS: &str = "9.9.9.9";
/// Address of the proxy.
pub const PROXY: &str = "8.8.8.8:3128";
/// Commit of the served Git repository.
const COMMIT: &str = "0123456789012345678901234567890123456789";

/// Certificate authority.
pub struct TestAuthority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl TestAuthority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::OrganizationName, "Test  Company");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// Issues a certificate for these names. Returns the certificate and its key.
    pub fn issue(&self, names: &[&str]) -> (Certificate, KeyPair) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let params = CertificateParams::new(names).unwrap();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// Returns the TLS settings of a server with these names.
    pub fn server(&self, names: &[&str]) -> ServerConfig {
        let (certificate, key) = self.issue(names);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            )
            .unwrap()
    }

    /// Serves HTTPS under these names at a port of the lab's internet.
    pub fn serve(&self, lab: &Lab, names: &[&str], port: u16) {
        let config = Arc::new(self.server(names));
        accept(lab, &format!("{SERVERS}:{port}"), move |stream| {
            let connection = ServerConnection::new(config.clone()).unwrap();
            answer(StreamOwned::new(connection, stream))
        });
    }
}

/// Serves a proxy. Returns its requests: `CONNECT host:port` or `GET url`.
pub fn serve_proxy(lab: &Lab) -> Arc<Mutex<Vec<String>>> {
    let seen = Arc::<Mutex<Vec<String>>>::default();
    let requests = seen.clone();
    accept(lab, PROXY, move |stream| {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let line = head(&mut reader)?;
        let (request, _) = line.rsplit_once(' ')?;
        requests.lock().unwrap().push(request.to_owned());
        let mut stream = stream;
        let Some(target) = request.strip_prefix("CONNECT ") else {
            let body = "through the proxy";
            let length = body.len();
            return write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            )
            .ok();
        };
        let (_, port) = target.rsplit_once(':')?;
        let server = TcpStream::connect((SERVERS, port.parse().ok()?)).ok()?;
        write!(stream, "HTTP/1.1 200 Connection established\r\n\r\n").ok()?;
        let (from, to) = (server.try_clone().ok()?, stream.try_clone().ok()?);
        let back = thread::spawn(move || pass(from, &to));
        pass(stream, &server);
        back.join().ok()
    });
    seen
}

fn pass(mut from: TcpStream, mut to: &TcpStream) {
    // When one side closes, close the other side.
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// Serves each connection to an address of the lab's internet in a thread of its own.
fn accept(
    lab: &Lab,
    address: &str,
    serve: impl Fn(TcpStream) -> Option<()> + Send + Sync + 'static,
) {
    let serve = Arc::new(serve);
    lab.in_internet(|| {
        let listener = TcpListener::bind(address).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let serve = serve.clone();
                thread::spawn(move || serve(stream));
            }
        });
    });
}

/// Reads the head of a request. Returns its first line.
fn head(reader: &mut impl BufRead) -> Option<String> {
    let mut lines = reader.lines().map_while(Result::ok);
    let first = lines.next()?;
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    Some(first)
}

/// Answers one request with a page, or with files of a git repository.
fn answer(mut stream: impl Read + Write) -> Option<()> {
    let line = head(&mut BufReader::new(&mut stream))?;
    let path = line.split(' ').nth(1)?;
    let body = match path.split('?').next()? {
        "/repo.git/info/refs" => format!("{COMMIT}\trefs/heads/main\n"),
        "/repo.git/HEAD" => "ref: refs/heads/main\n".to_owned(),
        _ => HELLO.to_owned(),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .ok()?;
    stream.flush().ok()
}
