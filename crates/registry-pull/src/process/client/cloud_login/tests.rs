//! Logins at a local server that implements the APIs of Amazon ECR and Google, verifies the
//! signatures, and is the registry as well.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::*;
use crate::{Cancel, ConnectionGate, PullError, PullTarget, Puller, PullerProgram, Registries};
use ring::signature::{KeyPair, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;

/// Secret access key of Amazon's documentation.
const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
/// Manifest that the registry returns for each image.
const MANIFEST: &str = "{\"schemaVersion\":2}";

/// Server of one test.
struct Cloud {
    address: String,
    /// Public key of the service account, in DER.
    public_key: Vec<u8>,
}

/// A received request.
struct Received {
    line: String,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Cloud {
    /// Starts the server on a free port.
    fn start(public_key: Vec<u8>) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let cloud = Arc::new(Self {
            address: listener.local_addr().unwrap().to_string(),
            public_key,
        });
        let server = cloud.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || server.serve(stream));
            }
        });
        cloud
    }

    /// Receives a request, and sends its answer.
    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        if lines.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let mut headers = BTreeMap::new();
        loop {
            let mut header = String::new();
            lines.read_line(&mut header).unwrap();
            let Some((name, value)) = header.trim().split_once(':') else {
                break;
            };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let length = headers
            .get("content-length")
            .map_or(0, |l| l.parse().unwrap());
        let mut body = vec![0; length];
        lines.read_exact(&mut body).unwrap();
        let received = Received {
            line: line.trim().to_owned(),
            headers,
            body: String::from_utf8(body).unwrap(),
        };
        let (status, more, body) = self.answer(&received);
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status}\r\n{more}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        // Ignore a disconnected client.
        let _ = stream.write_all(answer.as_bytes());
    }

    /// Returns status, additional headers and body of the answer. Amazon's API has the path `/`,
    /// and Google's `/token`. The registry has the paths below `/v2/`.
    fn answer(&self, request: &Received) -> (&'static str, String, String) {
        let authorization = request.headers.get("authorization").map(String::as_str);
        let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
        let address = &self.address;
        let aws = basic("AWS:ecr-password");
        let google = basic("oauth2accesstoken:google-token");
        let denied = |challenge: String| {
            let challenge = format!("WWW-Authenticate: {challenge}\r\n");
            ("401 Unauthorized", challenge, String::new())
        };
        let ok = |body: String| ("200 OK", String::new(), body);
        match request.line.as_str() {
            "POST / HTTP/1.1" if aws_is_signed(request) => {
                let token = STANDARD.encode("AWS:ecr-password");
                ok(format!(
                    "{{\"authorizationData\":[{{\"authorizationToken\":\"{token}\",\
                     \"expiresAt\":1.5E9,\"proxyEndpoint\":\"x\"}}]}}"
                ))
            }
            "POST / HTTP/1.1" => ("400 Bad Request", String::new(), String::new()),
            "POST /token HTTP/1.1" if self.google_is_signed(request) => ok(
                "{\"access_token\":\"google-token\",\"expires_in\":3599,\"token_type\":\"Bearer\"}"
                    .to_owned(),
            ),
            "POST /token HTTP/1.1" => ("400 Bad Request", String::new(), String::new()),
            line if line.starts_with("GET /v2/aws/") && authorization == Some(&aws) => {
                ok(MANIFEST.to_owned())
            }
            line if line.starts_with("GET /v2/gcp/") && authorization == Some("Bearer pull") => {
                ok(MANIFEST.to_owned())
            }
            line if line.starts_with("GET /v2/token?") && authorization == Some(&google) => {
                ok("{\"token\":\"pull\"}".to_owned())
            }
            line if line.starts_with("GET /v2/gcp/") => denied(format!(
                "Bearer realm=\"http://{address}/v2/token\",service=\"s\""
            )),
            _ => denied("Basic realm=\"x\"".to_owned()),
        }
    }

    /// Verifies the assertion as Google does.
    fn google_is_signed(&self, request: &Received) -> bool {
        let grant = "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion=";
        let Some(assertion) = request.body.strip_prefix(grant) else {
            return false;
        };
        let (signed, signature) = assertion.rsplit_once('.').unwrap();
        let signature = URL_SAFE_NO_PAD.decode(signature).unwrap();
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &self.public_key);
        let (head, claims) = signed.split_once('.').unwrap();
        let json = |part: &str| {
            serde_json::from_slice::<serde_json::Value>(&URL_SAFE_NO_PAD.decode(part).unwrap())
                .unwrap()
        };
        let (head, claims) = (json(head), json(claims));
        key.verify(signed.as_bytes(), &signature).is_ok()
            && head == json!({ "alg": "RS256", "typ": "JWT", "kid": "k1" })
            && claims["iss"] == "puller@project.example"
            && claims["aud"] == format!("http://{}/token", self.address)
            && claims["exp"].as_u64() > Some(now())
    }

    /// Pulls the manifest `1` of a repository.
    fn pull(&self, repository: &str, login: RegistryLogin) -> Result<Vec<u8>, PullError> {
        let registries = Registries {
            plain_http: vec![self.address.clone()],
            program: PullerProgram::Thread,
            ..Registries::default()
        };
        let cancel = Cancel::new().unwrap();
        let pull = registries.pull(false, &cancel);
        let target = PullTarget {
            registry: self.address.clone(),
            repository: repository.to_owned(),
            plain_http: registries.plain_http.clone(),
            login: Some(login),
        };
        let gate = ConnectionGate::new(&pull, &self.address).unwrap();
        let mut puller = Puller::start(PullerProgram::Thread, target, gate, &cancel).unwrap();
        puller.manifest("1", 1000)
    }
}

