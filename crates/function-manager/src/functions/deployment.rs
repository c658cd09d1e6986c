//! Deployment, rollback and removal.

use super::{Functions, Owner};
use crate::blocking::blocking;
use crate::disk_room::DeployRoom;
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
    /// Begins with a module of a deployment.
    pub fn upload(&self) -> Result<ModuleUpload, FunctionError> {
        self.new_upload(DeployRoom::default(), None)
    }

    fn new_upload(
        &self,
        room: DeployRoom,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<ModuleUpload, FunctionError> {
        if !self.is_installed() {
            return Err(FunctionError::NotInstalled);
        }
        ModuleUpload::new(&self.uploads()?, room, permit)
    }

    /// The same for a module of an owner, whose bytes and machine code are reserved in `room`.
    /// Waits while the owner has [`MAX_UPLOADS`].
    ///
    /// [`MAX_UPLOADS`]: super::MAX_UPLOADS
    pub async fn upload_of(
        &self,
        key: Option<&str>,
        room: DeployRoom,
    ) -> Result<ModuleUpload, FunctionError> {
        let unavailable = |e: AcquireError| FunctionError::Unavailable(e.to_string());
        let uploads = self.owner(key)?.uploads.clone();
        let permit = uploads.acquire_owned().await.map_err(unavailable)?;
        self.new_upload(room, Some(permit))
    }

    /// Deploys a module as a new version of a function. The former version answers until the new
    /// one is compiled, loaded, instantiated once and written down. Goes on if it is cancelled.
    pub async fn deploy(
        &self,
        key: Option<&str>,
        name: &str,
        changes: DeployChanges,
        module: ModuleUpload,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        // Refused before anything is made.
        new_record(key, name, 0)?;
        let (functions, owner) = (self.clone(), self.owner(key)?);
        let name = name.to_owned();
        let task = tokio::spawn(async move {
            let _changing = owner.changing.lock().await;
            let deployed = functions.deploy_to(&owner, &name, &changes, module).await;
            if let Ok(record) = &deployed {
                let digest = record.version().map(|version| version.module.as_str());
                functions.keep_stored(owner.key.as_deref(), digest);
            }
            functions.tidy(&owner).await;
            deployed
        });
        let done = task.await;
        done.unwrap_or_else(|e| Err(FunctionError::Unavailable(e.to_string())))
    }

    async fn deploy_to(
        &self,
        owner: &Arc<Owner>,
        name: &str,
        changes: &DeployChanges,
        module: ModuleUpload,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        let now = now_ms();
        let former = owner.function(name).ok();
        let mut record = match &former {
            Some(state) => FunctionRecord::clone(&state.record()),
            None if owner.functions.read().len() >= MAX_FUNCTIONS => {
                return Err(FunctionError::TooMany);
            }
            None => new_record(owner.key.as_deref(), name, now)?,
        };
        changes.apply(&mut record)?;
        let not_wasm = "the file is not a WebAssembly module or component in binary form";
        let not_wasm = || FunctionError::Module(not_wasm.to_owned());
        let world = World::detect(&module.head).ok_or_else(not_wasm)?;
        if world == World::Core && record.sandbox_key.is_some() {
            let message = "a module of jiffy-core/1 sends no requests: deploy a component, or do \
                           without a key for sandboxes";
            return Err(FunctionError::Setting(message.to_owned()));
        }
        let (digest, bytes) = (module.digest().digits(), module.bytes());
        // Held until the record counts the files.
        let room = module.room.clone();
        {
            let (owner, digest) = (owner.clone(), digest.clone());
            blocking(move || {
                owner.store.create()?;
                owner.store.keep_module(module.file, &digest)
            })
            .await?;
        }
        let in_use = self.process(owner).await?;
        let known = owner.states().into_iter().find_map(|state| {
            let record = state.record();
            let mut versions = record.versions.iter();
            let same = versions.find(|v| v.module == digest);
            same.map(|v| v.artifact.clone())
        });
        let engine = in_use.0.process.engine();
        let known = known.filter(|artifact| {
            artifact.engine == engine && owner.store.artifact(engine, &digest).exists()
        });
        let artifact = match known {
            Some(artifact) => artifact,
            None => self.compile(owner, &in_use.0, &digest, &room).await?,
        };
        record.push(VersionRecord {
            number: 0,
            module: digest,
            bytes,
            world,
            artifact,
            created_ms: now,
        });
        record.updated_ms = now;
        self.replace(owner, former, record).await
    }

    /// Loads the answering version of a changed record, then writes it down.
    async fn replace(
        &self,
        owner: &Arc<Owner>,
        former: Option<Arc<FunctionState>>,
        mut record: FunctionRecord,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        record.revision += 1;
        let name = record.name.clone();
        let in_use = self.process(owner).await?;
        // Requests that need a load wait until it is decided which version answers.
        let _loading = in_use.0.loading.lock().await;
        self.load(owner, &in_use.0, &record).await?;
        let committed = {
            let (owner, record) = (owner.clone(), record.clone());
            blocking(move || owner.store.commit(&record)).await
        };
        if let Err(e) = committed {
            // The version that is written down answers again; if it cannot be loaded now, the next
            // request tries.
            in_use.0.loaded.lock().remove(&name);
            let undone = match former {
                Some(former) => self.load(owner, &in_use.0, &former.record()).await.is_ok(),
                None => false,
            };
            if !undone {
                let process = in_use.0.process.clone();
                let remove = ControlRequest::Remove { function: name };
                let _ = blocking(move || Ok(process.order(&remove).is_ok())).await;
            }
            return Err(e);
        }
        Ok(match former {
            Some(state) => state.replace(record),
            None => {
                let state = Arc::new(FunctionState::new(record));
                owner.functions.write().insert(name, state.clone());
                state.record()
            }
        })
    }

    /// Changes a record, and nothing else.
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
        let (store, written) = (owner.clone(), record.clone());
        blocking(move || store.store.commit(&written)).await?;
        let Some(running) = owner.running.read().clone().and_then(RunningProcess::peek) else {
            return Ok(state.replace(record));
        };
        // A version that is loaded meanwhile is published as the former record says.
        let _loading = running.loading.lock().await;
        let record = state.replace(record);
        if running.loaded.lock().contains_key(name) {
            let (process, publish) = (running.process.clone(), record.publish_order());
            // A process that does not answer is ended.
            let _ = blocking(move || Ok(process.order(&publish).is_ok())).await;
        }
        Ok(record)
    }

    /// Lets a function answer requests, or refuse them.
    pub async fn enable(
        &self,
        key: Option<&str>,
        name: &str,
        enabled: bool,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        self.change(key, name, |record| record.enabled = enabled)
            .await
    }

    /// Lets an earlier version answer again; none: the one before that which answers.
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

    /// Removes a function with its versions. Requests under way end.
    pub async fn remove(&self, key: Option<&str>, name: &str) -> Result<(), FunctionError> {
        let owner = self.existing_owner(key, name)?;
        let _changing = owner.changing.lock().await;
        owner.function(name)?;
        let (removing, function) = (owner.clone(), name.to_owned());
        blocking(move || removing.store.remove(&function)).await?;
        owner.functions.write().remove(name);
        let running = owner.running.read().clone();
        if let Some(running) = running.filter(|running| !running.is_over()) {
            running.loaded.lock().remove(name);
            let remove = ControlRequest::Remove {
                function: name.to_owned(),
            };
            // Refused by a process that has not loaded it.
            let _ = blocking(move || Ok(running.process.order(&remove).is_ok())).await;
        }
        self.tidy(&owner).await;
        Ok(())
    }

    /// Removes all functions of an owner.
    pub async fn remove_all(&self, key: Option<&str>) {
        let records = self.list();
        for record in records.iter().filter(|r| r.owner.as_deref() == key) {
            if let Err(e) = self.remove(key, &record.name).await {
                tracing::error!("function {} is not removed: {e}", record.name);
            }
        }
    }

    /// Removes files that are not needed any more, and those of an owner without functions, whose
    /// process ends. The lock of changes must be held.
    async fn tidy(&self, owner: &Arc<Owner>) {
        let key = owner.key.clone();
        if owner.functions.read().is_empty() {
            let _starting = owner.starting.lock().await;
            let running = owner.running.read().clone();
            let (owner, functions) = (owner.clone(), self.clone());
            let _ = blocking(move || {
                if let Some(running) = running {
                    running.close();
                    owner.retire(running, &functions.0);
                }
                owner.store.remove_all();
                Ok(())
            })
            .await;
        } else {
            let owner = owner.clone();
            let _ = blocking(move || {
                owner.gc(false);
                Ok(())
            })
            .await;
        }
        self.keep_stored(key.as_deref(), None);
    }
}
