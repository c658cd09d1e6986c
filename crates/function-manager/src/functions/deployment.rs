//! Deployment of a function: compiles the uploaded module, stores it, and loads the new version
//! into the owner's process. Also rollback to an earlier version, changes and removal.

use super::{Functions, Owner};
use crate::blocking::blocking;
use crate::disk_quota::DeployQuota;
use crate::function_error::FunctionError;
use crate::function_record::{DeployChanges, FunctionRecord, VersionRecord, new_record};
use crate::function_state::FunctionState;
use crate::module_upload::ModuleUpload;
use crate::running_process::RunningProcess;
use jiffy_engine_api::now_ms;
use jiffy_proto::function::{ControlRequest, MAX_FUNCTIONS, World};
use std::sync::Arc;
use tokio::sync::{AcquireError, OwnedSemaphorePermit};

impl Functions {
    /// Starts the upload of a module.
    pub fn upload(&self) -> Result<ModuleUpload, FunctionError> {
        self.new_upload(DeployQuota::default(), None)
    }

    /// Starts the upload of a module. Fails if the host cannot run functions.
    fn new_upload(
        &self,
        quota: DeployQuota,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<ModuleUpload, FunctionError> {
        if !self.is_installed() {
            return Err(FunctionError::NotInstalled);
        }
        ModuleUpload::new(&self.uploads()?, quota, permit)
    }

    /// Like [`Self::upload`], but reserves the module's bytes and machine code in `quota`. Waits
    /// while the owner has [`MAX_UPLOADS`].
    ///
    /// [`MAX_UPLOADS`]: super::MAX_UPLOADS
    pub async fn upload_of(
        &self,
        key: Option<&str>,
        quota: DeployQuota,
    ) -> Result<ModuleUpload, FunctionError> {
        let unavailable = |e: AcquireError| FunctionError::Unavailable(e.to_string());
        let uploads = self.owner(key)?.uploads.clone();
        let permit = uploads.acquire_owned().await.map_err(unavailable)?;
        self.new_upload(quota, Some(permit))
    }

    /// Deploys a module as a new version of a function. The previous version answers until the new
    /// version has been compiled, loaded, instantiated once and recorded. Continues if cancelled.
    pub async fn deploy(
        &self,
        key: Option<&str>,
        name: &str,
        changes: DeployChanges,
        module: ModuleUpload,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        // Validates the name before any file is created.
        new_record(key, name, 0)?;
        let (functions, owner) = (self.clone(), self.owner(key)?);
        let name = name.to_owned();
        // A task of its own: a client that disconnects does not interrupt the deployment.
        let task = tokio::spawn(async move {
            let _changing = owner.changing.lock().await;
            let deployed = functions.deploy_to(&owner, &name, &changes, module).await;
            if let Ok(record) = &deployed {
                let digest = record.version().map(|version| version.module.as_str());
                functions.enqueue_sync(owner.key.as_deref(), digest);
            }
            functions.collect_garbage(&owner).await;
            deployed
        });
        let result = task.await;
        result.unwrap_or_else(|e| Err(FunctionError::Unavailable(e.to_string())))
    }

    /// Stores, compiles, loads and commits a version. The caller must hold the lock `changing`.
    async fn deploy_to(
        &self,
        owner: &Arc<Owner>,
        name: &str,
        changes: &DeployChanges,
        module: ModuleUpload,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        let now = now_ms();
        let previous = owner.function(name).ok();
        let mut record = match &previous {
            Some(state) => FunctionRecord::clone(&state.record()),
            None if owner.functions.read().len() >= MAX_FUNCTIONS => {
                return Err(FunctionError::TooMany);
            }
            None => new_record(owner.key.as_deref(), name, now)?,
        };
        // `record` is a copy: the function is unchanged if the deployment fails.
        changes.apply(&mut record)?;
        let not_wasm = "the file is not a WebAssembly module or component in binary form";
        let not_wasm = || FunctionError::Module(not_wasm.to_owned());
        let world = World::detect(&module.head).ok_or_else(not_wasm)?;
        if world == World::Core && record.sandbox_key.is_some() {
            let message = "a module of jiffy-core/1 cannot send requests: deploy a component, or \
                           omit the sandbox key";
            return Err(FunctionError::Setting(message.to_owned()));
        }
        let (digest, bytes) = (module.digest().digits(), module.bytes());
        // The quota is held until the record accounts for the files.
        let quota = module.quota.clone();
        {
            // The module is on storage before a record refers to it.
            let (owner, digest) = (owner.clone(), digest.clone());
            blocking(move || {
                owner.store.create()?;
                owner.store.store_module(module.file, &digest)
            })
            .await?;
        }
        let in_use = self.process(owner).await?;
        // A module that was already compiled for the process's engine is not compiled again.
        let existing = owner.states().into_iter().find_map(|state| {
            let record = state.record();
            let mut versions = record.versions.iter();
            let same = versions.find(|v| v.module == digest);
            same.map(|v| v.artifact.clone())
        });
        let engine = in_use.0.process.engine();
        let existing = existing.filter(|artifact| {
            artifact.engine == engine && owner.store.artifact(engine, &digest).exists()
        });
        let artifact = match existing {
            Some(artifact) => artifact,
            None => self.compile(owner, &in_use.0, &digest, &quota).await?,
        };
        record.push(VersionRecord {
            // `push` assigns the number.
            number: 0,
            module: digest,
            bytes,
            world,
            artifact,
            created_ms: now,
        });
        record.updated_ms = now;
        self.replace(owner, previous, record).await
    }

    /// Loads the active version of a changed record, then commits the record.
    async fn replace(
        &self,
        owner: &Arc<Owner>,
        previous: Option<Arc<FunctionState>>,
        mut record: FunctionRecord,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        // A process that has the previous revision loaded must load this one.
        record.revision += 1;
        let name = record.name.clone();
        let in_use = self.process(owner).await?;
        // Requests that require a load wait until the active version is decided.
        let _loading = in_use.0.loading.lock().await;
        // Load the version first: a version that cannot be loaded must not be committed.
        self.load(owner, &in_use.0, &record).await?;
        let committed = {
            let (owner, record) = (owner.clone(), record.clone());
            blocking(move || owner.store.commit(&record)).await
        };
        if let Err(e) = committed {
            // The process has loaded the new version, which was not committed. Load the committed
            // version again. Without a committed version, or if the load fails, remove the function
            // from the process. The next request then loads the committed version.
            in_use.0.loaded.lock().remove(&name);
            let is_restored = match previous {
                Some(previous) => self
                    .load(owner, &in_use.0, &previous.record())
                    .await
                    .is_ok(),
                None => false,
            };
            if !is_restored {
                let process = in_use.0.process.clone();
                let remove = ControlRequest::Remove { function: name };
                // A process that does not answer has been killed.
                let _ = blocking(move || Ok(process.execute(&remove).is_ok())).await;
            }
            return Err(e);
        }
        Ok(match previous {
            Some(state) => state.replace(record),
            None => {
                let state = Arc::new(FunctionState::new(record));
                owner.functions.write().insert(name, state.clone());
                state.record()
            }
        })
    }

    /// Changes and commits a record without loading a version.
    async fn change(
        &self,
        key: Option<&str>,
        name: &str,
        change: impl FnOnce(&mut FunctionRecord),
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        let owner = self.existing_owner(key, name)?;
        let _changing = owner.changing.lock().await;
        let state = owner.function(name)?;
        let mut record = FunctionRecord::clone(&state.record());
        change(&mut record);
        record.updated_ms = now_ms();
        let (committer, written) = (owner.clone(), record.clone());
        // The record is committed first: if the daemon exits now, the next daemon uses the new
        // value.
        blocking(move || committer.store.commit(&written)).await?;
        let Some(running) = owner
            .running
            .read()
            .clone()
            .and_then(RunningProcess::if_running)
        else {
            return Ok(state.replace(record));
        };
        // A load that held this lock before may have published the previous record. While no load
        // runs, replace the record and publish it again.
        let _loading = running.loading.lock().await;
        let record = state.replace(record);
        if running.loaded.lock().contains_key(name) {
            let (process, publish) = (running.process.clone(), record.publish_request());
            // A process that does not answer has been killed.
            let _ = blocking(move || Ok(process.execute(&publish).is_ok())).await;
        }
        Ok(record)
    }

    /// Enables or disables a function.
    pub async fn enable(
        &self,
        key: Option<&str>,
        name: &str,
        enabled: bool,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        self.change(key, name, |record| record.enabled = enabled)
            .await
    }

    /// Makes an earlier version active. Defaults to the version before the active version.
    pub async fn roll_back(
        &self,
        key: Option<&str>,
        name: &str,
        version: Option<u64>,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        let owner = self.existing_owner(key, name)?;
        let _changing = owner.changing.lock().await;
        let state = owner.function(name)?;
        let mut record = FunctionRecord::clone(&state.record());
        record.roll_back(version)?;
        record.updated_ms = now_ms();
        self.replace(&owner, Some(state), record).await
    }

    /// Removes a function with its versions. Requests in flight complete.
    pub async fn remove(&self, key: Option<&str>, name: &str) -> Result<(), FunctionError> {
        let owner = self.existing_owner(key, name)?;
        let _changing = owner.changing.lock().await;
        owner.function(name)?;
        let (removing, function) = (owner.clone(), name.to_owned());
        // Remove the function on disk first: a function without a record cannot return after a
        // restart.
        blocking(move || removing.store.remove(&function)).await?;
        owner.functions.write().remove(name);
        let running = owner.running.read().clone();
        if let Some(running) = running.filter(|running| !running.is_over()) {
            running.loaded.lock().remove(name);
            let remove = ControlRequest::Remove {
                function: name.to_owned(),
            };
            // A process that has not loaded the function rejects the request.
            let _ = blocking(move || Ok(running.process.execute(&remove).is_ok())).await;
        }
        self.collect_garbage(&owner).await;
        Ok(())
    }

    /// Removes all functions of an owner.
    pub async fn remove_all(&self, key: Option<&str>) {
        let records = self.list();
        for record in records.iter().filter(|r| r.owner.as_deref() == key) {
            if let Err(e) = self.remove(key, &record.name).await {
                tracing::error!(function = record.name, error = %e, "cannot remove a function");
            }
        }
    }

    /// Removes unreferenced files. If the owner has no functions, stops the process and removes all
    /// files. The caller must hold the lock `changing`.
    async fn collect_garbage(&self, owner: &Arc<Owner>) {
        let key = owner.key.clone();
        if owner.functions.read().is_empty() {
            // Requests must not start another process while the directory is removed.
            let _starting = owner.starting.lock().await;
            let running = owner.running.read().clone();
            let (owner, functions) = (owner.clone(), self.clone());
            // The closure returns no error; the task fails only at shutdown.
            let _ = blocking(move || {
                if let Some(running) = running {
                    running.close();
                    owner.remove_process(running, &functions.0);
                }
                owner.store.remove_all();
                Ok(())
            })
            .await;
        } else {
            let owner = owner.clone();
            let _ = blocking(move || {
                let is_start = false;
                owner.gc(is_start);
                Ok(())
            })
            .await;
        }
        // Releases modules in the store that no version references any longer.
        self.enqueue_sync(key.as_deref(), None);
    }
}
