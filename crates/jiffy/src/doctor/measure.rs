//! `jiffy doctor --measure`: what a restore costs here under each memory policy, and which one this host uses from now on.

use super::Finding;
use crate::cli::DoctorArgs;
use anyhow::{Context, ensure};
use jiffy_agent_client::ProcessSpec;
use jiffy_host::{
    Host, HostFile, HostFingerprint, PolicyCost, Prepared, RestorePolicy, SandboxSpec, Spread,
};
use jiffy_microvm::{MemoryPolicy, MicroVm, SnapshotSpec};
use jiffy_proto::snapshot::AfterSnapshot;
use jiffy_snapshot::{Durability, Store};
use std::fs;
use std::time::{Duration, Instant};

const WHAT: &str = "restores";
/// Rounds that are thrown away.
const WARM_UP: usize = 2;
/// Guests whose page faults are measured, for each policy; each of them touches thousands of pages.
const FAULT_ROUNDS: usize = 5;

/// A guest as it was booted.
const PLAIN: &str = "plain";
/// The same with pages of random bytes in memory that nothing touches but [`TOUCH`].
const PAGES: &str = "pages";
const WRITE_PAGES: &str = "head -c 32M /dev/urandom > /dev/shm/pages";
/// Prints microseconds for the first touch of a page of the snapshot and of a fresh one: the first pass over each less the second,
/// which meets no page fault and so is what the loop costs.
const TOUCH: &str = "
import mmap, os, time
PAGE, SIZE = 4096, 32 << 20
snapshot = os.open('/dev/shm/pages', os.O_RDONLY)
fresh = mmap.mmap(-1, SIZE)
fresh.madvise(mmap.MADV_NOHUGEPAGE)
def read(value):
    for at in range(0, SIZE, PAGE): os.pread(snapshot, PAGE, at)
def write(value):
    for at in range(0, SIZE, PAGE): fresh[at] = value
def timed(work, value):
    began = time.perf_counter_ns()
    work(value)
    return time.perf_counter_ns() - began
