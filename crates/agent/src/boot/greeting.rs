//! Greeting between agent and host (`jiffy_proto::agent`): the agent sends `Hello`, receives and
//! applies the `Identity`, and answers `Ready`. The agent repeats the greeting after each loss of
//! the connection. A clone loses its copy of the parent's connection, and so receives its own
//! identity.
//!
//! In a microVM, the agent connects to the host over vsock ([`run`]). In gVisor, the host connects
//! to the agent ([`receive`]). After the greeting, the host may send a `ClockStep`, a correction of
//! the guest's clock by a difference. Hooks are executables in a directory of the guest, which the
//! host runs before and after a snapshot.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.

use super::{GuestEngine, identity};
use crate::state::Agent;
use crate::{sys, vsock};
use jiffy_proto::agent::{
    ClockReading, ClockStep, HELLO_PORT, Hello, Identity, MAX_GREETING, Ready,
};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

/// Pause after the first failed attempt. It doubles with each further failure.
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// Maximum pause between attempts.
const LAST_RETRY: Duration = Duration::from_secs(1);
/// Maximum length of a [`ClockStep`] in bytes.
const MAX_CLOCK_STEP: usize = 64;

/// Repeats the greeting forever. `began_us` is the time since boot at which the agent started, in
/// microseconds. `early` is a connection that was opened in advance. `broken` is notified when an
/// established connection breaks.
pub async fn run(
    agent: Rc<Agent>,
    began_us: u64,
    mut early: Option<OwnedFd>,
    broken: watch::Sender<()>,
) {
    let mut applier = identity::IdentityApplier::new(GuestEngine::MicroVm);
    let mut pause = FIRST_RETRY;
    loop {
        let socket = match early.take() {
            Some(socket) => Ok(socket),
            None => vsock::begin_connect(HELLO_PORT),
        };
        let stream = match socket {
            Ok(socket) => vsock::finish(socket).await,
            Err(e) => Err(e),
        };
        let greeted = match stream {
            Ok(stream) => greet(&agent, &mut applier, began_us, stream).await,
            Err(e) => Err(e),
        };
        if greeted.is_ok() {
            // An established connection broke. The guest was most likely restored, and the host
            // waits for the greeting.
            broken.send_replace(());
            pause = FIRST_RETRY;
            continue;
        }
        // The host may not listen yet, for example during a restore.
        sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

/// Repeats the greeting forever on connections that the host opens. Each connection replaces the
/// previous one. `broken` is notified when an established connection breaks or is replaced.
pub async fn receive(
    agent: Rc<Agent>,
    began_us: u64,
    mut host: mpsc::Receiver<UnixStream>,
    broken: watch::Sender<()>,
) {
    let mut applier = identity::IdentityApplier::new(GuestEngine::Gvisor);
    let mut next = host.recv().await;
    while let Some(stream) = next {
        next = tokio::select! {
            greeted = greet(&agent, &mut applier, began_us, stream) => {
                if greeted.is_ok() {
                    broken.send_replace(());
                }
                host.recv().await
            }
            // A restore does not always close the connection, although the peer no longer exists.
            newer = host.recv() => {
                broken.send_replace(());
                newer
            }
        };
    }
}

/// Sends one greeting and then waits until the connection breaks. Returns `Ok` if the greeting was
/// completed.
async fn greet(
    agent: &Rc<Agent>,
    applier: &mut identity::IdentityApplier,
    began_us: u64,
    mut stream: UnixStream,
) -> io::Result<()> {
    agent.hooks.check();
    let has_hooks = agent.hooks.exist();
    send(
        &mut stream,
        &Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: sys::kernel_release(),
            init_us: began_us,
            hello_us: sys::boot_us(),
            hooks: has_hooks,
        },
    )
    .await?;
    // The read has no timeout: a guest that was started in advance (warm pool) waits here until the
    // host assigns an identity.
    let line = read_line(&mut stream).await?;
    let received = Instant::now();
    let error = match serde_json::from_slice::<Identity>(&line) {
        Ok(identity) => applier.apply(agent, identity, received).await.err(),
        Err(e) => Some(format!("cannot parse the identity: {e}")),
    };
    if let Some(error) = &error {
        eprintln!("jiffy-agent: {error}");
    }
    send(
        &mut stream,
        &Ready {
            ready_us: sys::boot_us(),
            error,
            applied_us: applier.sets_clock().then(|| {
                let applied = received.elapsed().as_micros();
                u64::try_from(applied).unwrap_or(u64::MAX)
            }),
        },
    )
    .await?;
    if !has_hooks {
        tokio::select! {
            () = until_broken(&stream) => return Ok(()),
            () = agent.hooks.appear() => {}
        }
        // One byte notifies the host that the guest now has hooks. Ignore the error: a broken
        // connection is noticed below.
        let _ = stream.try_write(b"\n");
    }
    until_broken(&stream).await;
    Ok(())
}

/// Answers messages about the clock until the connection breaks. A restore resets a connection
/// without closing it: the socket then has an error, but no data to read.
async fn until_broken(stream: &UnixStream) {
    let mut rest = [0; MAX_CLOCK_STEP];
    loop {
        match stream.ready(Interest::READABLE | Interest::ERROR).await {
            Ok(ready) if !ready.is_error() => {}
            _ => return,
        }
        match stream.try_read(&mut rest) {
            Ok(0) => return,
            // The host waits for the response to each message, so a message arrives alone.
            Ok(length) => answer_clock(stream, &rest[..length]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// Changes the clock if the message is a [`ClockStep`]. Other messages are ignored.
fn answer_clock(stream: &UnixStream, message: &[u8]) {
    let Ok(step) = serde_json::from_slice::<ClockStep>(message) else {
        return;
    };
    let time_ns = identity::step_clock(step.step_ns).unwrap_or_else(|e| {
        eprintln!("jiffy-agent: cannot correct the clock: {e}");
        // The time 0 (1970) cannot be right, so the host stops the correction.
        0
    });
    if let Ok(mut line) = serde_json::to_vec(&ClockReading { time_ns }) {
        line.push(b'\n');
        // The line fits into the empty buffer of the socket. Ignore the error: a broken connection
        // is noticed by the caller.
        let _ = stream.try_write(&line);
    }
}

/// Sends a message as a line of JSON.
async fn send(stream: &mut UnixStream, message: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line).await
}

/// Reads a line without its line feed.
async fn read_line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(end) = line.iter().position(|b| *b == b'\n') {
            line.truncate(end);
            return Ok(line);
        }
        // The limit bounds the memory for a line of a faulty host.
        if line.len() > MAX_GREETING {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}
