//! Requests to functions.

use super::direct::publish;
use super::processes::blocking;
use super::{Functions, Owner};
use crate::compiler::{self, CompilerSettings};
use crate::deploy_step::{DeployStep, reached};
use crate::disk_room::DeployRoom;
use crate::function_error::FunctionError;
use crate::function_record::{Artifact, FunctionRecord};
use crate::function_store::{FunctionStore, UNFINISHED};
use crate::owner;
use crate::request_body::RequestBody;
use crate::request_limit::limited;
use crate::response_body::FunctionBody;
use crate::running_process::{ProcessUse, RunningProcess};
use http_body_util::{BodyExt, Empty};
use hyper::body::Body;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Response, Uri};
use jiffy_proto::function::FUNCTION_HEADER;
use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Attempts of a request that may be repeated.
const MAX_ATTEMPTS: u32 = 3;
/// Longest time between the loss of a connection and the end of the process that caused it.
const MAX_END_DELAY: Duration = Duration::from_millis(200);
/// Header of a request's id, which the gateway sets.
const REQUEST_ID_HEADER: &str = "x-request-id";
/// Name under which a request with too long a body is counted, as by the process.
const TOO_LARGE: &str = "request_too_large";

impl Functions {
    /// Passes a request to a function, after its process was started and its version loaded if
    /// need be. The path of the request is the one that the function sees; its `Host` header must
    /// be set.
    pub async fn send(
        &self,
        record: &FunctionRecord,
        mut request: Request<RequestBody>,
    ) -> Result<Response<FunctionBody>, FunctionError> {
        let owner = self.existing_owner(record.owner.as_deref(), &record.name)?;
        prepare(&mut request, &record.name)?;
        let max = record.settings.limits.request_bytes;
        let (head, body) = request.into_parts();
        let (body, exceeded) = limited(body, max);
        let mut request = Request::from_parts(head, body);
        if exceeded.load(Ordering::Acquire) {
            return Err(too_large(
                &owner,
                record,
                request.headers().get(REQUEST_ID_HEADER),
            ));
        }
        let repeatable = request.body().is_end_stream() && request.method().is_idempotent();
        let id = request.headers().get(REQUEST_ID_HEADER).cloned();
        let mut attempt = 1;
        loop {
            let again = (repeatable && attempt < MAX_ATTEMPTS).then(|| copy(&request));
            let in_use = self.loaded(&owner, &record.name).await?;
            match in_use.0.connections.send(request).await {
                Ok(response) => {
                    return Ok(response.map(|body| FunctionBody::new(body, in_use)));
                }
                Err(_) if exceeded.load(Ordering::Acquire) => {
                    return Err(too_large(&owner, record, id.as_ref()));
                }
                Err(e) => {
                    tracing::debug!("a request to function {} failed: {e}", record.name);
                    let failed =
                        || FunctionError::Unavailable("their process ended meanwhile".to_owned());
                    request = again.ok_or_else(failed)?;
                    attempt += 1;
                    in_use.0.wait_for_end(MAX_END_DELAY).await;
                }
            }
        }
    }

    /// Uses the process of an owner in which the answering version of a function is loaded.
    pub(super) async fn loaded(
        &self,
        owner: &Arc<Owner>,
        name: &str,
    ) -> Result<ProcessUse, FunctionError> {
        let in_use = self.process(owner).await?;
        let state = owner.function(name)?;
        state.ran.store(true, Ordering::Release);
        let is_loaded = |revision| in_use.0.loaded.lock().get(name) == Some(&revision);
        if is_loaded(state.record().revision) {
            return Ok(in_use);
        }
        let loading = in_use.0.loading.lock().await;
        let record = state.record();
        if !is_loaded(record.revision) {
            let loaded = self.load(owner, &in_use.0, &record).await;
            if let Err(e) = loaded {
                tracing::error!("function {name} cannot be loaded: {e}");
                return Err(FunctionError::Unavailable(
                    "this one cannot be loaded".to_owned(),
                ));
            }
        }
        drop(loading);
        Ok(in_use)
    }

