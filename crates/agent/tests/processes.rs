//! Tests of the list of processes, and of signals to them.
#![allow(clippy::unwrap_used)]

use crate::common::{LIMIT, TestAgent};
use jiffy_agent_client::{Process, ProcessSpec};

/// Starts a process that sleeps under a hostile name. Returns it and its id.
async fn sleeper(agent: &TestAgent) -> (Process, u32) {
    let line = r"exec -a $'\x1b[2J\xff\xe2\x80\xae' sleep 300";
    let spec = ProcessSpec::new("/bin/bash", ["-c", line]);
    let process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    // The shell is replaced after its start was reported.
    crate::common::wait_for("the program", || {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name == "sleep\n")
    });
    (process, pid)
}

#[tokio::test]
async fn processes_are_listed_and_hostile_command_lines_are_harmless() {
    let agent = TestAgent::new();
    let (_process, pid) = sleeper(&agent).await;
    let listed = agent.client.guest_processes().await.unwrap();
    let found = listed.iter().find(|p| p.pid == pid).unwrap();
    assert_eq!(found.name, "sleep");
    assert!(found.command.ends_with(" 300"), "{}", found.command);
    assert!(
        found.command.contains("\u{fffd}[2J\u{fffd}\u{fffd}"),
        "{}",
        found.command
    );
    assert_eq!((found.user.as_str(), found.state), ("root", 'S'));
    assert!(
        found.memory_bytes > 0 && found.age_seconds < 60.0,
        "{found:?}"
    );
    assert!(listed.iter().any(|p| p.pid == found.parent));
    agent
        .client
        .signal_process(pid, libc::SIGKILL, None)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_signal_reaches_only_the_process_with_the_given_start_time() {
    let agent = TestAgent::new();
    let (process, pid) = sleeper(&agent).await;
    let listed = agent.client.guest_processes().await.unwrap();
    let start = listed.iter().find(|p| p.pid == pid).unwrap().start_ticks;
    let client = &agent.client;
    let refused = client
        .signal_process(pid, libc::SIGKILL, Some(start + 1))
        .await;
    assert!(refused.unwrap_err().is_not_found());
    // Processes 0 and 1 accept no signals, and no signal has the number 1000.
    for (pid, signal) in [(0, libc::SIGKILL), (1, libc::SIGKILL), (pid, 1000)] {
        let refused = client.signal_process(pid, signal, None).await;
        assert!(!refused.unwrap_err().is_not_found(), "{pid} {signal}");
    }
    client
        .signal_process(pid, libc::SIGTERM, Some(start))
        .await
        .unwrap();
    let (end, ..) = process.output(LIMIT).await.unwrap();
    assert_eq!(end.status, "signal: terminated");
    let gone = client.signal_process(pid, libc::SIGTERM, Some(start)).await;
    assert!(gone.unwrap_err().is_not_found());
}