/// Recomputes the signature of a request to Amazon from the request as it was received.
fn aws_is_signed(request: &Received) -> bool {
    let header = |name: &str| request.headers.get(name).cloned().unwrap_or_default();
    let headers = [
        ("content-type", header("content-type")),
        ("host", header("host")),
        ("x-amz-date", header("x-amz-date")),
        ("x-amz-target", header("x-amz-target")),
    ];
    let key = ("AKIDEXAMPLE", SECRET);
    header("x-amz-target") == AWS_TARGET
        && header("authorization") == aws_signature(key, "eu-west-1", "/", &headers, &request.body)
}

/// Returns a login at Amazon ECR with this secret access key.
fn aws(cloud: &Cloud, secret: &str) -> RegistryLogin {
    RegistryLogin::Aws {
        access_key_id: "AKIDEXAMPLE".to_owned(),
        secret_access_key: secret.to_owned(),
        region: "eu-west-1".to_owned(),
        endpoint: format!("http://{}", cloud.address),
    }
}

/// Returns whether the registry or the cloud rejected the credentials.
fn is_unauthorized(result: Result<Vec<u8>, PullError>) -> bool {
    matches!(result, Err(PullError::Fault(PullFault::Unauthorized)))
}

#[test]
fn a_password_of_amazon_is_requested_with_a_signature() {
    let cloud = Cloud::start(Vec::new());
    assert_eq!(
        cloud.pull("aws", aws(&cloud, SECRET)).unwrap(),
        MANIFEST.as_bytes()
    );
    assert!(is_unauthorized(cloud.pull("aws", aws(&cloud, "wrong"))));
}

#[test]
fn a_token_of_google_is_requested_with_a_signed_assertion() {
    let key = || {
        let mut command = Command::new("openssl");
        command.args([
            "genpkey",
            "-algorithm",
            "RSA",
            "-pkeyopt",
            "rsa_keygen_bits:2048",
        ]);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let (own, other) = (key(), key());
    let base64: String = own.lines().filter(|line| !line.starts_with('-')).collect();
    let pair = RsaKeyPair::from_pkcs8(&STANDARD.decode(base64).unwrap()).unwrap();
    let cloud = Cloud::start(pair.public_key().as_ref().to_vec());
    let login = |key: &str| {
        let account = json!({
            "type": "service_account", "client_email": "puller@project.example",
            "private_key": key, "private_key_id": "k1",
            "token_uri": format!("http://{}/token", cloud.address),
        });
        RegistryLogin::Gcp {
            service_account: account.to_string(),
        }
    };
    assert_eq!(cloud.pull("gcp", login(&own)).unwrap(), MANIFEST.as_bytes());
    assert!(is_unauthorized(cloud.pull("gcp", login(&other))));
    for bad in ["", "no key"] {
        let refused = cloud.pull("gcp", login(bad)).unwrap_err().to_string();
        assert!(refused.contains("no valid RSA key"), "{refused}");
    }
}

#[test]
fn times_have_the_form_of_aws() {
    assert_eq!(aws_time(0), "19700101T000000Z");
    assert_eq!(aws_time(951_782_400), "20000229T000000Z");
    assert_eq!(aws_time(1_795_856_461), "20261128T090101Z");
    assert_eq!(aws_time(1_440_938_160), "20150830T123600Z");
}

/// Compares with a signature that botocore 1.44 computed for the same request.
#[test]
fn signatures_equal_those_of_botocore() {
    let headers = [
        ("content-type", AWS_CONTENT_TYPE.to_owned()),
        ("host", "api.ecr.eu-west-1.amazonaws.com".to_owned()),
        ("x-amz-date", "20150830T123600Z".to_owned()),
        ("x-amz-target", AWS_TARGET.to_owned()),
    ];
    let key = ("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY");
    let signed = aws_signature(key, "eu-west-1", "/", &headers, "{}");
    assert_eq!(
        signed,
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/eu-west-1/ecr/aws4_request, \
         SignedHeaders=content-type;host;x-amz-date;x-amz-target, Signature=ce953a52a1215175c49d9a611ae10b5db817f776f0ad5d2a6ff9b0198dd390bc"
    );
}
