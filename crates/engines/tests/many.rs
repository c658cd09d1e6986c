//! Many sandboxes from one set of files, and many connections to one sandbox.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{Guest, base, connect, size, skip, within};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Request that the agent answers without a body.
const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nhost: agent\r\n\r\n";
/// The limit of descriptors applies to the whole process, so the tests run one at a time.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_sandboxes_boot_concurrently_from_the_same_descriptors() {
    let _alone = ALONE.lock().await;
    let Some(prepared) = base("ten_sandboxes_boot_concurrently_from_the_same_descriptors") else {
        return;
    };
    let prepared = Arc::new(prepared);
    let started_at = Instant::now();
    let boots: Vec<_> = (0..10)
        .map(|_| {
            let prepared = prepared.clone();
            tokio::spawn(async move { Guest::boot(&prepared, &size(1, 256)).await })
        })
        .collect();
    let mut guests = Vec::new();
    for boot in boots {
        guests.push(boot.await.unwrap());
    }
    let all = started_at.elapsed();
    let mut each: Vec<_> = guests
        .iter()
        .map(|g| g.vm.report().total_us / 1000)
        .collect();
    each.sort_unstable();
    println!("ten concurrent boots: all in {all:?}, each in {each:?} ms");
    let mut ids = Vec::new();
    for guest in &guests {
        // The root image is read through the shared descriptor. Writes to the disk are private to
        // the guest.
        let script = "test ! -e /mark && touch /mark && md5sum /usr/bin/python3* && cat /proc/sys/kernel/random/boot_id";
        let output = guest.run(&["sh", "-c", script]).await;
        let (files, id) = output.trim().rsplit_once('\n').unwrap();
        ids.push((id.to_owned(), files.to_owned()));
    }
    ids.sort();
    // The boot ids differ, and the files are the same.
    assert!(ids.windows(2).all(|w| w[0].0 != w[1].0 && w[0].1 == w[1].1));
    for guest in guests {
        guest.finish().await;
    }
}

#[tokio::test]
async fn five_hundred_connections_are_open_despite_a_low_soft_limit() {
    const NAME: &str = "five_hundred_connections_are_open_despite_a_low_soft_limit";
    const CONNECTIONS: usize = 500;
    let _alone = ALONE.lock().await;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 2048 {
        return skip(NAME, &format!("the hard limit on open files is {hard}"));
    }
    let Some(prepared) = base(NAME) else { return };
    // The VMM inherits the low limit. This process itself needs many descriptors afterwards.
    setrlimit(Resource::RLIMIT_NOFILE, 256, hard).unwrap();
    let guest = Guest::boot(&prepared, &size(1, 512)).await;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let started_at = Instant::now();
    let connector = guest.vm.connector();
    let mut streams = Vec::new();
    for _ in 0..CONNECTIONS {
        streams.push(connect(&connector).await.unwrap());
    }
    // Two rounds, so that all connections are open when the second round starts.
    for _ in 0..2 {
        for stream in &mut streams {
            stream.write_all(REQUEST).await.unwrap();
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            let answer = within("an answer", answer(stream)).await;
            assert!(answer.starts_with("HTTP/1.1 204"), "{number}: {answer:?}");
        }
    }
    let open = std::fs::read_dir(format!("/proc/{}/fd", guest.vm.vmm_pid())).unwrap();
    let open = open.count();
    println!(
        "{CONNECTIONS} connections, {open} descriptors of the VMM, {:?}",
        started_at.elapsed()
    );
    assert!(open > CONNECTIONS);
    drop(streams);
    guest.run(&["true"]).await;
    guest.finish().await;
}

#[tokio::test]
async fn connections_wait_for_a_busy_vmm() {
    const NAME: &str = "connections_wait_for_a_busy_vmm";
    const CONNECTIONS: usize = 600;
    let _alone = ALONE.lock().await;
    let Some(prepared) = base(NAME) else { return };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 2048 {
        return skip(NAME, &format!("the hard limit on open files is {hard}"));
    }
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(2048), hard).unwrap();
    let guest = Guest::boot(&prepared, &size(1, 512)).await;
    let vmm = Pid::from_raw(guest.vm.vmm_pid().try_into().unwrap());
    // The VMM takes no requests from its control socket until it is continued below.
    kill(vmm, Signal::SIGSTOP).unwrap();
    let connector = guest.vm.connector();
    let mut streams = Vec::new();
    let mut busy = false;
    while streams.len() < CONNECTIONS {
        let mut connecting = std::pin::pin!(connect(&connector));
        let at_once = std::future::poll_fn(|cx| Poll::Ready(connecting.as_mut().poll(cx))).await;
        streams.push(match at_once {
            Poll::Ready(stream) => stream.unwrap(),
            Poll::Pending => {
                if !busy {
                    println!("the control socket held {} requests", streams.len());
                    busy = true;
                    kill(vmm, Signal::SIGCONT).unwrap();
                }
                within("a connection", connecting).await.unwrap()
            }
        });
    }
    kill(vmm, Signal::SIGCONT).unwrap();
    assert!(busy, "the control socket took all {CONNECTIONS} requests");
    for (number, stream) in streams.iter_mut().enumerate() {
        stream.write_all(REQUEST).await.unwrap();
        let answer = within("an answer", answer(stream)).await;
        assert!(answer.starts_with("HTTP/1.1 204"), "{number}: {answer:?}");
    }
    guest.finish().await;
}

/// Reads the head of an answer without a body.
async fn answer(stream: &mut UnixStream) -> String {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => text.push(byte),
            Err(e) => text.extend_from_slice(format!("{e}\r\n\r\n").as_bytes()),
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}
