//! Registries whose answers a test defines.
//!
//! The *puller* is the confined process that downloads images from registries. The *diff id* of a
//! layer is the digest of its uncompressed archive.

use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

/// Requests received by a server: method and path, or `connection` before the first request.
pub type Seen = Arc<Mutex<Vec<String>>>;

/// Serves until the test program exits. Every request has its own connection.
pub fn serve(
    listener: TcpListener,
    answer: impl Fn(&Request, &mut dyn Write) + Send + Sync + 'static,
) -> Seen {
    serve_with(listener, Some, answer)
}

/// Like [`serve`], over TLS with a certificate for `name` of the authority in the file `authority`.
pub fn serve_tls(
    listener: TcpListener,
    name: &str,
    authority: &Path,
    answer: impl Fn(&Request, &mut dyn Write) + Send + Sync + 'static,
) -> Seen {
    let created = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
    fs::write(authority, created.cert.pem()).unwrap();
    let key = PrivatePkcs8KeyDer::from(created.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![created.cert.der().clone()], key.into())
        .unwrap();
    let config = Arc::new(config);
    let greet = move |stream| {
        let connection = ServerConnection::new(config.clone()).unwrap();
        Some(StreamOwned::new(connection, stream))
    };
    serve_with(listener, greet, answer)
}

/// Serves streams that `greet` returns for accepted connections, for example after a TLS handshake.
fn serve_with<S: Read + Write + 'static>(
    listener: TcpListener,
    greet: impl Fn(TcpStream) -> Option<S> + Send + Sync + 'static,
    answer: impl Fn(&Request, &mut dyn Write) + Send + Sync + 'static,
) -> Seen {
    let seen = Seen::default();
    let (requests, both) = (seen.clone(), Arc::new((greet, answer)));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (requests, both) = (requests.clone(), both.clone());
            requests.lock().unwrap().push("connection".to_owned());
            thread::spawn(move || {
                let (greet, answer) = &*both;
                let mut stream = greet(stream)?;
                let request = Request::read(&mut stream)?;
                let line = format!("{} {}", request.method, request.path);
                requests.lock().unwrap().push(line);
                answer(&request, &mut stream);
                let _ = stream.flush();
                Some(())
            });
        }
    });
    seen
}

/// Request of a puller.
pub struct Request {
    pub method: String,
    pub path: String,
    pub head: String,
}

impl Request {
    /// Reads the head of a request.
    fn read(stream: &mut impl Read) -> Option<Self> {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let first = lines.next()?;
        let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let mut words = first.split(' ');
        Some(Self {
            method: words.next()?.to_owned(),
            path: words.next()?.to_owned(),
            head: head.join("\n"),
        })
    }
}

/// Sends a complete answer. A disconnected client is ignored.
pub fn send(stream: &mut dyn Write, status: &str, headers: &str, body: &[u8]) {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
    );
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(body);
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// Image of one uncompressed layer: blob digest and diff id are equal.
pub struct Image {
    pub layer: Vec<u8>,
    pub config: Vec<u8>,
    pub manifest: Vec<u8>,
}

impl Image {
    /// Creates an image of one file.
    pub fn of_file(name: &str, content: &[u8]) -> Self {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        tar.append_data(&mut header, name, content).unwrap();
        let layer = tar.into_inner().unwrap();
        let digest = sha256(&layer);
        Self::naming(layer, &digest, &digest)
    }

    /// Creates an image with these digests for its layer.
    pub fn naming(layer: Vec<u8>, digest: &str, diff_id: &str) -> Self {
        Self::described(
            layer,
            digest,
            json!({
                "os": "linux", "architecture": "amd64", "config": {},
                "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{diff_id}")] },
            }),
        )
    }

    /// Creates another image of the same layer.
    pub fn with_environment(&self, variable: &str) -> Self {
        let mut config: Value = serde_json::from_slice(&self.config).unwrap();
        config["config"]["Env"] = json!([variable]);
        Self::described(self.layer.clone(), &sha256(&self.layer), config)
    }

    /// Creates an image with this configuration, whose manifest states this digest of the layer.
    fn described(layer: Vec<u8>, digest: &str, config: Value) -> Self {
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": format!("sha256:{}", sha256(&config)), "size": config.len(),
            },
            "layers": [{
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": format!("sha256:{digest}"), "size": layer.len(),
            }],
        });
        Self {
            layer,
            config,
            manifest: manifest.to_string().into_bytes(),
        }
    }

    /// Returns its documents and its layer by their paths in repository `name`.
    pub fn pages(&self, name: &str) -> HashMap<String, Vec<u8>> {
        let mut pages = self.documents(name);
        pages.insert(self.layer_path(name), self.layer.clone());
        pages
    }

    pub fn documents(&self, name: &str) -> HashMap<String, Vec<u8>> {
        self.documents_of(name, "1")
    }

    /// Returns its documents under a tag.
    pub fn documents_of(&self, name: &str, tag: &str) -> HashMap<String, Vec<u8>> {
        let config = format!("/v2/{name}/blobs/sha256:{}", sha256(&self.config));
        HashMap::from([
            (format!("/v2/{name}/manifests/{tag}"), self.manifest.clone()),
            (config, self.config.clone()),
        ])
    }

    pub fn layer_path(&self, name: &str) -> String {
        format!("/v2/{name}/blobs/sha256:{}", sha256(&self.layer))
    }
}

/// Answers with a page, or with 404.
pub fn page(pages: &HashMap<String, Vec<u8>>, request: &Request, stream: &mut dyn Write) {
    match pages.get(&request.path) {
        Some(body) => send(stream, "200 OK", "", body),
        None => send(stream, "404 Not Found", "", b""),
    }
}
