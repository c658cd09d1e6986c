//! Mounts of a `RUN` step: the files that only its command sees. They are prepared in the staging
//! directory of the sandbox, or sent with the request that starts the command.

use super::super::copy::{self, CopyRequest, ROOT_USER, STAGING};
use super::super::failure::BuildFailure;
use super::super::transfer;
use super::super::uploads::UploadNaming;
use super::BuildJob;
use super::copy_step::CopiedFiles;
use super::stage::StageState;
use data_encoding::{BASE64, HEXLOWER};
use jiffy_agent_client::{AgentClient, EntryKind};
use jiffy_build_spec::spec::RunMount;
use jiffy_engine_api::new_id;
use jiffy_proto::agent::SocketListener;
use jiffy_proto::process_mounts::{ProcessMount, ProcessMounts, Secret};
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;

/// Variable with the socket of the SSH agent.
const SSH_VARIABLE: &str = "SSH_AUTH_SOCK";
/// Maximum size of the retained content of a cache mount in bytes.
const MAX_CACHE_BYTES: u64 = 4 << 30;

/// Prepared mounts of a step.
#[derive(Default)]
pub(super) struct PreparedMounts {
    /// Mounts for the command. `None` if the step has none.
    pub process: Option<ProcessMounts>,
    /// Files and directories that were created as targets, outermost first.
    created: Vec<String>,
    /// Cache directories: name of the stored content, and path.
    caches: Vec<(String, String)>,
    /// Tasks that pass connections to SSH agents. Dropping them closes the connections.
    ssh: Vec<JoinSet<()>>,
}

/// Returns whether a step receives a secret.
pub(super) fn has_secrets(mounts: &[RunMount]) -> bool {
    mounts.iter().any(|m| matches!(m, RunMount::Secret { .. }))
}

