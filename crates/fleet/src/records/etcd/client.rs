//! HTTP client of an etcd cluster: endpoints, timeouts, retries and authentication. A *member* is a
//! server of this cluster, not of the fleet.

use super::super::etcd_answer::{Headed, Message, parse};
use super::super::{RecordError, RecordKey};
use super::settings::EtcdSettings;
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use reqwest::header::AUTHORIZATION;
use reqwest::{Certificate, Identity, Response, StatusCode};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Maximum size in bytes of a response: a record in base64, or a page of keys, with room for the
/// JSON around it.
const MAX_ANSWER_BYTES: usize = 2 << 20;
/// Maximum size in bytes of a password file.
const MAX_PASSWORD_BYTES: u64 = 4096;
/// Pause after a failed attempt.
const PAUSE: Duration = Duration::from_millis(50);
/// Part of the quota, in percent, above which the database is reported as nearly full.
const FULL_PERCENT: u64 = 75;
/// Quota of etcd unless it is configured.
const DEFAULT_QUOTA_BYTES: u64 = 2 << 30;

/// Failure of a call.
#[derive(Debug)]
pub(super) enum Failure {
    /// No member responded. A write may have been executed.
    Unavailable(String),
    /// A member rejected the request, which was not executed.
    Rejected(RecordError),
    /// The response came from another cluster than earlier ones.
    Replaced(String),
    /// The response is invalid.
    Damaged(String),
}

impl Failure {
    /// Error of a read. A read changes nothing, so the caller can repeat it.
    pub fn of_read(self, record: &RecordKey) -> RecordError {
        let record = record.clone();
        match self {
            Self::Unavailable(reason) => RecordError::Unavailable { record, reason },
            Self::Rejected(error) => error,
            Self::Replaced(reason) => RecordError::Regressed { record, reason },
            Self::Damaged(reason) => RecordError::Damaged { record, reason },
        }
    }

    /// Error of a write. Without an answer, the write may have happened or not.
    pub fn of_write(self, record: &RecordKey) -> RecordError {
        match self {
            Self::Unavailable(reason) => RecordError::Unknown {
                record: record.clone(),
                reason,
            },
            other => other.of_read(record),
        }
    }
}

/// Client of a cluster.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    endpoints: Vec<String>,
    /// Index of the endpoint that responded last.
    current: AtomicUsize,
    /// User name and password. `None` without authentication.
    user: Option<(String, zeroize::Zeroizing<String>)>,
    /// Token of the user. `None` before the first authentication.
    token: Mutex<Option<String>>,
    /// Id of the cluster. Restoring a backup creates a cluster with another id.
    cluster: Mutex<Option<u64>>,
    /// Highest revision of the cluster that this client has seen.
    revision: AtomicI64,
    /// Maximum duration of one attempt.
    attempt: Duration,
    /// Maximum duration of a call with all its attempts.
    call: Duration,
}

impl Client {
    /// Creates the client. Sends no request.
    pub fn new(settings: &EtcdSettings) -> Result<Self, RecordError> {
        // An error means that another provider is already installed, which is acceptable.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(settings.attempt)
            .timeout(settings.attempt);
        if settings.url.is_tls() {
            let (Some(ca), Some((certificate, key))) = (&settings.ca, &settings.identity) else {
                return Err(RecordError::Unsuitable(
                    "etcd requires --records-ca, --records-cert and --records-key".to_owned(),
                ));
            };
            let authorities = Certificate::from_pem_bundle(&read(ca)?);
            let pem = [read(certificate)?, b"\n".to_vec(), read(key)?].concat();
            let identity = Identity::from_pem(&zeroize::Zeroizing::new(pem));
            http = http
                .https_only(true)
                .tls_certs_only(authorities.map_err(|e| invalid(ca, &e))?)
                .identity(identity.map_err(|e| invalid(certificate, &e))?);
        }
        let http = http.build();
        let user = match &settings.user {
            Some((name, file)) => Some((name.clone(), password(file)?)),
            None => None,
        };
        Ok(Self {
            http: http.map_err(|e| RecordError::Unsuitable(chain(&e)))?,
            endpoints: settings.url.endpoints().collect(),
            current: AtomicUsize::new(0),
            user,
            token: Mutex::default(),
            cluster: Mutex::default(),
            revision: AtomicI64::new(0),
            attempt: settings.attempt,
            call: settings.call,
        })
    }

