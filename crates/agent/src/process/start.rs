//! `Start` request: finds the user, directory and program, starts the process on a worker thread,
//! and registers it in the table.

use super::child::{self, SpawnError, SpawnPlan, SpawnStep};
use super::frame_hub::{FrameHub, Subscription};
use super::input::ProcessInput;
use super::message::StartRequest;
use super::output_pump::{OutputPump, ProcessDeadline};
use super::pipes::{self, AgentEnds};
use super::private_mounts;
use super::program_lookup;
use super::table::GuestProcess;
use crate::boot::site;
use crate::rpc::request::CallInfo;
use crate::rpc::{RpcCode, RpcError, frame};
use crate::settings::DEFAULT_PATH;
use crate::state::Agent;
use crate::sys;
use crate::users::{User, UserLookup};
use crate::workers::{CallClass, Progress};
use bytes::Bytes;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns the `start` event of a process.
pub fn start_event(pid: u32) -> Bytes {
    frame::message(&serde_json::json!({"event": {"start": {"pid": pid}}}))
}

/// Pid of a process that a worker starts; 0 until the process exists.
#[derive(Debug, Clone, Default)]
pub struct SpawnSlot(pub(super) Arc<AtomicU32>);

impl SpawnSlot {
    /// Returns the pid, or 0.
    pub fn pid(&self) -> u32 {
        // This load pairs with the store in the child (`child::run`), which runs on another thread.
        self.0.load(Ordering::Acquire)
    }
}