impl BuildJob {
    /// Prepares the mounts of a step. `files` are the files of its bind mounts in order. `before`
    /// are the stages before this one, from which mounts may take files.
    pub(super) async fn prepare_mounts(
        &self,
        agent: &AgentClient,
        at: &StageState,
        mounts: &[RunMount],
        files: Vec<CopiedFiles>,
        before: &mut [Option<StageState>],
    ) -> Result<PreparedMounts, BuildFailure> {
        let mut prepared = PreparedMounts::default();
        if mounts.is_empty() {
            return Ok(prepared);
        }
        copy::clear_staging(agent).await?;
        let scratch = format!("{STAGING}/secrets");
        copy::create_directory(agent, &scratch, ROOT_USER).await?;
        let mut process = ProcessMounts {
            scratch,
            ..ProcessMounts::default()
        };
        let mut files = files.into_iter();
        for (number, mount) in mounts.iter().enumerate() {
            let place = format!("{STAGING}/{number}");
            // Expands the variables of a path in the sandbox.
            let path = |word: &String| {
                let path = at.config.path(word).map_err(BuildFailure::new)?;
                Ok::<_, BuildFailure>(path.trim_end_matches('/').to_owned())
            };
            match mount {
                RunMount::Bind {
                    source,
                    target,
                    writable,
                    ..
                } => {
                    let target = path(target)?;
                    let request = CopyRequest {
                        sources: vec![at.config.expand(source).map_err(BuildFailure::new)?],
                        to: target.clone(),
                        owner: None,
                        mode: None,
                        unpack: false,
                    };
                    // The next files belong to this mount. The iterator has at most one element.
                    let files = files.next().into_iter();
                    let mut items = Vec::new();
                    for files in files {
                        items = self
                            .stage_files(agent, at, files, &request, &place, before)
                            .await?;
                    }
                    let [item] = &items[..] else {
                        return Err(BuildFailure::new(format!(
                            "the mount of `{source}` needs exactly one file or directory"
                        )));
                    };
                    prepared
                        .create_target(agent, &target, item.directory)
                        .await?;
                    process.mounts.push(ProcessMount::Bind {
                        source: item.path.clone(),
                        target,
                        read_only: !writable,
                    });
                }
                RunMount::Cache {
                    id,
                    target,
                    read_only,
                    uid,
                    gid,
                    mode,
                } => {
                    let (id, target) = (at.config.expand(id), path(target)?);
                    let name = cache_name(&id.map_err(BuildFailure::new)?, *uid, *gid, *mode);
                    self.restore_cache(agent, &name, &place, (*uid, *gid, *mode))
                        .await?;
                    let source = format!("{place}/content");
                    // A cache that the command cannot change need not be stored again.
                    if !read_only {
                        prepared.caches.push((name, source.clone()));
                    }
                    prepared.create_target(agent, &target, true).await?;
                    process.mounts.push(ProcessMount::Bind {
                        source,
                        target,
                        read_only: *read_only,
                    });
                }
                RunMount::Tmpfs { target, size_bytes } => {
                    let target = path(target)?;
                    prepared.create_target(agent, &target, true).await?;
                    process.mounts.push(ProcessMount::Tmpfs {
                        target,
                        size_bytes: *size_bytes,
                    });
                }
                RunMount::Ssh {
                    id,
                    target,
                    required,
                    uid,
                    gid,
                    mode,
                } => {
                    // Without the agent, an optional mount is omitted.
                    if !self.ssh.has(id) {
                        if *required {
                            return Err(BuildFailure::new(format!(
                                "the SSH agent `{id}` is required: pass --ssh {id}"
                            )));
                        }
                        continue;
                    }
                    let target = path(target)?;
                    let unique = new_id().map_err(|e| BuildFailure::from_error(&e))?;
                    let source = format!("{STAGING}/ssh-{unique}");
                    let listener = SocketListener {
                        path: source.clone(),
                        uid: *uid,
                        gid: *gid,
                        mode: *mode,
                        only_retains: false,
                    };
                    let sandbox = at.sandbox.as_deref().unwrap_or_default();
                    let tasks = self.ssh_socket(sandbox, id, listener).await?;
                    prepared.ssh.push(tasks);
                    prepared.create_target(agent, &target, false).await?;
                    // As in Docker, the variable names the socket of the first such mount.
                    let variable = process.env.entry(SSH_VARIABLE.to_owned());
                    variable.or_insert_with(|| Secret(target.clone()));
                    process.mounts.push(ProcessMount::Bind {
                        source,
                        target,
                        read_only: false,
                    });
                }
                RunMount::Secret {
                    id,
                    target,
                    env,
                    required,
                    uid,
                    gid,
                    mode,
                } => {
                    // Without the secret, an optional mount is omitted.
                    let Some(value) = self.secrets.get(id) else {
                        if *required {
                            return Err(BuildFailure::new(format!(
                                "the secret `{id}` is required: pass --secret id={id},src=FILE"
                            )));
                        }
                        continue;
                    };
                    if let Some(name) = env {
                        let text = String::from_utf8(value.to_vec()).ok();
                        let text = text.filter(|text| !text.contains('\0')).ok_or_else(|| {
                            BuildFailure::new(format!(
                                "the secret `{id}` is binary and cannot be the variable {name}: \
                                 use a target"
                            ))
                        })?;
                        process.env.insert(name.clone(), Secret(text));
                    }
                    if let Some(target) = target {
                        let target = path(target)?;
                        prepared.create_target(agent, &target, false).await?;
                        process.mounts.push(ProcessMount::File {
                            target,
                            content: Secret(BASE64.encode(value)),
                            uid: *uid,
                            gid: *gid,
                            mode: *mode,
                        });
                    }
                }
            }
        }
        prepared.process = Some(process);
        Ok(prepared)
    }

    /// Stores the content of cache mounts after a successful command, and removes all files of the
    /// mounts.
    pub(super) async fn finish_mounts(
        &self,
        agent: &AgentClient,
        mut prepared: PreparedMounts,
        succeeded: bool,
        name: &str,
    ) -> Result<(), BuildFailure> {
        if prepared.process.is_none() {
            return Ok(());
        }
        // Remaining programs of the command lose their connections to SSH agents.
        prepared.ssh.clear();
        if succeeded {
            for (cache, path) in &prepared.caches {
                // The cache is not part of the result, so that the step succeeds without it.
                if let Err(e) = self.store_cache(agent, cache, path).await {
                    let message = format!("cannot store a cache mount: {}", e.message);
                    self.log.info(Some(name), &message);
                }
            }
        }
        copy::clear_staging(agent).await?;
        for path in prepared.created.iter().rev() {
            // The command may have created files in the directory outside of the mount.
            let is_empty = match agent.stat(path, Some(ROOT_USER)).await {
                Ok(entry) if entry.kind == EntryKind::Directory => {
                    let list = agent.list_dir(path, Some(ROOT_USER), 1).await;
                    list.is_ok_and(|list| list.is_empty())
                }
                Ok(entry) => entry.size == "0",
                Err(_) => false,
            };
            if is_empty {
                let removed = agent.remove(path, Some(ROOT_USER)).await;
                removed.map_err(|e| BuildFailure::agent(&format!("remove {path}"), e))?;
            }
        }
        Ok(())
    }