def first_touch(work):
    first = timed(work, 1)
    return (first - timed(work, 2)) / 1000 / (SIZE // PAGE)
print(first_touch(read), first_touch(write))
";

/// Measures, prints the table, keeps the choice.
pub fn run(args: &DoctorArgs) -> Finding {
    let measured = crate::runtime().and_then(|rt| rt.block_on(measure(args.rounds)));
    let kept = measured.and_then(|(home, file)| {
        if !args.json {
            print!("{}", table(&file, args.rounds));
        }
        file.keep(&home)?;
        Ok(file)
    });
    match kept {
        Ok(file) => Finding::ok(
            WHAT,
            format!(
                "memory of restored sandboxes: {}, as measured now; kept in host.json; a daemon that runs takes it at its next start",
                file.policy
            ),
        ),
        Err(e) => Finding::fail(
            WHAT,
            format!("cannot be measured: {e:#}"),
            "the lines above may tell why; what was in force before stays in force",
        ),
    }
}

#[derive(Default)]
struct Samples {
    create: Vec<f64>,
    exec: Vec<f64>,
    own: Vec<f64>,
    snapshot_page: Vec<f64>,
    fresh_page: Vec<f64>,
}

async fn measure(rounds: usize) -> anyhow::Result<(std::path::PathBuf, HostFile)> {
    ensure!(rounds > 0, "--rounds 0: at least one is needed");
    let host = Host::open()?;
    let mut bar = crate::progress::Bar::new("base");
    let prepared = host.prepare("base", &mut |p| bar.update(p))?;
    drop(bar);
    // On the file system that snapshots are on.
    let dir = tempfile::tempdir_in(host.home().path().join("run"))
        .context("cannot make a directory for the measurement")?;
    let bench = Bench {
        prepared,
        store: Store::open(dir.path())?,
    };
    bench.save(PLAIN, "true").await?;
    bench.save(PAGES, WRITE_PAGES).await?;
    let mut all: Vec<(RestorePolicy, Samples)> = RestorePolicy::ALL
        .into_iter()
        .map(|policy| (policy, Samples::default()))
        .collect();
    // In turn, so that whatever else this host does meets all of them.
    for round in 0..WARM_UP + rounds {
        for (policy, samples) in &mut all {
            let [create, exec, own] = bench.restore(*policy).await?;
            if round >= WARM_UP {
                samples.create.push(create);
                samples.exec.push(exec);
                samples.own.push(own);
            }
        }
    }
    for _ in 0..FAULT_ROUNDS {
        for (policy, samples) in &mut all {
            let [snapshot, fresh] = bench.touch(*policy).await?;
            samples.snapshot_page.push(snapshot);
            samples.fresh_page.push(fresh);
        }
    }
    let spread = |samples: &[f64]| Spread::of(samples).context("nothing was measured");
    let costs = all.iter().map(|(policy, samples)| {
        Ok(PolicyCost {
            policy: *policy,
            create_ms: spread(&samples.create)?,
            create_exec_ms: spread(&samples.exec)?,
            own_mib: spread(&samples.own)?,
            snapshot_page_us: spread(&samples.snapshot_page)?,
            fresh_page_us: spread(&samples.fresh_page)?,
        })
    });
    let costs = costs.collect::<anyhow::Result<Vec<_>>>()?;
    let file = HostFile::new(HostFingerprint::here(), costs).context("nothing was measured")?;
    Ok((host.home().path().to_owned(), file))
}

struct Bench {
    prepared: Prepared,
    store: Store,
}

impl Bench {
    /// Boots a guest, runs `script` in it, and makes it snapshot `id`, with the working set of its first `true`.
    async fn save(&self, id: &str, script: &str) -> anyhow::Result<()> {
        let vm = self.prepared.boot(&SandboxSpec::default()).await?;
        output(&vm, "/bin/sh", &["-c", script]).await?;
        let spec = SnapshotSpec {
            id: id.to_owned(),
            template: "base".to_owned(),
            then: AfterSnapshot::Stop,
            durability: Durability::PageCache,
        };
        let (snapshot, _) = vm.snapshot(&self.store, &spec).await?;
        vm.ended().await;
        let vm = self.bring_up(id, RestorePolicy::Map).await?;
        output(&vm, "true", &[]).await?;
        let (set, _) = vm.working_set(&self.store).await?;
        snapshot.put_working_set(&set)?;
        vm.stop().await;
        Ok(())
    }

    async fn bring_up(&self, id: &str, policy: RestorePolicy) -> anyhow::Result<MicroVm> {
        let memory = match policy {
            RestorePolicy::Map => MemoryPolicy::Map,
            RestorePolicy::CopyAll => MemoryPolicy::CopyAll,
            RestorePolicy::CopyWorkingSet => {
                let set = self.store.get(id)?.working_set()?;
                MemoryPolicy::CopyWorkingSet(set.context("no working set was recorded")?.1)
            }
        };
        let spec = SandboxSpec::default();
        Ok(self
            .prepared
            .restore(&spec, &self.store, id, memory)
            .await?)
    }

    /// Milliseconds to the agent's word and to the end of `true`, and MiB that are the sandbox's alone.
    async fn restore(&self, policy: RestorePolicy) -> anyhow::Result<[f64; 3]> {
        let ms = |d: Duration| d.as_secs_f64() * 1000.0;
        let began = Instant::now();
        let vm = self.bring_up(PLAIN, policy).await?;
        let created = ms(began.elapsed());
        output(&vm, "true", &[]).await?;
        let used = ms(began.elapsed());
        let own = anonymous_mib(vm.vmm_pid())?;
        vm.stop().await;
        Ok([created, used, own])
    }

    async fn touch(&self, policy: RestorePolicy) -> anyhow::Result<[f64; 2]> {
        let vm = self.bring_up(PAGES, policy).await?;
        let text = output(&vm, "python3", &["-c", TOUCH]).await?;
        vm.stop().await;
        let mut figures = text.split_whitespace().map(str::parse);
        match (figures.next(), figures.next()) {
            (Some(Ok(snapshot)), Some(Ok(fresh))) => Ok([snapshot, fresh]),
            _ => anyhow::bail!("the guest answered {text:?} instead of two figures"),
        }
    }
}

async fn output(vm: &MicroVm, command: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let spec = ProcessSpec::new(command, arguments.iter().copied());
    let process = jiffy_host::agent(vm).start(&spec).await?;
    let (status, stdout, stderr) = process.output(1 << 16).await?;
    ensure!(
        status.exit_code == 0,
        "`{command}` exited with {} in the guest: {}",
        status.exit_code,
        String::from_utf8_lossy(&stderr)
    );
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Memory of a process that no file lies behind.
fn anonymous_mib(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|l| l.strip_prefix("Anonymous:"));
    let kib = line.map(|l| l.trim().trim_end_matches(" kB").parse::<f64>());
    Ok(kib.context("no Anonymous in smaps_rollup")?? / 1024.0)
}

fn table(file: &HostFile, rounds: usize) -> String {
    let mut text = format!(
        "      restores of template base, 2 vCPUs, 512 MiB, {rounds} rounds each after {WARM_UP} (page figures: {FAULT_ROUNDS} guests each); \
         min / median / p99\n      {:<12} {:>22} {:>22} {:>22} {:>22} {:>22}\n",
        "memory",
        "create, ms",
        "create + exec, ms",
        "own memory, MiB",
        "snapshot's page, us",
        "fresh page, us"
    );
    for cost in &file.costs {
        let show = |s: Spread| format!("{:.1} / {:.1} / {:.1}", s.min, s.median, s.p99);
        let fine = |s: Spread| format!("{:.2} / {:.2} / {:.2}", s.min, s.median, s.p99);
        let chosen = if cost.policy == file.policy { '*' } else { ' ' };
        text += &format!(
            "    {chosen} {:<12} {:>22} {:>22} {:>22} {:>22} {:>22}\n",
            cost.policy,
            show(cost.create_ms),
            show(cost.create_exec_ms),
            show(cost.own_mib),
            fine(cost.snapshot_page_us),
            fine(cost.fresh_page_us),
        );
    }
    text
}