impl PartialEq for SpawnSlot {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Starts a process and subscribes to it.
pub async fn start(
    agent: &Rc<Agent>,
    request: StartRequest,
    call: &CallInfo,
) -> Result<Subscription<GuestProcess>, RpcError> {
    // Start the process in a separate task, so that it is registered even if its client
    // disconnects.
    let (agent, call) = (Rc::clone(agent), call.clone());
    let task = tokio::task::spawn_local(async move {
        let slot = SpawnSlot::default();
        // The table knows the process before it exists, so that an early exit is not lost.
        agent.processes.begin(&slot);
        let started = start_registered(&agent, request, &call, &slot).await;
        if started.is_err() {
            agent.processes.abandon(&slot);
        }
        started
    });
    task.await
        .map_err(|e| RpcError::new(RpcCode::Internal, e.to_string()))?
}

/// Starts a process, registers it in the table of processes, and subscribes the caller to its
/// output.
async fn start_registered(
    agent: &Rc<Agent>,
    request: StartRequest,
    call: &CallInfo,
    slot: &SpawnSlot,
) -> Result<Subscription<GuestProcess>, RpcError> {
    let what = format!("{}: cannot start", request.process.cmd);
    let job = SpawnJob {
        lookup: agent.lookup(call.user.as_deref()),
        default_workdir: agent.settings.borrow().default_workdir.clone(),
        variables: agent.sandbox_variables(),
        site_variables: agent.site_variables.borrow().clone(),
        null: Arc::clone(&agent.processes.null),
        slot: slot.clone(),
        request,
    };
    let spawn = move |progress: &Progress| job.spawn(progress);
    let mut spawned = agent.workers.attempt(CallClass::Start, what, spawn).await?;
    let started_twice = || RpcError::new(RpcCode::Internal, "the process was started twice");
    let (request, ends) = spawned.parts.take().ok_or_else(started_twice)?;
    let (sink, outputs) = ends
        .register()
        .map_err(|e| RpcError::io("cannot connect a process", &e))?;
    // No `await` separates these calls. A process that this task has adopted, and that is therefore
    // no longer killed when the task is cancelled, is always registered.
    let pid = spawned.adopt();
    let process = Rc::new(GuestProcess {
        pid,
        is_command: request.pty.is_none() && !request.service,
        config: request.process,
        tag: request.tag,
        hub: FrameHub::default(),
        input: ProcessInput::new(sink),
        exit: Cell::new(None),
        end: OnceCell::new(),
        pump: RefCell::new(None),
        killed: Cell::new(false),
        start_index: Cell::new(0),
    });
    agent.processes.insert(&process, slot);
    let subscription = Subscription::new(&process, start_event(pid));
    let pump = OutputPump {
        process,
        outputs,
        deadline: call
            .timeout
            .map(|limit| ProcessDeadline::new(limit, subscription.id())),
        grace: None,
    };
    tokio::task::spawn_local(pump.run(Rc::clone(agent)));
    Ok(subscription)
}

/// Values that a worker needs to start a process.
struct SpawnJob {
    lookup: UserLookup,
    default_workdir: Option<String>,
    /// Environment of the sandbox.
    variables: BTreeMap<String, String>,
    site_variables: BTreeMap<String, String>,
    /// Open file `/dev/null`.
    null: Arc<OwnedFd>,
    /// Receives the pid of the process.
    slot: SpawnSlot,
    request: StartRequest,
}

/// A started process. Dropping the value kills the process unless it was adopted: the caller has
/// stopped waiting, and no reader of the output exists.
struct SpawnedProcess {
    pid: u32,
    /// An `Option`, because fields cannot be moved out of a type that implements `Drop`.
    parts: Option<(StartRequest, AgentEnds)>,
}

impl SpawnedProcess {
    /// Prevents that the process is killed when this value is dropped. Returns its pid.
    fn adopt(mut self) -> u32 {
        std::mem::take(&mut self.pid)
    }
}

impl Drop for SpawnedProcess {
    fn drop(&mut self) {
        if self.pid != 0 {
            // SAFETY: the call takes no pointers. The process is the leader of its group.
            unsafe { libc::kill(-self.pid.cast_signed(), libc::SIGKILL) };
        }
    }
}

impl SpawnJob {
    /// Finds user, directory and program, and starts the process. Runs on a worker thread, because
    /// the file system may not answer.
    fn spawn(self, progress: &Progress) -> Result<SpawnedProcess, RpcError> {
        let user = self.lookup.find()?;
        let cwd = self.working_directory(&user, progress)?;
        let env = self.environment(&user);
        let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let request = self.request;
        let program = program_lookup::find(&request.process.cmd, path, &cwd, &user)?;
        progress.advance();
        let bad = |_| {
            RpcError::new(
                RpcCode::InvalidArgument,
                "a NUL byte in command or environment",
            )
        };
        let argv: Vec<CString> = std::iter::once(&request.process.cmd)
            .chain(&request.process.args)
            .map(|a| sys::cstring(a.as_bytes()).map_err(bad))
            .collect::<Result<_, _>>()?;
        let envp: Vec<CString> = env
            .iter()
            .map(|(k, v)| sys::cstring(format!("{k}={v}").as_bytes()).map_err(bad))
            .collect::<Result<_, _>>()?;
        let (stdio, ends) = pipes::open(&request, &user)
            .map_err(|e| RpcError::io("cannot connect a process", &e))?;
        let limits = request.process.limits.map(|l| l.pairs());
        let mounts = request.mounts.as_ref().map(private_mounts::steps);
        let mounts = mounts.transpose()?;
        // SAFETY: the call takes no pointers.
        let privileged = unsafe { libc::geteuid() } == 0;
        let plan = SpawnPlan {
            program: &sys::cpath(&program).map_err(bad)?,
            argv: &pointers(&argv),
            envp: &pointers(&envp),
            cwd: &sys::cpath(&cwd).map_err(bad)?,
            stdio: stdio.each_ref().map(|fd| match fd {
                Some(fd) => fd.as_raw_fd(),
                None => self.null.as_raw_fd(),
            }),
            terminal: request.pty.is_some(),
            // Only root may change the user. In tests, the agent is an ordinary user.
            identity: privileged.then_some((user.uid, user.gid, &user.groups)),
            limits: limits.as_deref().unwrap_or_default(),
            mounts: mounts.as_deref(),
        };
        let pid = child::spawn(&plan, &self.slot.0)
            .map_err(|e| explain(&request.process.cmd, &cwd, &e))?;
        Ok(SpawnedProcess {
            pid,
            parts: Some((request, ends)),
        })
    }