    /// Creates the directory of a cache mount at `place`, with the content of an earlier build.
    async fn restore_cache(
        &self,
        agent: &AgentClient,
        name: &str,
        place: &str,
        (uid, gid, mode): (u32, u32, u32),
    ) -> Result<(), BuildFailure> {
        let owner = self.template.owner.as_deref();
        let found = self.inner.uploads.find(owner, name);
        match found.map_err(|e| BuildFailure::new(e.to_string()))? {
            Some(found) => transfer::unpack_archive(agent, &found.path, place).await,
            None => transfer::write_directory(agent, place, "content", (uid, gid, mode)).await,
        }
    }

    /// Stores the content of a cache mount for later builds of the same owner.
    async fn store_cache(
        &self,
        agent: &AgentClient,
        name: &str,
        path: &str,
    ) -> Result<(), BuildFailure> {
        let failed = |e: &dyn std::fmt::Display| BuildFailure::new(e.to_string());
        let uploads = &self.inner.uploads;
        let owner = self.template.owner.as_deref();
        let token = uploads.create_ticket(owner, name, UploadNaming::OfClient);
        let token = token.map_err(|e| failed(&e))?;
        let mut upload = uploads.begin(&token).await.map_err(|e| failed(&e))?;
        let reader = agent.archive_read(&[path], Some(ROOT_USER)).await;
        let mut reader = reader.map_err(|e| failed(&e))?;
        let mut bytes = 0;
        while let Some(piece) = reader.next().await.map_err(|e| failed(&e))? {
            bytes += piece.len() as u64;
            // The guest determines the size.
            if bytes > MAX_CACHE_BYTES {
                let limit = MAX_CACHE_BYTES >> 30;
                return Err(BuildFailure::new(format!("it is larger than {limit} GiB")));
            }
            upload.write(&piece).await.map_err(|e| failed(&e))?;
        }
        upload.finish().await.map_err(|e| failed(&e))
    }
}

impl PreparedMounts {
    /// Creates the target of a mount with its parents, unless it exists. The target is a directory
    /// if `directory` is true, and an empty file otherwise.
    async fn create_target(
        &mut self,
        agent: &AgentClient,
        target: &str,
        directory: bool,
    ) -> Result<(), BuildFailure> {
        let mut path = String::new();
        let components: Vec<&str> = target.split('/').filter(|c| !c.is_empty()).collect();
        for (number, component) in components.iter().enumerate() {
            if matches!(*component, "." | "..") {
                return Err(BuildFailure::new(format!(
                    "the target `{target}` of a mount contains `{component}`"
                )));
            }
            path = format!("{path}/{component}");
            match agent.stat(&path, Some(ROOT_USER)).await {
                Ok(_) => continue,
                Err(e) if e.is_not_found() => {}
                Err(e) => return Err(BuildFailure::agent(&format!("read {path}"), e)),
            }
            let cannot = |e| BuildFailure::agent(&format!("create {path}"), e);
            if directory || number + 1 < components.len() {
                let made = agent.make_dir(&path, Some(ROOT_USER)).await;
                made.map(drop).map_err(cannot)?;
            } else {
                let written = agent.write(&path, Some(ROOT_USER), String::new()).await;
                written.map(drop).map_err(cannot)?;
            }
            self.created.push(path.clone());
        }
        Ok(())
    }
}

/// Returns the name under which the content of a cache mount is stored. As in Docker, directories
/// with other owners or permissions are other caches.
fn cache_name(id: &str, uid: u32, gid: u32, mode: u32) -> String {
    let text = format!("cache mount 1\n{uid}:{gid}:{mode:o}\n{id}");
    HEXLOWER.encode(&Sha256::digest(text.as_bytes()))
}
