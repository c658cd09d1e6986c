//! What the daemon answers to what.

use super::connect::splice;
use super::status::Status;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode, header};
use jiffy_host::{
    CreateSpec, ErrorKind, MicroVmEngine, OperationError, SandboxRecord, Sandboxes, SnapshotRecord,
    new_id,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::time::Instant;
use tokio::sync::mpsc;
use tracing::Instrument;

/// Header by which a request is found again in the log.
const REQUEST_ID: &str = "x-request-id";
/// Longest request body.
const MAX_BODY: usize = 1 << 20;

/// Body of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct SnapshotBody {
    /// Name for it.
    pub name: Option<String>,
}

/// Body of a fork.
#[derive(Debug, Serialize, Deserialize)]
pub struct ForkBody {
    /// How many children.
    pub count: usize,
}

/// Answer to a question for a sandbox's process.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessAnswer {
    /// Of its VMM.
    pub pid: u32,
    /// How often KVM left the guest so far, if the kernel tells.
    pub exits: Option<u64>,
}

/// Body of a rollback.
#[derive(Debug, Serialize, Deserialize)]
pub struct RollbackBody {
    /// Snapshot.
    pub snapshot: String,
}

/// Body of a stop.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct StopBody {
    /// Whether the running sandboxes end too.
    pub kill_sandboxes: bool,
}

/// Answer to a fork.
#[derive(Debug, Serialize, Deserialize)]
pub struct ForkAnswer {
    /// What all children start from.
    pub snapshot: SnapshotRecord,
    /// Those that answered.
    pub children: Vec<SandboxRecord>,
    /// Why the others did not.
    pub failed: Vec<String>,
}

enum Refusal {
    Operation(OperationError),
    Malformed(String),
    NoSuchCall,
}

impl From<OperationError> for Refusal {
    fn from(error: OperationError) -> Self {
        Self::Operation(error)
    }
}

type Answer = Response<Full<Bytes>>;

/// All calls.
#[derive(Clone)]
pub struct Routes {
    sandboxes: Sandboxes<MicroVmEngine>,
    stop: mpsc::Sender<StopBody>,
    began: Instant,
    listen: Option<String>,
}

impl Routes {
    /// Calls to `sandboxes`, and to whoever listens for `stop`, of a daemon that began at `began` and also answers at `listen`.
    pub fn new(
        sandboxes: Sandboxes<MicroVmEngine>,
        stop: mpsc::Sender<StopBody>,
        began: Instant,
        listen: Option<String>,
    ) -> Self {
        Self {
            sandboxes,
            stop,
            began,
            listen,
        }
    }