    /// Returns the working directory of the process: the requested one, which must exist, or else
    /// the first existing one of the default of the template, the home directory and `/`.
    /// `progress` detects a file system that does not respond.
    fn working_directory(&self, user: &User, progress: &Progress) -> Result<PathBuf, RpcError> {
        let default = self.default_workdir.as_deref();
        let requested = self.request.process.cwd.as_deref();
        let requested = requested.filter(|c| !c.is_empty());
        if let Some(cwd) = requested {
            let cwd = user.resolve(cwd, default);
            progress.enter(&cwd)?;
            return match std::fs::metadata(&cwd) {
                Ok(found) if found.is_dir() => Ok(cwd),
                Ok(_) => Err(bad_cwd(&cwd, "is not a directory")),
                Err(_) => Err(bad_cwd(&cwd, "does not exist")),
            };
        }
        // The default directory may be missing: an image may configure a directory that it does not
        // contain, and a user may have no home directory.
        let default = default.map(|path| user.resolve(path, None));
        for directory in default.into_iter().chain([PathBuf::from(&user.home)]) {
            // A file system that does not respond is treated like a missing directory.
            if progress.enter(&directory).is_ok() && directory.is_dir() {
                return Ok(directory);
            }
        }
        Ok(PathBuf::from("/"))
    }

    /// Returns the environment of the process. Variables of the request replace all others.
    fn environment(&self, user: &User) -> BTreeMap<String, String> {
        let mut env = BTreeMap::from([
            ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
            ("HOME".to_owned(), user.home.clone()),
            ("USER".to_owned(), user.name.clone()),
            ("LOGNAME".to_owned(), user.name.clone()),
        ]);
        if self.request.pty.is_some() {
            env.insert("TERM".to_owned(), "xterm-256color".to_owned());
        }
        // Later sources replace earlier ones: the sandbox's variables, then the variables of the
        // request, and then its variables with secrets, which lists of processes do not show.
        env.extend(self.variables.clone());
        env.extend(self.request.process.envs.clone());
        let secrets = self.request.mounts.iter().flat_map(|m| &m.env);
        env.extend(secrets.map(|(name, value)| (name.clone(), value.0.clone())));
        site::add_missing(&mut env, &self.site_variables);
        env
    }
}

/// Returns the error for an unusable working directory.
fn bad_cwd(cwd: &Path, why: &str) -> RpcError {
    RpcError::new(
        RpcCode::InvalidArgument,
        format!("cwd '{}' {why}", cwd.display()),
    )
}

/// Returns pointers to the strings, and a null pointer at the end.
fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings
        .iter()
        .map(|s| s.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

/// Returns the error for a client, depending on the step of the start that failed.
fn explain(cmd: &str, cwd: &Path, failure: &SpawnError) -> RpcError {
    let error = &failure.error;
    match (failure.step, error.raw_os_error()) {
        (SpawnStep::Exec, Some(libc::ENOENT | libc::ENOTDIR)) => program_lookup::not_found(cmd),
        (SpawnStep::Exec, Some(libc::EACCES | libc::EPERM)) => {
            program_lookup::not_executable(cmd, "not executable")
        }
        (SpawnStep::Exec, Some(libc::ENOEXEC | libc::ELIBBAD)) => {
            program_lookup::not_executable(cmd, "exec format error")
        }
        (SpawnStep::Exec, Some(libc::E2BIG)) => RpcError::new(
            RpcCode::InvalidArgument,
            format!("{cmd}: arguments and environment are too long"),
        ),
        (SpawnStep::Cwd, Some(libc::EACCES)) => RpcError::new(
            RpcCode::PermissionDenied,
            format!("cwd '{}': permission denied", cwd.display()),
        ),
        (SpawnStep::Cwd, _) => bad_cwd(cwd, "does not exist"),
        (SpawnStep::ProcessLimits, _) => RpcError::new(
            RpcCode::InvalidArgument,
            format!("{cmd}: cannot set limits: {error}"),
        ),
        (SpawnStep::Mounts, _) => RpcError::io(&format!("{cmd}: cannot mount its files"), error),
        (SpawnStep::Setup | SpawnStep::Identity | SpawnStep::Exec, _) => {
            RpcError::io(&format!("{cmd}: cannot start"), error)
        }
    }
}
