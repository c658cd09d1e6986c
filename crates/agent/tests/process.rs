//! Tests of processes that the agent starts.

use crate::common::{LIMIT, TestAgent, alive, wait_for};
use jiffy_agent_client::{ClientError, ProcessEvent, ProcessLimits, ProcessSpec, PtySize, RpcCode};
use std::time::{Duration, Instant};

/// Returns the specification of a process that runs a shell command.
fn sh(line: &str) -> ProcessSpec {
    ProcessSpec::new("/bin/sh", ["-c", line])
}

#[tokio::test]
async fn output_and_exit_code_arrive() {
    let agent = TestAgent::new();
    let (status, stdout, stderr) = agent.shell("echo out; echo err >&2; exit 3").await;
    assert_eq!((status.exit_code, status.exited), (3, true));
    assert_eq!(status.status, "exit status 3");
    assert_eq!(status.error.as_deref(), Some("exit status 3"));
    assert_eq!((&stdout[..], &stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    let (status, ..) = agent.shell("true").await;
    assert_eq!((status.exit_code, status.error), (0, None));
}

#[tokio::test]
async fn a_killed_process_reports_its_signal() {
    let agent = TestAgent::new();
    let (status, ..) = agent.shell("kill -9 $$").await;
    // A shell reports 128 + 9 (SIGKILL) in this case.
    assert_eq!((status.exit_code, status.exited), (137, false));
    assert_eq!(status.status, "signal: killed");
    assert!(!status.oom_killed);
}

#[tokio::test]
async fn the_environment_matches_the_protocol() {
    let agent = TestAgent::new();
    let mut spec = ProcessSpec::new("env", [] as [&str; 0]);
    spec.envs.insert("MINE".into(), "a=b c".into());
    spec.user = Some("nobody".into());
    spec.cwd = Some("/".into());
    let (_, stdout, _) = agent
        .client
        .start(&spec)
        .await
        .unwrap()
        .output(LIMIT)
        .await
        .unwrap();
    let text = String::from_utf8(stdout).unwrap();
    let mut names: Vec<_> = text.lines().map(|l| l.split('=').next().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["HOME", "LOGNAME", "MINE", "PATH", "USER"]);
    assert!(text.contains("USER=nobody\n") && text.contains("MINE=a=b c\n"));
}

#[tokio::test]
async fn a_process_has_only_its_users_rights() {
    let agent = TestAgent::new();
    let mut spec = sh("id -u; id -G; cat /etc/shadow; ulimit -Hn");
    spec.user = Some("nobody".into());
    spec.cwd = Some("/".into());
    let process = agent.client.start(&spec).await.unwrap();
    let (_, stdout, stderr) = process.output(LIMIT).await.unwrap();
    let stdout = String::from_utf8(stdout).unwrap();
    // 65534 is the usual id of an unprivileged user and its group.
    assert!(stdout.starts_with("65534\n65534\n"), "{stdout}");
    assert!(
        String::from_utf8(stderr)
            .unwrap()
            .contains("ermission denied")
    );
}

#[tokio::test]
async fn standard_streams_can_be_opened_by_their_path() {
    let agent = TestAgent::new();
    let line = "cat /dev/stdin; echo out > /dev/stdout; echo err > /dev/stderr; \
        echo both | tee /dev/stderr";
    let mut spec = sh(line);
    spec.user = Some("nobody".into());
    spec.cwd = Some("/".into());
    spec.stdin = true;
    let process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    agent.client.send_stdin(pid, b"in\n").await.unwrap();
    agent.client.close_stdin(pid).await.unwrap();
    let (status, stdout, stderr) = process.output(LIMIT).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(stdout), text(stderr));
    assert_eq!(stdout, "in\nout\nboth\n", "{stderr}");
    assert_eq!((stderr.as_str(), status.exit_code), ("err\nboth\n", 0));
}

#[tokio::test]
async fn missing_and_unexecutable_commands_are_distinguished() {
    let agent = TestAgent::new();
    let start = async |spec: ProcessSpec| agent.client.start(&spec).await.err().unwrap();
    let plain = |cmd: &str| ProcessSpec::new(cmd, [] as [&str; 0]);
    std::fs::write(agent.path("text"), "no program").unwrap();
    std::fs::write(agent.path("garbage"), "\x01\x02\x03").unwrap();
    std::fs::set_permissions(
        agent.path("garbage"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let not_found = |e: &ClientError| matches!(e, ClientError::CommandNotFound(_));
    let not_executable = |e: &ClientError| matches!(e, ClientError::CommandNotExecutable(_));
    let e = start(plain("no-such-command")).await;
    assert!(
        not_found(&e) && e.to_string() == "no-such-command: command not found",
        "{e}"
    );
    assert!(not_found(&start(plain("/no/such")).await));
    let e = start(plain("/etc")).await;
    assert!(not_executable(&e) && e.to_string() == "/etc: is a directory");
    let e = start(plain(&agent.path("text"))).await;
    assert!(not_executable(&e) && e.to_string().ends_with(": not executable"));
    let e = start(plain(&agent.path("garbage"))).await;
    assert!(not_executable(&e) && e.to_string().ends_with(": exec format error"));
    let code = |e: &ClientError, wanted: RpcCode| matches!(e, ClientError::Rpc { code, .. } if *code == wanted);
    assert!(code(&start(plain("")).await, RpcCode::InvalidArgument));
    let mut spec = plain("true");
    spec.cwd = Some("/no/such".into());
    assert!(code(&start(spec).await, RpcCode::InvalidArgument));
    let mut spec = plain("true");
    spec.user = Some("no-such-user".into());
    assert!(code(&start(spec).await, RpcCode::Unauthenticated));
    let mut spec = plain("true");
    spec.args = vec!["x".repeat(200_000)];
    assert!(code(&start(spec).await, RpcCode::InvalidArgument));
}

#[tokio::test]
async fn a_megabyte_of_any_bytes_survives_the_round_trip() {
    let agent = TestAgent::new();
    let mut spec = sh("head -c 1048576");
    spec.stdin = true;
    let process = agent.client.start(&spec).await.unwrap();
    let sent: Vec<u8> = (0..1_048_576_u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let mut stdin = process.stdin_stream().await.unwrap();
    let bytes = sent.clone();
    let writing = tokio::spawn(async move {
        stdin.write(&bytes).await.unwrap();
        stdin.finish().await.unwrap();
    });
    let (status, stdout, _) = process.output(LIMIT).await.unwrap();
    writing.await.unwrap();
    assert_eq!(status.exit_code, 0);
    assert!(stdout == sent);
}

#[tokio::test]
async fn closed_stdin_ends_the_input_and_later_writes_fail() {
    let agent = TestAgent::new();
    let mut spec = sh("cat; sleep 0.3");
    spec.stdin = true;
    let process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    agent.client.send_stdin(pid, b"one\n").await.unwrap();
    agent.client.close_stdin(pid).await.unwrap();
    let refused = agent.client.send_stdin(pid, b"two\n").await;
    assert!(matches!(
        refused,
        Err(ClientError::Rpc {
            code: RpcCode::FailedPrecondition,
            ..
        })
    ));
    let (_, stdout, _) = process.output(LIMIT).await.unwrap();
    assert_eq!(stdout, b"one\n");
}

#[tokio::test]
async fn a_process_without_stdin_reads_end_of_file_immediately() {
    let agent = TestAgent::new();
    assert_eq!(agent.shell("cat; echo done").await.1, b"done\n");
}

#[tokio::test]
async fn a_terminal_echoes_resizes_and_hangs_up() {
    let agent = TestAgent::new();
    let mut spec = sh("stty size; echo ready; read line; echo got $line; stty size; cat");
    spec.pty = Some(PtySize {
        cols: 100,
        rows: 30,
    });
    let mut process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    let client = agent.client.clone();
    let mut seen = String::new();
    let mut step = 0;
    let end = loop {
        match process.next_event().await.unwrap().unwrap() {
            ProcessEvent::Pty(bytes) => seen.push_str(std::str::from_utf8(&bytes).unwrap()),
            ProcessEvent::End(end) => break end,
            other => panic!("{other:?}"),
        }
        if step == 0 && seen.contains("30 100\r\nready") {
            step = 1;
            let size = PtySize { cols: 90, rows: 20 };
            client.resize(pid, size).await.unwrap();
            client.send_pty(pid, b"hello\n").await.unwrap();
        }
        if step == 1 && seen.contains("got hello\r\n20 90\r\n") {
            step = 2;
            let refused = client.close_stdin(pid).await;
            assert!(matches!(
                refused,
                Err(ClientError::Rpc {
                    code: RpcCode::FailedPrecondition,
                    ..
                })
            ));
            client.send_pty(pid, b"\x04").await.unwrap();
        }
    };
    assert!(end.exited, "{seen}");
    let refused = client.close_stdin(pid).await;
    assert!(refused.unwrap_err().is_not_found());
}

#[tokio::test]
async fn a_signal_reaches_the_whole_group() {
    let agent = TestAgent::new();
    let mut process = agent
        .client
        .start(&sh("sleep 100 & echo $!; wait"))
        .await
        .unwrap();
    let child: u32 = loop {
        if let Some(ProcessEvent::Stdout(bytes)) = process.next_event().await.unwrap() {
            break std::str::from_utf8(&bytes).unwrap().trim().parse().unwrap();
        }
    };
    agent
        .client
        .signal(process.pid(), libc::SIGTERM)
        .await
        .unwrap();
    let pid = process.pid();
    let (status, ..) = process.output(LIMIT).await.unwrap();
    assert_eq!(status.status, "signal: terminated");
    // This is 128 + 15 (SIGTERM).
    assert_eq!(status.exit_code, 143);
    wait_for("the child's end", || !alive(child));
    assert!(
        agent
            .client
            .signal(pid, libc::SIGKILL)
            .await
            .unwrap_err()
            .is_not_found()
    );
}

#[tokio::test]
async fn the_timeout_kills_the_process_and_is_reported() {
    let agent = TestAgent::new();
    let mut spec = sh("sleep 100");
    spec.timeout = Some(Duration::from_millis(200));
    let began = Instant::now();
    let process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    let outcome = process.output(LIMIT).await;
    assert!(matches!(
        outcome,
        Err(ClientError::Rpc {
            code: RpcCode::DeadlineExceeded,
            ..
        })
    ));
    // The timeout is 200 ms. The limit leaves a margin.
    assert!(began.elapsed() < Duration::from_secs(5));
    wait_for("the process's end", || !alive(pid));
}

#[tokio::test]
async fn a_timed_out_process_can_clean_up_and_its_whole_group_is_killed() {
    let agent = TestAgent::new();
    // A child of the shell ignores SIGTERM and is in the process group of the shell.
    let mut spec = sh("trap 'echo cleaned; exit' TERM; \
         sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.1; done' & wait");
    spec.timeout = Some(Duration::from_millis(500));
    let mut process = agent.client.start(&spec).await.unwrap();
    let mut output = Vec::new();
    let end = loop {
        match process.next_event().await {
            Ok(Some(ProcessEvent::Stdout(bytes))) => output.extend_from_slice(&bytes),
            Ok(Some(_)) => {}
            Ok(None) => panic!("the process exited by itself: {output:?}"),
            Err(e) => break e,
        }
    };
    let is_over_time = matches!(
        &end,
        ClientError::Rpc {
            code: RpcCode::DeadlineExceeded,
            ..
        }
    );
    assert!(is_over_time, "{end}");
    let output = String::from_utf8(output).unwrap();
    let (child, rest) = output.split_once('\n').unwrap();
    assert_eq!(rest, "cleaned\n");
    let child = child.parse().unwrap();
    wait_for("the end of its child", || !alive(child));
}

#[tokio::test]
async fn a_process_that_ignores_its_time_limit_is_killed_before_the_report() {
    let agent = TestAgent::new();
    let mut spec = sh("trap '' TERM; while :; do sleep 0.1; done");
    spec.timeout = Some(Duration::from_millis(100));
    let process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    let error = process.output(LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("was killed"), "{error}");
    assert!(!alive(pid));
}

#[tokio::test]
async fn a_process_survives_its_client_and_several_clients_can_connect() {
    let agent = TestAgent::new();
    let mut spec = sh("read line; echo $line; exit 7");
    spec.stdin = true;
    spec.tag = Some("mine".into());
    let process = agent.client.start(&spec).await.unwrap();
    let pid = process.pid();
    drop(process);
    let listed = agent.client.list().await.unwrap();
    assert_eq!(
        (listed[0].pid, listed[0].tag.as_deref()),
        (pid, Some("mine"))
    );
    assert_eq!(listed[0].config.cmd, "/bin/sh");
    let first = agent.client.connect(pid).await.unwrap();
    let second = agent.client.connect(pid).await.unwrap();
    agent.client.send_stdin(pid, b"hello\n").await.unwrap();
    for follower in [first, second] {
        let (status, stdout, _) = follower.output(LIMIT).await.unwrap();
        assert_eq!((status.exit_code, &stdout[..]), (7, &b"hello\n"[..]));
    }
    let late = agent.client.connect(pid).await.unwrap();
    assert_eq!(late.output(LIMIT).await.unwrap().0.exit_code, 7);
    assert!(agent.client.list().await.unwrap().is_empty());
    assert!(agent.client.connect(1).await.err().unwrap().is_not_found());
}

#[tokio::test]
async fn a_background_child_neither_delays_the_end_event_nor_is_killed() {
    let agent = TestAgent::new();
    let marker = agent.path("alive");
    let began = Instant::now();
    let (status, stdout, _) = agent
        .shell(&format!(
            "(sleep 1; echo late; echo late; touch {marker}) & echo now"
        ))
        .await;
    assert_eq!((status.exit_code, &stdout[..]), (0, &b"now\n"[..]));
    // The background child ends after 1 s, so the end event did not wait for it.
    assert!(began.elapsed() < Duration::from_millis(900));
    // The client is informed that more output may have been written.
    assert!(status.output_open);
    let (status, ..) = agent.shell("sleep 1 > /dev/null 2>&1 & echo now").await;
    assert!(!status.output_open);
    wait_for("the background child", || std::fs::exists(&marker).unwrap());
}

#[tokio::test]
async fn a_slow_reader_stops_the_process_and_loses_nothing() {
    let agent = TestAgent::new();
    let progress = agent.path("progress");
    let line = format!(
        "i=0; while [ $i -lt 300 ]; do head -c 32768 /dev/zero; i=$((i+1)); echo $i > {progress}; done"
    );
    let mut process = agent.client.start(&sh(&line)).await.unwrap();
    // The process runs ahead of the client until the queues are full.
    let mut last = (String::new(), Instant::now());
    wait_for("a standstill", || {
        let now = std::fs::read_to_string(&progress).unwrap_or_default();
        if now != last.0 {
            last = (now, Instant::now());
        }
        // The process stands still if its progress has not changed for 300 ms.
        !last.0.is_empty() && last.1.elapsed() > Duration::from_millis(300)
    });
    let ahead: u32 = last.0.trim().parse().unwrap();
    // The queues hold less than half of the 300 chunks.
    assert!(
        ahead < 150,
        "{ahead} of 300 chunks were written with nobody reading"
    );
    let mut total = 0;
    while let Some(event) = process.next_event().await.unwrap() {
        if let ProcessEvent::Stdout(bytes) = event {
            total += bytes.len();
        }
    }
    assert_eq!(total, 300 * 32768);
}

#[tokio::test]
async fn two_hundred_processes_at_once_leave_no_zombie() {
    let agent = TestAgent::new();
    let mut running = Vec::new();
    for i in 0..200 {
        let client = agent.client.clone();
        running.push(tokio::spawn(async move {
            let spec = sh(&format!("echo {i}; (sleep 0.01 &)"));
            client
                .start(&spec)
                .await
                .unwrap()
                .output(LIMIT)
                .await
                .unwrap()
        }));
    }
    for (i, task) in running.into_iter().enumerate() {
        let (status, stdout, _) = task.await.unwrap();
        assert_eq!(
            (status.exit_code, stdout),
            (0, format!("{i}\n").into_bytes())
        );
    }
    let children = format!("/proc/{0}/task/{0}/children", agent.pid());
    wait_for("all children reaped", || {
        std::fs::read_to_string(&children).unwrap().is_empty()
    });
    let fds = std::fs::read_dir(format!("/proc/{}/fd", agent.pid()))
        .unwrap()
        .count();
    // A leak of the two output pipes of each process would leave 400 descriptors.
    assert!(fds < 250, "{fds} descriptors are open");
}

#[tokio::test]
async fn resource_limits_are_enforced() {
    let agent = TestAgent::new();
    let mut spec = sh("ulimit -n; ulimit -c");
    spec.limits = Some(ProcessLimits {
        nofile: Some(100),
        core: Some(0),
        ..ProcessLimits::default()
    });
    let process = agent.client.start(&spec).await.unwrap();
    assert_eq!(process.output(LIMIT).await.unwrap().1, b"100\n0\n");
    let (_, stdout, _) = agent.shell("ulimit -Sn").await;
    let files: u32 = std::str::from_utf8(&stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    // The agent raises the limit of the host, usually 1024, to 65,536 or to the hard limit.
    assert!((1025..=65_536).contains(&files), "{files}");
}

#[tokio::test]
async fn a_start_stream_begins_with_start_sends_keepalives_and_ends_with_an_end_frame() {
    let agent = TestAgent::new();
    let request = br#"{"process":{"cmd":"/bin/sleep","args":["1.5"],"envs":null},"stdin":false}"#;
    let frames = agent.stream(
        "/process.Process/Start",
        &["Keepalive-Ping-Interval: 1"],
        request,
    );
    assert!(
        frames[0].starts_with(r#"0{"event":{"start":{"pid":"#),
        "{frames:?}"
    );
    assert_eq!(frames[1], r#"0{"event":{"keepalive":{}}}"#);
    assert!(frames[2].starts_with(r#"0{"event":{"end":{"exitCode":0,"exited":true"#));
    assert_eq!(frames[3], "2{}");
    assert_eq!(frames.len(), 4);
}

#[tokio::test]
async fn spawning_inherits_nothing_but_three_descriptors() {
    let agent = TestAgent::new();
    // The standard streams, and the directory that `ls` reads.
    assert_eq!(agent.shell("ls /proc/self/fd | wc -l").await.1, b"4\n");
    let (_, stdout, _) = agent
        .shell("grep -E 'Sig(Blk|Ign)' /proc/self/status")
        .await;
    let text = String::from_utf8(stdout).unwrap();
    assert_eq!(
        text,
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
    );
}