    /// Sends a request until a member responds or the time of the call is over.
    pub async fn call(&self, path: &str, body: &Value) -> Result<Bytes, Failure> {
        let deadline = Instant::now() + self.call;
        let mut reason = String::new();
        while Instant::now() < deadline {
            let index = self.current.load(Ordering::Relaxed);
            match self.attempt(index, path, body).await {
                Err(Failure::Unavailable(failure)) => {
                    // Another request may have moved to the next member already.
                    let _ = self.current.compare_exchange(
                        index,
                        (index + 1) % self.endpoints.len(),
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    );
                    tracing::debug!(reason = failure, "repeating a request to etcd");
                    reason = failure;
                }
                other => return other,
            }
            // Tests have short attempts, and then a shorter pause.
            sleep(PAUSE.min(self.attempt / 4)).await;
        }
        Err(Failure::Unavailable(reason))
    }

    /// Sends one request to one endpoint. It authenticates before the first request, and learns the
    /// id of the cluster.
    async fn attempt(&self, index: usize, path: &str, body: &Value) -> Result<Bytes, Failure> {
        let endpoint = self.endpoints.get(index).map_or("", String::as_str);
        if self.user.is_some() && self.token.lock().is_none() {
            self.authenticate(endpoint).await?;
        }
        if self.cluster.lock().is_none() {
            // Learn the cluster's id from a read, before the first write. The read requests the key
            // of one zero byte (base64), which does not exist.
            let probe = json!({"key": "AA==", "limit": "1", "keys_only": true});
            self.post_checked(endpoint, "/v3/kv/range", &probe).await?;
        }
        self.post_checked(endpoint, path, body).await
    }

    /// Sends a request. Fails if the response came from another cluster or an older state of the
    /// cluster than earlier responses, as after the restore of a backup.
    async fn post_checked(
        &self,
        endpoint: &str,
        path: &str,
        body: &Value,
    ) -> Result<Bytes, Failure> {
        // Responses to concurrent requests may arrive in any order: compare with the revision that
        // was known before the request was sent.
        let before = self.revision.load(Ordering::SeqCst);
        let answer = self.post(endpoint, path, body).await?;
        let headed: Headed = parse(&answer).map_err(Failure::Damaged)?;
        let header = headed.header.unwrap_or_default();
        let id = header.cluster().map_err(Failure::Damaged)?;
        let revision = header.revision().map_err(Failure::Damaged)?;
        let known = *self.cluster.lock().get_or_insert(id);
        if known != id {
            return Err(Failure::Replaced(format!(
                "the cluster {known:x} was replaced by {id:x}"
            )));
        }
        if revision < before {
            return Err(Failure::Replaced(format!(
                "the cluster returned from revision {before} to {revision}"
            )));
        }
        self.revision.fetch_max(revision, Ordering::SeqCst);
        Ok(answer)
    }

    /// Requests a token for later requests. Does nothing without a user.
    async fn authenticate(&self, endpoint: &str) -> Result<(), Failure> {
        let Some((name, password)) = &self.user else {
            return Ok(());
        };
        let body = json!({"name": name, "password": password.as_str()});
        let answer = self.post(endpoint, "/v3/auth/authenticate", &body).await?;
        let answer: Value = parse(&answer).map_err(Failure::Damaged)?;
        let token = answer.get("token").and_then(Value::as_str);
        let token = token.ok_or_else(|| Failure::Damaged("etcd returned no token".to_owned()))?;
        *self.token.lock() = Some(token.to_owned());
        Ok(())
    }

    /// Sends a request to one endpoint of etcd.
    async fn post(&self, endpoint: &str, path: &str, body: &Value) -> Result<Bytes, Failure> {
        let unavailable =
            |e: reqwest::Error| Failure::Unavailable(format!("{endpoint}: {}", chain(&e)));
        let body = serde_json::to_vec(body).map_err(|e| Failure::Damaged(e.to_string()))?;
        let mut request = self.http.post(format!("{endpoint}{path}")).body(body);
        let token = self.token.lock().clone();
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let answer = request.send().await.map_err(unavailable)?;
        let status = answer.status();
        let body = read_body(answer).await.map_err(|failure| match failure {
            BodyError::Http(e) => unavailable(e),
            BodyError::TooLong => Failure::Damaged("the response is too long".to_owned()),
        })?;
        if status == StatusCode::OK {
            return Ok(body);
        }
        Err(self.rejection(endpoint, status, &Message::decode(&body)))
    }