    /// Loads the answering version of a record, which is compiled again for another engine. The
    /// lock of loads must be held.
    pub(super) async fn load(
        &self,
        owner: &Arc<Owner>,
        running: &Arc<RunningProcess>,
        record: &FunctionRecord,
    ) -> Result<(), FunctionError> {
        let unknown = || FunctionError::NotFound(record.name.clone());
        let version = record.version().ok_or_else(unknown)?.clone();
        let mut artifact = version.artifact.clone();
        let path = owner
            .store
            .artifact(running.process.engine(), &version.module);
        if artifact.engine != running.process.engine() || !path.exists() {
            artifact = self
                .compile(owner, running, &version.module, &DeployRoom::default())
                .await?;
            let noted = note(owner.clone(), version.module, artifact.clone());
            tokio::spawn(noted);
        }
        let (running, record) = (running.clone(), record.clone());
        blocking(move || {
            let file = File::open(&path).map_err(FunctionError::file(&path))?;
            let (name, settings) = (&record.name, record.load_settings());
            let digest = &artifact.digest;
            reached(DeployStep::Load);
            running
                .process
                .load_as(name, &file, digest, settings, record.origin())?;
            reached(DeployStep::Publish);
            running.process.order(&publish(&record))?;
            running.loaded.lock().insert(name.clone(), record.revision);
            Ok(())
        })
        .await
    }

    /// Compiles a module for the engine of a process. Machine code is reserved in `room`.
    pub(super) async fn compile(
        &self,
        owner: &Arc<Owner>,
        running: &Arc<RunningProcess>,
        module: &str,
        room: &DeployRoom,
    ) -> Result<Artifact, FunctionError> {
        let unavailable = |e: tokio::sync::AcquireError| FunctionError::Unavailable(e.to_string());
        let _compiling = owner.compiling.lock().await;
        let _permit = self.0.compilers.acquire().await.map_err(unavailable)?;
        let engine = running.process.engine().to_owned();
        let target = owner.store.artifact(&engine, module);
        let source = owner.store.module(module);
        let name = owner::process_owner(owner.key.as_deref());
        let (shared, room) = (self.0.clone(), room.clone());
        blocking(move || {
            let program = shared.settings.program.as_deref();
            let program = program.ok_or(FunctionError::NotInstalled)?;
            let file = File::open(&source).map_err(FunctionError::file(&source))?;
            let unfinished = target.with_extension(UNFINISHED);
            let _ = fs::remove_file(&unfinished);
            let settings = CompilerSettings {
                program,
                owner: &name,
                limits: shared.settings.compile,
                jailed: shared.settings.jailed,
            };
            let done =
                compiler::compile(&settings, file, &unfinished, &room, &shared.compile_turns);
            let done = done.map_err(FunctionError::from).and_then(|digest| {
                let bytes = FunctionStore::keep_artifact(&unfinished, &target)?;
                Ok(Artifact {
                    engine,
                    digest,
                    bytes,
                })
            });
            if done.is_err() {
                let _ = fs::remove_file(&unfinished);
            }
            done
        })
        .await
    }
}

/// Notes that a request was refused for its body.
fn too_large(owner: &Owner, record: &FunctionRecord, id: Option<&HeaderValue>) -> FunctionError {
    let id = id.and_then(|id| id.to_str().ok());
    if let Ok(state) = owner.function(&record.name) {
        state.note_fault(id.unwrap_or_default(), TOO_LARGE);
    }
    FunctionError::RequestTooLarge
}

/// Writes down in all records that a module was compiled again. A failure costs another
/// compilation.
async fn note(owner: Arc<Owner>, module: String, artifact: Artifact) {
    let _changing = owner.changing.lock().await;
    for state in owner.states() {
        let mut record = FunctionRecord::clone(&state.record());
        let versions = record.versions.iter_mut();
        let mut noted = false;
        for version in versions.filter(|v| v.module == module && v.artifact != artifact) {
            version.artifact = artifact.clone();
            noted = true;
        }
        if !noted {
            continue;
        }
        let (store, written) = (owner.clone(), record.clone());
        match blocking(move || store.store.commit(&written)).await {
            Ok(()) => drop(state.replace(record)),
            Err(e) => tracing::warn!("{e}"),
        }
    }
}

fn prepare(request: &mut Request<RequestBody>, name: &str) -> Result<(), FunctionError> {
    let bad = |e: &dyn std::fmt::Display| FunctionError::Setting(e.to_string());
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map_or(Uri::from_static("/"), Uri::from);
    *request.version_mut() = hyper::Version::HTTP_11;
    let name = HeaderValue::from_str(name).map_err(|e| bad(&e))?;
    let header = HeaderName::from_static(FUNCTION_HEADER);
    request.headers_mut().insert(header, name);
    Ok(())
}

/// Copy of a request without a body.
fn copy(request: &Request<RequestBody>) -> Request<RequestBody> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let mut copy = Request::new(body);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    copy
}
