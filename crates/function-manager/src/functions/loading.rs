//! Versions of functions in processes: compiled for the engine of a process, and loaded.

use super::{Functions, Owner};
use crate::blocking::blocking;
use crate::compiler::{self, CompilerSettings};
use crate::deploy_step::{DeployStep, reached};
use crate::disk_room::DeployRoom;
use crate::function_error::FunctionError;
use crate::function_record::{Artifact, FunctionRecord};
use crate::function_store::{FunctionStore, UNFINISHED};
use crate::owner;
use crate::running_process::{ProcessUse, RunningProcess};
use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Functions {
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
            running.process.order(&record.publish_order())?;
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
