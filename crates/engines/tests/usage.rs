//! Resource usage of real guests, measured by the host without involving the guests, and by the
//! guests' kernels.
#![allow(clippy::unwrap_used, clippy::panic)]

use jiffy_agent_client::{AgentClient, ProcessSpec};
use jiffy_engine_api::{Engine, Engines, MICROVM, SandboxIdentity, SandboxSize};
use jiffy_engines::{Host, MicroVmEngine};
use jiffy_image::Home;
use jiffy_proto::agent::ENVD_PORT;
use jiffy_sandbox_manager::{CreateSpec, HostOptions, SandboxSettings, SandboxSource, Sandboxes};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Sampling interval in this test.
const EVERY: Duration = Duration::from_millis(200);

fn engine(dir: &Path) -> MicroVmEngine {
    let real = Home::locate().unwrap();
    for name in ["templates", "images", "kernel", "disks"] {
        // All of these directories exist because the data directory was opened.
        symlink(real.path().join(name), dir.join(name)).unwrap();
    }
    let host = Host::new(Home::at(dir).unwrap(), crate::support::programs());
    MicroVmEngine::new(host).unwrap()
}

/// Data directory of a test. Its sandboxes outlive the process that created them. Dropping the
/// value kills them, even if the test fails.
struct DataDir(tempfile::TempDir);

impl Drop for DataDir {
    fn drop(&mut self) {
        let sockets = std::fs::read_dir(self.0.path().join("run/vmm"));
        for socket in sockets.into_iter().flatten().flatten() {
            let name = socket.file_name().into_string().unwrap();
            // The name of a socket starts with the id of its VMM process, which may have exited.
            let pid = name.split('-').next().and_then(|pid| pid.parse().ok());
            let _ = kill(Pid::from_raw(pid.unwrap()), Signal::SIGKILL);
        }
    }
}

async fn open(dir: &Path) -> Sandboxes {
    let options = HostOptions {
        sample: EVERY,
        ..HostOptions::default()
    };
    let journal = dir.join("state.db");
    let engines = Engines::new(vec![Arc::new(engine(dir))], MICROVM).unwrap();
    Sandboxes::open(engines, &journal, options).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_is_measured_by_the_host_and_by_the_guest() {
    let test = "usage_is_measured_by_the_host_and_by_the_guest";
    if crate::support::base(test).is_none() {
        return;
    }
    let dir = DataDir(tempfile::tempdir().unwrap());
    let host = open(dir.0.path()).await;
    let spec = CreateSpec {
        source: SandboxSource::Template("base".into()),
        size: None,
        env: BTreeMap::new(),
        settings: SandboxSettings {
            secure: true,
            ..SandboxSettings::default()
        },
        name: None,
        engine: None,
        prefetch: Default::default(),
    };
    let created = host.create(spec).await.unwrap();
    let id = created.id().to_owned();
    let last = async || {
        *host
            .observe()
            .history(&id, None, None)
            .unwrap()
            .last()
            .unwrap()
    };
    let idle =
        crate::support::until("samples", last, |s| s.at_ms > created.changed_ms() + 1000).await;
    // The host measures the resident memory of an idle guest, which is far below its size.
    assert!((1 << 20..100 << 20).contains(&idle.mem_used), "{idle:?}");
    assert_eq!((idle.mem_total, idle.cpu_count), (512 << 20, 2));

    let measured = host.observe().measure(&id).await.unwrap();
    assert!(
        // The kernel of the guest uses a part of its 512 MiB.
        (256 << 20..=512 << 20).contains(&measured.mem_total),
        "{measured:?}"
    );
    assert!(
        measured.mem_used < measured.mem_total && measured.disk_total > 0,
        "{measured:?}"
    );

    // The program uses one of two processors, 40 MB of memory, and 20 MB of disk. The thresholds
    // below are lower, because they only have to differ from an idle guest.
    let work = "import os\nx = bytearray(b'x') * 40_000_000\nopen('/var/tmp/f', 'wb').write(x[:20_000_000])\nos.sync()\nwhile True: pass";
    let (sandboxes, name) = (host.clone(), id.clone());
    let agent = AgentClient::new(move || {
        let (sandboxes, name) = (sandboxes.clone(), name.clone());
        async move {
            let stream = sandboxes.connect(&name, ENVD_PORT).await;
            stream.map_err(std::io::Error::other)
        }
    });
    let agent = agent.with_token(created.agent_token().unwrap());
    let mut process = ProcessSpec::new("python3", ["-c", work]);
    process.user = Some("root".to_owned());
    let _running = agent.start(&process).await.unwrap();
    let busy = |s: &jiffy_sandbox_manager::UsageSample| {
        s.cpu_used_pct > 5.0 && s.mem_used > idle.mem_used + (30 << 20) && s.disk_used > 19_000_000
    };
    let seen = crate::support::until("the usage to grow", last, busy).await;
    assert!(seen.cpu_used_pct <= 100.0, "{seen:?}");
    let history = host.observe().history(&id, None, None).unwrap();
    assert!(history.is_sorted_by_key(|s| s.at_ms));
    let text = host.figures().render();
    assert!(
        text.contains("jiffy_sandboxes{state=\"running\"} 1.0"),
        "{text}"
    );
    host.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_samples_cost_less_than_100_ms() {
    let test = "a_thousand_samples_cost_less_than_100_ms";
    if crate::support::base(test).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    let unassigned = engine.boot("base", SandboxSize::default()).await.unwrap();
    let guest = unassigned
        .assign_identity(&SandboxIdentity::default())
        .await
        .unwrap();
    let clock = || {
        let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
        Duration::from(clock.now().unwrap())
    };
    let before = clock();
    for _ in 0..1000 {
        assert!(guest.usage().is_some());
    }
    let cost = clock() - before;
    println!("1,000 samples cost {cost:?} of processor time");
    assert!(cost < Duration::from_millis(100), "{cost:?}");
}