    /// Classifies a response with an error. The gateway maps gRPC codes to HTTP statuses.
    fn rejection(&self, endpoint: &str, status: StatusCode, message: &Message) -> Failure {
        let text = message.text();
        let reason = format!("{endpoint} responded {status}: {text}");
        if text.contains("invalid auth token") {
            // The token has expired: authenticate again with the next attempt.
            *self.token.lock() = None;
            return Failure::Unavailable(reason);
        }
        let rejected = |error| Failure::Rejected(error);
        match (status.as_u16(), message.code) {
            _ if text.contains("database space exceeded") => rejected(RecordError::Full { reason }),
            _ if text.contains("CommonName") => rejected(RecordError::Unsuitable(format!(
                "{reason}; with authentication enabled, use a client certificate without a common \
                 name, and --records-user"
            ))),
            (404, _) => rejected(RecordError::Unsuitable(format!(
                "{reason}; the HTTP gateway is disabled, or etcd is older than 3.4"
            ))),
            // 7 and 16 are the gRPC codes PERMISSION_DENIED and UNAUTHENTICATED.
            (401 | 403, _) | (_, 7 | 16) => rejected(RecordError::Denied { reason }),
            _ if text.contains("authentication") || text.contains("user name is empty") => {
                rejected(RecordError::Denied { reason })
            }
            // The gateway connects to its own server with the server's certificate.
            _ if text.contains("use of closed network connection")
                || text.contains("bad certificate") =>
            {
                rejected(RecordError::Unsuitable(format!(
                    "{reason}; the certificate of the etcd server must have the extended key usages \
                     serverAuth and clientAuth"
                )))
            }
            (400, _) => rejected(RecordError::Unsuitable(reason)),
            _ => Failure::Unavailable(reason),
        }
    }

    /// Checks the version of etcd, and returns warnings for the operator, for example if its
    /// database is nearly full.
    pub async fn warnings(&self) -> Result<Vec<String>, RecordError> {
        let record: RecordKey = "fleet".parse()?;
        let answer = self.call("/v3/maintenance/status", &json!({})).await;
        let answer = answer.map_err(|failure| failure.of_read(&record))?;
        let damaged = |reason| Failure::Damaged(reason).of_read(&record);
        let status: Value = parse(&answer).map_err(damaged)?;
        let text = |name: &str| status.get(name).and_then(Value::as_str).unwrap_or("0");
        let mut warnings = Vec::new();
        let version = text("version");
        if !is_supported(version) {
            return Err(RecordError::Unsuitable(format!(
                "etcd {version} is older than 3.4"
            )));
        }
        let used: u64 = text("dbSize").parse().unwrap_or(0);
        if used > DEFAULT_QUOTA_BYTES / 100 * FULL_PERCENT {
            warnings.push(format!(
                "the database of etcd has {} MiB, more than {FULL_PERCENT} % of its default quota",
                used >> 20
            ));
        }
        Ok(warnings)
    }
}

/// Returns whether a version is 3.4 or later.
fn is_supported(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor) = (parts.next().flatten(), parts.next().flatten());
    (major, minor) >= (Some(3), Some(4))
}

/// Error of reading the body of a response.
enum BodyError {
    Http(reqwest::Error),
    TooLong,
}

/// Reads the body of a response, of at most [`MAX_ANSWER_BYTES`].
async fn read_body(mut answer: Response) -> Result<Bytes, BodyError> {
    let mut body = BytesMut::new();
    while let Some(piece) = answer.chunk().await.map_err(BodyError::Http)? {
        if body.len() + piece.len() > MAX_ANSWER_BYTES {
            return Err(BodyError::TooLong);
        }
        body.extend_from_slice(&piece);
    }
    Ok(body.freeze())
}

/// Returns the messages of an error and of its causes: the HTTP client names the cause only there.
fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        text = format!("{text}: {e}");
        cause = e.source();
    }
    text.chars().take(300).collect()
}

fn invalid(path: &Path, e: &dyn std::error::Error) -> RecordError {
    RecordError::Unsuitable(format!("{} is invalid: {}", path.display(), chain(e)))
}

fn read(path: &Path) -> Result<Vec<u8>, RecordError> {
    std::fs::read(path)
        .map_err(|e| RecordError::Unsuitable(format!("cannot read {}: {e}", path.display())))
}

/// Reads the file with the password.
fn password(path: &Path) -> Result<zeroize::Zeroizing<String>, RecordError> {
    let bytes = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    if bytes > MAX_PASSWORD_BYTES {
        return Err(RecordError::Unsuitable(format!(
            "{} is too long for a password",
            path.display()
        )));
    }
    let text = String::from_utf8(read(path)?);
    let text = text.map_err(|e| invalid(path, &e))?;
    Ok(zeroize::Zeroizing::new(
        text.trim_end_matches('\n').to_owned(),
    ))
}
