//! The agent as an ordinary process on a development machine, for tests. It mounts no file systems
//! and exchanges no greeting with a host.

use crate::guest_sockets::GuestSockets;
use crate::process::reaper;
use crate::settings::AgentSettings;
use crate::state::Agent;
use crate::{port_forward, runtime, server, sys};
use std::io;
use std::rc::Rc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::sleep;

/// Pause before the next attempt to accept a connection, for example if no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Description of the arguments, for an invalid command line.
const USAGE: &str =
    "usage: jiffy-agent --listen-unix PATH [--listen-tcp-unix PATH] [--token TOKEN] \
                     [--patience-ms N]
Serves the envd protocol on a Unix socket; started as pid 1 without arguments it boots a guest.";

/// Options of the command line.
#[derive(Default)]
struct StandaloneOptions {
    /// Path of the socket for requests.
    listen: Option<String>,
    /// Path of the socket for TCP streams (`port_forward`).
    listen_tcp: Option<String>,
    /// Token that clients must send.
    token: Option<String>,
    /// Time after which a file system counts as not responding.
    patience: Option<Duration>,
}

/// Parses the arguments of the command line.
fn parse(arguments: &[String]) -> Result<StandaloneOptions, String> {
    let mut options = StandaloneOptions::default();
    let mut patience_ms = None;
    let mut rest = arguments.iter();
    while let Some(flag) = rest.next() {
        let slot = match flag.as_str() {
            "--listen-unix" => &mut options.listen,
            "--listen-tcp-unix" => &mut options.listen_tcp,
            "--token" => &mut options.token,
            "--patience-ms" => &mut patience_ms,
            other => return Err(format!("unknown argument '{other}'")),
        };
        *slot = Some(rest.next().ok_or(format!("{flag} needs a value"))?.clone());
    }
    if let Some(text) = patience_ms {
        let ms = text.parse().map_err(|_| "--patience-ms needs a number")?;
        options.patience = Some(Duration::from_millis(ms));
    }
    if options.listen.is_none() {
        return Err("--listen-unix is required".to_owned());
    }
    Ok(options)
}

/// Runs until the process is killed. Returns the exit code.
pub fn run(arguments: &[String]) -> i32 {
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(e) => {
            eprintln!("jiffy-agent: {e}\n{USAGE}");
            return 2;
        }
    };
    match runtime::block_on(serve(options)) {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("jiffy-agent: {e}");
            1
        }
    }
}

/// Serves until a signal arrives: prepares descriptors and signals for the processes of clients,
/// and opens the listeners.
async fn serve(options: StandaloneOptions) -> io::Result<()> {
    sys::raise_open_files();
    // The agent's children must not inherit the descriptors that the agent inherited from its own
    // parent. The descriptors remain open in the agent.
    // SAFETY: the call takes no pointers, and closes the descriptors at exec.
    let _ = unsafe { jiffy_proto::kernel::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    // The parent may ignore signals, which the agent's children must not inherit. The agent ignores
    // SIGPIPE itself, and each child resets this signal (`process::child`).
    let default = [0_u64; 4];
    for signal in (1..=64).filter(|s| *s != libc::SIGPIPE) {
        // SAFETY: `default` is a kernel sigaction of zeroes. The kernel rejects KILL and STOP. Raw,
        // because libc reserves two signals for itself.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null_mut::<u64>(),
                8,
            )
        };
    }
    let signals = reaper::signals()?;
    let settings = AgentSettings {
        access_token: options.token,
        ..AgentSettings::default()
    };
    let agent = Agent::new(settings, options.patience)?;
    if let Some(path) = options.listen_tcp {
        let listener = bind(&path)?;
        tokio::task::spawn_local(async move {
            let sockets = Rc::new(GuestSockets::default());
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let work = port_forward::serve(stream, Rc::clone(&sockets));
                        tokio::task::spawn_local(work);
                    }
                    Err(_) => sleep(ACCEPT_PAUSE).await,
                }
            }
        });
    }
    let listener = bind(&options.listen.unwrap_or_default())?;
    let reaping = Rc::clone(&agent);
    tokio::task::spawn_local(async move { reaper::run(reaping, signals).await });
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::task::spawn_local(server::serve(Rc::clone(&agent), stream));
            }
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Listens on a Unix socket.
fn bind(path: &str) -> io::Result<UnixListener> {
    // A socket of an earlier run may exist.
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot listen on {path}: {e}")))
}
