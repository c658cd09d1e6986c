//! What the daemon answers to what.

use super::connect::splice;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode, header};
use jiffy_host::{
    CreateSpec, MicroVmEngine, OperationError, SandboxRecord, Sandboxes, SnapshotRecord,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use tokio::sync::mpsc;

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

/// Body of a rollback.
#[derive(Debug, Serialize, Deserialize)]
pub struct RollbackBody {
    /// Snapshot.
    pub snapshot: String,
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
    stop: mpsc::Sender<()>,
}

impl Routes {
    /// Calls to `sandboxes`, and to whoever listens for `stop`.
    pub fn new(sandboxes: Sandboxes<MicroVmEngine>, stop: mpsc::Sender<()>) -> Self {
        Self { sandboxes, stop }
    }

    /// Answers a request, whatever it is.
    pub async fn answer(self, request: Request<Incoming>) -> Result<Answer, Infallible> {
        let answer = match self.route(request).await {
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
            (&Method::GET, ["host"]) => ok(&serde_json::json!({
                "version": env!("CARGO_PKG_VERSION"),
                "pid": std::process::id(),
                "warm": host.warm(),
            })),
            (&Method::POST, ["stop"]) => {
                // A second one finds the first still waiting.
                let _ = self.stop.try_send(());
                ok(&())
            }
            (&Method::GET, ["sandboxes"]) => ok(&host.list()),
            (&Method::POST, ["sandboxes"]) => {
                let spec: CreateSpec = body(request).await?;
                ok(&host.create(spec).await?)
            }
            (&Method::GET, ["sandboxes", id]) => ok(&host.get(id)?),
            (&Method::DELETE, ["sandboxes", id]) => ok(&host.remove(id).await?),
            (&Method::POST, ["sandboxes", id, "connect", port]) => {
                self.connect(id, port, request).await?
            }
            (&Method::POST, ["sandboxes", id, operation]) => {
                self.operate(id, operation, request).await?
            }
            (&Method::GET, ["snapshots"]) => ok(&host.snapshots(None)?),
            (&Method::GET, ["snapshots", sandbox]) => ok(&host.snapshots(Some(sandbox))?),
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
                let report = host.fork(id, count).await?;
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

fn status_of(error: &OperationError) -> StatusCode {
    match error {
        OperationError::Unknown { .. } => StatusCode::NOT_FOUND,
        e if e.is_refusal() => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
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
