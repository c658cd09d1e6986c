//! Loads versions of functions into the process of an owner. Machine code depends on the version of
//! the runtime. A version is compiled again if its machine code is for another one.
//!
//! A *permit* counts towards a limit until it is dropped.
//!
//! A version is one deployment of a function. It is loaded at the first call after a deployment, or
//! after the process was started.

use super::{Functions, Owner};
use crate::blocking::blocking;
use crate::compiler::{self, CompilerSettings};
use crate::deploy_step::{DeployStep, reached};
use crate::disk_quota::DeployQuota;
use crate::function_error::FunctionError;
use crate::function_record::{Artifact, FunctionRecord};
use crate::function_store::{FunctionStore, UNFINISHED};
use crate::owner;
use crate::running_process::{ProcessUse, RunningProcess};
use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Functions {
    /// Returns a use of an owner's process in which the active version of a function is loaded.
    pub(super) async fn loaded(
        &self,
        owner: &Arc<Owner>,
        name: &str,
    ) -> Result<ProcessUse, FunctionError> {
        let in_use = self.process(owner).await?;
        let state = owner.function(name)?;
        // Set this before the request starts, so that its log is read even if it fails.
        state.ran.store(true, Ordering::Release);
        // The common case does not wait for the lock `loading`.
        let is_loaded = |revision| in_use.0.loaded.lock().get(name) == Some(&revision);
        if is_loaded(state.record().revision) {
            return Ok(in_use);
        }
        let loading = in_use.0.loading.lock().await;
        // Another request may have loaded the function while this one waited for the lock.
        let record = state.record();
        if !is_loaded(record.revision) {
            let loaded = self.load(owner, &in_use.0, &record).await;
            if let Err(e) = loaded {
                tracing::error!(function = name, error = %e, "cannot load a function");
                return Err(FunctionError::Unavailable(
                    "the function cannot be loaded".to_owned(),
                ));
            }
        }
        drop(loading);
        Ok(in_use)
    }

    /// Loads the active version of a record, and compiles it again if the engine differs. The
    /// caller must hold the process's lock `loading`.
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
                .compile(owner, running, &version.module, &DeployQuota::default())
                .await?;
            // Record it in the background, because the caller may hold the lock `changing`.
            let recording = record_artifact(owner.clone(), version.module, artifact.clone());
            tokio::spawn(recording);
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
            running.process.execute(&record.publish_request())?;
            // The revision is recorded last: a function counts as loaded only after its access was
            // published.
            running.loaded.lock().insert(name.clone(), record.revision);
            Ok(())
        })
        .await
    }

    /// Compiles a module for the engine of a process. Reserves its machine code in `quota`.
    pub(super) async fn compile(
        &self,
        owner: &Arc<Owner>,
        running: &Arc<RunningProcess>,
        module: &str,
        quota: &DeployQuota,
    ) -> Result<Artifact, FunctionError> {
        let unavailable = |e: tokio::sync::AcquireError| FunctionError::Unavailable(e.to_string());
        // Lock before the permit is acquired: an owner that waits for its own lock must not occupy
        // a permit.
        let _compiling = owner.compiling.lock().await;
        let _permit = self.0.compilers.acquire().await.map_err(unavailable)?;
        let engine = running.process.engine().to_owned();
        let target = owner.store.artifact(&engine, module);
        let source = owner.store.module(module);
        let name = owner::process_owner(owner.key.as_deref());
        let (shared, quota) = (self.0.clone(), quota.clone());
        blocking(move || {
            let program = shared.settings.program.as_deref();
            let program = program.ok_or(FunctionError::NotInstalled)?;
            let file = File::open(&source).map_err(FunctionError::file(&source))?;
            let unfinished = target.with_extension(UNFINISHED);
            // Remove the file of an interrupted compilation: `compiler::compile` requires that the
            // file does not exist.
            let _ = fs::remove_file(&unfinished);
            let settings = CompilerSettings {
                program,
                owner: &name,
                limits: shared.settings.compile,
                jailed: shared.settings.jailed,
            };
            let result =
                compiler::compile(&settings, file, &unfinished, &quota, &shared.compile_slots);
            let result = result.map_err(FunctionError::from).and_then(|digest| {
                let bytes = FunctionStore::store_artifact(&unfinished, &target)?;
                Ok(Artifact {
                    engine,
                    digest,
                    bytes,
                })
            });
            if result.is_err() {
                // If this fails, the next compilation of the module or the next start of the daemon
                // removes the file.
                let _ = fs::remove_file(&unfinished);
            }
            result
        })
        .await
    }
}

/// Updates all records that reference a recompiled module. If a commit fails after a change of the
/// engine, the next process that loads the module compiles it again.
async fn record_artifact(owner: Arc<Owner>, module: String, artifact: Artifact) {
    let _changing = owner.changing.lock().await;
    for state in owner.states() {
        let mut record = FunctionRecord::clone(&state.record());
        let versions = record.versions.iter_mut();
        let mut is_changed = false;
        for version in versions.filter(|v| v.module == module && v.artifact != artifact) {
            version.artifact = artifact.clone();
            is_changed = true;
        }
        if !is_changed {
            continue;
        }
        let (committer, written) = (owner.clone(), record.clone());
        match blocking(move || committer.store.commit(&written)).await {
            Ok(()) => drop(state.replace(record)),
            Err(e) => {
                let function = &record.name;
                tracing::warn!(function, error = %e, "cannot record the compiled module");
            }
        }
    }
}