    /// Answers a request, whatever it is.
    pub async fn answer(self, request: Request<Incoming>) -> Result<Answer, Infallible> {
        let id = request_id(&request);
        let (method, path) = (request.method(), request.uri().path());
        let span = tracing::info_span!("request", id, %method, path);
        let answer = match self.route(request).instrument(span).await {
            Ok(answer) => answer,
            Err(refusal) => {
                let (status, error) = match refusal {
                    Refusal::Operation(e) => (status_of(&e), e.to_string()),
                    Refusal::Malformed(why) => (StatusCode::BAD_REQUEST, why),
                    Refusal::NoSuchCall => (
                        StatusCode::NOT_FOUND,
                        "the daemon knows no such call: it is of another version; `jiffy serve --stop` ends it".to_owned(),
                    ),
                };
                let body = serde_json::json!({ "error": error });
                response(status, &body)
            }
        };
        Ok(answer)
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Answer, Refusal> {
        let path = request.uri().path().to_owned();
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let host = &self.sandboxes;
        let method = request.method().clone();
        Ok(match (&method, parts.as_slice()) {
            (&Method::GET, ["host"]) => ok(&Status::now(host, self.began, self.listen.clone())),
            (&Method::POST, ["stop"]) => {
                let asked: StopBody = body(request).await?;
                // A second one finds the first still waiting.
                let _ = self.stop.try_send(asked);
                ok(&())
            }
            (&Method::GET, ["sandboxes"]) => ok(&host.list()),
            (&Method::POST, ["sandboxes"]) => {
                let spec: CreateSpec = body(request).await?;
                ok(&host.create(spec).await?)
            }
            (&Method::GET, ["sandboxes", id]) => ok(&host.get(id)?),
            (&Method::GET, ["sandboxes", id, "process"]) => {
                let (pid, exits) = host.process(id).await?;
                ok(&ProcessAnswer { pid, exits })
            }
            (&Method::DELETE, ["sandboxes", id]) => ok(&host.remove(id).await?),
            (&Method::POST, ["sandboxes", id, "connect", port]) => {
                self.connect(id, port, request).await?
            }
            (&Method::POST, ["sandboxes", id, operation]) => {
                self.operate(id, operation, request).await?
            }
            (&Method::GET, ["snapshots"]) => ok(&host.snapshots(None)?),
            (&Method::GET, ["snapshots", sandbox]) => ok(&host.snapshots(Some(sandbox))?),
            (&Method::POST, ["snapshots", id, "verify"]) => ok(&host.verify_snapshot(id).await?),
            (&Method::DELETE, ["snapshots", id]) => ok(&host.remove_snapshot(id)?),
            _ => return Err(Refusal::NoSuchCall),
        })
    }

    async fn operate(
        &self,
        id: &str,
        operation: &str,
        request: Request<Incoming>,
    ) -> Result<Answer, Refusal> {
        let host = &self.sandboxes;
        Ok(match operation {
            "snapshot" => {
                let SnapshotBody { name } = body(request).await?;
                ok(&host.snapshot(id, name).await?)
            }
            "fork" => {
                let ForkBody { count } = body(request).await?;
                let report = host.fork(id, count, None).await?;
                let mut answer = ForkAnswer {
                    snapshot: report.snapshot,
                    children: Vec::new(),
                    failed: Vec::new(),
                };
                for child in report.children {
                    match child {
                        Ok(child) => answer.children.push(child),
                        Err(e) => answer.failed.push(e.to_string()),
                    }
                }
                ok(&answer)
            }
            "rollback" => {
                let RollbackBody { snapshot } = body(request).await?;
                ok(&host.rollback(id, &snapshot).await?)
            }
            "pause" => ok(&host.pause(id).await?),
            "resume" => ok(&host.resume(id).await?),
            "kill" => ok(&host.kill(id).await?),
            "promote" => ok(&host.promote(id).await?),
            _ => return Err(Refusal::NoSuchCall),
        })
    }

    async fn connect(
        &self,
        id: &str,
        port: &str,
        request: Request<Incoming>,
    ) -> Result<Answer, Refusal> {
        let port = port
            .parse()
            .map_err(|_| Refusal::Malformed(format!("`{port}` is not a port")))?;
        let guest = self.sandboxes.connect(id, port).await?;
        splice(request, guest).map_err(|source| OperationError::Connect {
            id: id.to_owned(),
            port,
            source,
        })?;
        let mut answer = Response::new(Full::default());
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = answer.headers_mut();
        headers.insert(
            header::CONNECTION,
            header::HeaderValue::from_static("upgrade"),
        );
        headers.insert(
            header::UPGRADE,
            header::HeaderValue::from_static("jiffy-stream"),
        );
        Ok(answer)
    }
}

/// What the client calls its request, or a name for it.
fn request_id(request: &Request<Incoming>) -> String {
    let given = request.headers().get(REQUEST_ID);
    let given = given.and_then(|v| v.to_str().ok());
    // It goes into the log: short, and nothing that could look like another line.
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let given = given.filter(|id| (1..=64).contains(&id.len()) && id.chars().all(good));
    given.map_or_else(|| new_id().unwrap_or_default(), str::to_owned)
}

fn status_of(error: &OperationError) -> StatusCode {
    match error.kind() {
        ErrorKind::Unknown => StatusCode::NOT_FOUND,
        ErrorKind::Invalid | ErrorKind::TooLarge => StatusCode::BAD_REQUEST,
        ErrorKind::Conflict => StatusCode::CONFLICT,
        ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn body<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Refusal> {
    let bytes = Limited::new(request.into_body(), MAX_BODY)
        .collect()
        .await
        .map_err(|e| Refusal::Malformed(format!("the request cannot be read: {e}")))?
        .to_bytes();
    serde_json::from_slice(&bytes)
        .map_err(|e| Refusal::Malformed(format!("the request is not understood: {e}")))
}

fn ok(value: &impl Serialize) -> Answer {
    response(StatusCode::OK, value)
}

fn response(status: StatusCode, value: &impl Serialize) -> Answer {
    // Nothing that is answered can fail to be written as JSON.
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    answer
}
