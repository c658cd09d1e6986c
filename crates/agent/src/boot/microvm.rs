//! Process 1 of a microVM. It communicates with the host over vsock.

use super::{greeting, root, until_reset};
use crate::guest_sockets::GuestSockets;
use crate::process::{oom_log, reaper};
use crate::settings::AgentSettings;
use crate::state::Agent;
use crate::volume_mount::VolumeMounts;
use crate::vsock::{self, VsockListener};
use crate::{huge_text, port_forward, runtime, server, sys};
use jiffy_proto::agent::{ENVD_PORT, HELLO_PORT, TCP_PORT, VOLUME_PORT};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// Runs process 1. Does not return while the guest runs.
pub fn run(began_us: u64) -> i32 {
    // The connection is established while the file systems are being mounted.
    let early = vsock::begin_connect(HELLO_PORT).ok();
    let outcome = root::microvm::enter().and_then(|()| {
        // Ignore the error: huge pages are an optimisation.
        let _ = huge_text::enable();
        runtime::block_on(serve(began_us, early)).map_err(|e| format!("cannot run: {e}"))
    });
    if let Err(reason) = outcome {
        die(&reason);
    }
    1
}

/// Writes the reason to the console, which the host records, and terminates the guest.
fn die(reason: &str) -> ! {
    let line = format!("jiffy-agent: {reason}\n");
    for path in ["/dev/console", "/dev/kmsg"] {
        if let Ok(mut console) = std::fs::File::options().write(true).open(path) {
            // A failure to write cannot be reported elsewhere.
            let _ = io::Write::write_all(&mut console, line.as_bytes());
            break;
        }
    }
    // SAFETY: the calls take no pointers. The VM has no power switch: the VMM handles a restart as
    // the end of the guest.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_AUTOBOOT);
        libc::_exit(1)
    }
}

/// Serves the agent's vsock ports, exchanges greetings with the host and reaps processes, until the
/// guest ends. `early` is a connection for the greeting that was started earlier in the boot.
async fn serve(began_us: u64, early: Option<OwnedFd>) -> io::Result<()> {
    sys::raise_open_files();
    let signals = reaper::signals()?;
    // The agent does not set its `oom_score_adj`, because the out-of-memory killer never chooses
    // process 1. Its children therefore need no reset of the score.
    let agent = Agent::new(AgentSettings::default(), None)?;
    let envd = VsockListener::bind(ENVD_PORT)?;
    let tcp = VsockListener::bind(TCP_PORT)?;
    let volumes = VsockListener::bind(VOLUME_PORT)?;

    // A restore invalidates every connection, but most readers would never receive an error.
    // Therefore all connections are closed together.
    let (broken, resets) = watch::channel(());
    let serving = Rc::clone(&agent);
    let reset = resets.clone();
    tokio::task::spawn_local(async move {
        loop {
            match envd.accept().await {
                Ok(stream) => {
                    let work = server::serve(Rc::clone(&serving), stream);
                    tokio::task::spawn_local(until_reset(reset.clone(), work));
                }
                // The pause limits the processor time if each attempt fails, for example for lack
                // of descriptors.
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    });
    tokio::task::spawn_local(async move {
        let sockets = Rc::new(GuestSockets::default());
        loop {
            match tcp.accept().await {
                Ok(stream) => {
                    let work = port_forward::serve(stream, Rc::clone(&sockets));
                    tokio::task::spawn_local(until_reset(resets.clone(), work));
                }
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    });
    tokio::task::spawn_local(async move {
        let mounts = VolumeMounts::default();
        loop {
            match volumes.accept().await {
                // A thread serves the stream, and notices when a restore resets it.
                Ok(stream) => mounts.serve(stream),
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    });
    let killing = Rc::clone(&agent);
    let follow = oom_log::follow_kernel(move || killing.processes.notice_kills());
    tokio::task::spawn_local(follow);
    tokio::task::spawn_local(greeting::run(Rc::clone(&agent), began_us, early, broken));
    reaper::run(agent, signals).await
}
