//! `Start`: from a request to a running process.

use super::child::{SpawnError, SpawnPlan, SpawnStep};
use super::frame_hub::{FrameHub, Subscription};
use super::input::{InputSink, ProcessInput};
use super::message::StartRequest;
use super::output_pump::{OutputPump, ProcessDeadline, ProcessOutput};
use super::program_lookup;
use super::pty;
use super::table::GuestProcess;
use crate::boot::site;
use crate::rpc::request::CallInfo;
use crate::rpc::{RpcCode, RpcError, frame};
use crate::settings::DEFAULT_PATH;
use crate::state::Agent;
use crate::sys;
use crate::users::User;
use bytes::Bytes;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;

/// The `start` event of a process.
pub fn start_event(pid: u32) -> Bytes {
    frame::message(&serde_json::json!({"event": {"start": {"pid": pid}}}))
}

/// Starts a process and subscribes to it.
pub fn start(
    agent: &Rc<Agent>,
    request: StartRequest,
    call: &CallInfo,
) -> Result<Subscription<GuestProcess>, RpcError> {
    let user = agent.user(call.user.as_deref())?;
    let cwd = working_directory(agent, &user, request.process.cwd.as_deref())?;
    let env = environment(agent, &user, &request);
    let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let program = program_lookup::find(&request.process.cmd, path, &cwd, &user)?;

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
    let pipes = ProcessPipes::open(&request, &user)
        .map_err(|e| RpcError::io("cannot connect a process", &e))?;
    let limits = request
        .process
        .limits
        .map(|l| l.pairs())
        .unwrap_or_default();
    // SAFETY: no pointers.
    let privileged = unsafe { libc::geteuid() } == 0;
    let pid = agent
        .processes
        .stack
        .borrow_mut()
        .spawn(&SpawnPlan {
            program: &sys::cpath(&program).map_err(bad)?,
            argv: &pointers(&argv),
            envp: &pointers(&envp),
            cwd: &sys::cpath(&cwd).map_err(bad)?,
            stdio: pipes.child.each_ref().map(|fd| match fd {
                Some(fd) => fd.as_raw_fd(),
                None => agent.processes.null.as_raw_fd(),
            }),
            terminal: request.pty.is_some(),
            identity: privileged.then_some((user.uid, user.gid, &user.groups)),
            limits: &limits,
        })
        .map_err(|e| explain(&request.process.cmd, &cwd, &e))?;

    let process = Rc::new(GuestProcess {
        pid,
        config: request.process,
        tag: request.tag,
        hub: FrameHub::default(),
        input: ProcessInput::new(pipes.sink),
        exit: Cell::new(None),
        end: OnceCell::new(),
        pump: RefCell::new(None),
        killed: Cell::new(false),
        before: Cell::new(0),
    });
    agent.processes.insert(&process);
    let subscription = Subscription::new(&process, start_event(pid));
    let pump = OutputPump {
        process,
        outputs: pipes.outputs,
        deadline: call
            .timeout
            .map(|limit| ProcessDeadline::new(limit, subscription.id())),
        grace: None,
    };
    tokio::task::spawn_local(pump.run(Rc::clone(agent)));
    Ok(subscription)
}

fn working_directory(
    agent: &Agent,
    user: &User,
    requested: Option<&str>,
) -> Result<PathBuf, RpcError> {
    let settings = agent.settings.borrow();
    let default = settings.default_workdir.as_deref();
    let requested = requested.filter(|c| !c.is_empty());
    // An image may configure a directory that it does not contain; only a directory of the request
    // is an error.
    let there = |path: &&str| requested.is_some() || user.resolve(path, None).is_dir();
    match requested.or(default.filter(there)) {
        Some(cwd) => {
            let cwd = user.resolve(cwd, default);
            match std::fs::metadata(&cwd) {
                Ok(found) if found.is_dir() => Ok(cwd),
                Ok(_) => Err(bad_cwd(&cwd, "is not a directory")),
                Err(_) => Err(bad_cwd(&cwd, "does not exist")),
            }
        }
        None => {
            // A user without a home still gets to work.
            let home = PathBuf::from(&user.home);
            Ok(if home.is_dir() {
                home
            } else {
                PathBuf::from("/")
            })
        }
    }
}

fn bad_cwd(cwd: &std::path::Path, why: &str) -> RpcError {
    RpcError::new(
        RpcCode::InvalidArgument,
        format!("cwd '{}' {why}", cwd.display()),
    )
}

fn environment(agent: &Agent, user: &User, request: &StartRequest) -> BTreeMap<String, String> {
    let settings = agent.settings.borrow();
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), user.home.clone()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
    ]);
    if request.pty.is_some() {
        env.insert("TERM".to_owned(), "xterm-256color".to_owned());
    }
    env.extend(settings.env.clone());
    env.extend(request.process.envs.clone());
    site::add_missing(&mut env, agent.site.borrow().variables());
    env
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings
        .iter()
        .map(|s| s.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

/// The descriptors between us and a process.
struct ProcessPipes {
    /// Its stdin, stdout and stderr; `None` is `/dev/null`.
    child: [Option<OwnedFd>; 3],
    sink: InputSink,
    outputs: Vec<ProcessOutput>,
}

impl ProcessPipes {
    fn open(request: &StartRequest, user: &User) -> io::Result<Self> {
        if let Some(pty) = request.pty {
            let (master, slave) = pty::open(pty.size, user.uid)?;
            let master = Rc::new(sys::watch(master)?);
            return Ok(Self {
                child: [
                    Some(slave.try_clone()?),
                    Some(slave.try_clone()?),
                    Some(slave),
                ],
                sink: InputSink::Pty(Rc::clone(&master)),
                outputs: vec![ProcessOutput {
                    fd: master,
                    field: "pty",
                    is_wide: Cell::new(true),
                }],
            });
        }
        let (stdin, sink) = if request.stdin.unwrap_or(true) {
            let (theirs, ours) = sys::pipe()?;
            (Some(theirs), InputSink::Pipe(sys::watch(ours)?))
        } else {
            (None, InputSink::Closed)
        };
        let (stdout, their_stdout) = sys::pipe()?;
        let (stderr, their_stderr) = sys::pipe()?;
        let output = |fd: OwnedFd, field| -> io::Result<ProcessOutput> {
            sys::set_nonblocking(fd.as_raw_fd())?;
            let fd = sys::register(fd, tokio::io::Interest::READABLE)?;
            Ok(ProcessOutput {
                fd: Rc::new(fd),
                field,
                is_wide: Cell::new(false),
            })
        };
        Ok(Self {
            child: [stdin, Some(their_stdout), Some(their_stderr)],
            sink,
            outputs: vec![output(stdout, "stdout")?, output(stderr, "stderr")?],
        })
    }
}

fn explain(cmd: &str, cwd: &std::path::Path, failure: &SpawnError) -> RpcError {
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
        (SpawnStep::Setup | SpawnStep::Identity | SpawnStep::Exec, _) => {
            RpcError::io(&format!("{cmd}: cannot start"), error)
        }
    }
}
