//! `jiffy doctor --measure`: what a restore costs here with microVMs under each memory policy, and
//! with gVisor, and what this host uses from now on.

use super::Finding;
use crate::cli::DoctorArgs;
use crate::cli::FeatureSwitch;
use crate::run::agent;
use crate::run::ephemeral::EphemeralGuests;
use anyhow::{Context, ensure};
use jiffy_agent_client::{AgentClient, ProcessSpec};
use jiffy_engine_api::{EngineName, SandboxSize};
use jiffy_engines::{
    EngineCost, EngineFacts, Host, HostFile, HostFingerprint, Percentiles, PolicyCost,
    PreparedTemplate, RestorePolicy, SandboxSpec,
};
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, SnapshotSpec};
use jiffy_proto::snapshot::AfterSnapshot;
use jiffy_snapshot::{Durability, Store};
use std::fs;
use std::time::{Duration, Instant};

const CHECK_NAME: &str = "restores";
/// Rounds that are thrown away.
const WARM_UP_ROUNDS: usize = 2;
/// Guests whose page faults are measured, for each policy; each of them touches thousands of pages.
const FAULT_ROUNDS: usize = 5;

/// A guest as it was booted.
const PLAIN_SNAPSHOT_ID: &str = "plain";
/// The same with pages of random bytes in memory that nothing touches but [`TOUCH_SCRIPT`].
const PAGES_SNAPSHOT_ID: &str = "pages";
const WRITE_PAGES_SCRIPT: &str = "head -c 32M /dev/urandom > /dev/shm/pages";
/// Prints microseconds for the first touch of a page of the snapshot and of a fresh one: the first
/// pass over each less the second, which meets no page fault and so is what the loop costs.
const TOUCH_SCRIPT: &str = "
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

/// Measures, prints the tables, keeps the choice.
pub fn run(args: &DoctorArgs, tell: &mut dyn FnMut(Finding)) {
    match measure_and_keep(args) {
        Ok(findings) => findings.into_iter().for_each(tell),
        Err(e) => tell(Finding::fail(
            CHECK_NAME,
            format!("cannot be measured: {e:#}"),
            "the lines above may tell why; what was in force before stays in force",
        )),
    }
}

fn measure_and_keep(args: &DoctorArgs) -> anyhow::Result<Vec<Finding>> {
    ensure!(args.rounds > 0, "--rounds 0: at least one is needed");
    let host = Host::open()?;
    let measured = crate::runtime()?.block_on(measure(&host, args.rounds))?;
    let kept = HostFile::new(HostFingerprint::here(), measured.policies, measured.gvisor);
    if !args.json {
        let policies = kept.as_ref().map(|file| policies(file, args.rounds));
        out!("{}", policies.unwrap_or_default());
        let microvm = kept.as_ref().and_then(HostFile::microvm);
        let microvm = microvm.map(|cost| EngineCost {
            create_ms: cost.create_ms,
            create_exec_ms: cost.create_exec_ms,
        });
        let chosen = EngineFacts {
            measured_ms: kept.as_ref().and_then(HostFile::engines_ms),
            ..EngineFacts::of(&host)
        };
        let costs = [
            (EngineName::MicroVm, microvm),
            (EngineName::Gvisor, measured.gvisor),
        ];
        out!("{}", engines(costs, chosen.choose().engine, args.rounds));
    }
    let mut findings = Vec::new();
    if let Some(file) = kept {
        file.keep(host.home().path())?;
        findings.push(Finding::ok(
            CHECK_NAME,
            format!(
                "memory of restored sandboxes: {}, as measured now; kept in host.json; a daemon \
                 that runs takes it at its next start",
                file.policy
            ),
        ));
    }
    let choice = EngineFacts::of(&host).choose();
    findings.push(Finding::ok(
        "engine",
        format!(
            "new sandboxes come up on {} from now on, with a daemon from its next start: {}",
            choice.engine, choice.why
        ),
    ));
    Ok(findings)
}

#[derive(Default)]
struct Samples {
    create: Vec<f64>,
    exec: Vec<f64>,
    own: Vec<f64>,
    snapshot_page: Vec<f64>,
    fresh_page: Vec<f64>,
}

/// Measured costs; engines that cannot be used have none.
struct Measured {
    policies: Vec<PolicyCost>,
    gvisor: Option<EngineCost>,
}

async fn measure(host: &Host, rounds: usize) -> anyhow::Result<Measured> {
    let facts = EngineFacts::of(host);
    let prepare = || {
        let mut bar = jiffy_daemon::TemplateProgress::new("base");
        host.prepare("base", &mut |p| bar.update(p))
    };
    // On the file system that snapshots are on.
    let dir = tempfile::tempdir_in(host.home().run())
        .context("cannot make a directory for the measurement")?;
    let microvms = match facts.check(EngineName::MicroVm) {
        Ok(()) => Some(MicroVmSnapshots::open(prepare()?, Store::open(dir.path())?).await?),
        Err(_) => None,
    };
    let gvisor = match facts.check(EngineName::Gvisor) {
        Ok(()) => {
            let (engine, prepared) = (EngineName::Gvisor, prepare()?);
            let opened = EphemeralGuests::open(host, engine, "base", prepared, FeatureSwitch::Off);
            Some(opened.await?)
        }
        Err(_) => None,
    };
    let measured = measure_alternately(microvms.as_ref(), gvisor.as_ref(), rounds).await;
    if let Some(gvisor) = gvisor {
        gvisor.close().await;
    }
    measured
}

async fn measure_alternately(
    microvms: Option<&MicroVmSnapshots>,
    gvisor: Option<&EphemeralGuests>,
    rounds: usize,
) -> anyhow::Result<Measured> {
    let policies = microvms.map(|_| RestorePolicy::ALL).into_iter().flatten();
    let mut all: Vec<(RestorePolicy, Samples)> = policies
        .map(|policy| (policy, Samples::default()))
        .collect();
    let mut on_gvisor = Samples::default();
    if let Some(apart) = gvisor {
        let guest = apart.boot(SandboxSize::default()).await?;
        output(&agent(&guest), "true", &[]).await?;
        apart.save(&*guest, PLAIN_SNAPSHOT_ID).await?;
    }
    // In turn, so that whatever else this host does meets all of them.
    for round in 0..WARM_UP_ROUNDS + rounds {
        for (policy, samples) in &mut all {
            let Some(microvms) = microvms else { continue };
            let [create, exec, own] = microvms.restore(*policy).await?;
            if round >= WARM_UP_ROUNDS {
                samples.create.push(create);
                samples.exec.push(exec);
                samples.own.push(own);
            }
        }
        if let Some(apart) = gvisor {
            let coming = async { Ok(apart.restore(PLAIN_SNAPSHOT_ID).await?) };
            let (times, guest) = time_to_first_exec(coming, agent).await?;
            guest.stop().await;
            if round >= WARM_UP_ROUNDS {
                on_gvisor.create.push(times[0]);
                on_gvisor.exec.push(times[1]);
            }
        }
    }
    for _ in 0..FAULT_ROUNDS {
        for (policy, samples) in &mut all {
            let Some(microvms) = microvms else { continue };
            let [snapshot, fresh] = microvms.touch(*policy).await?;
            samples.snapshot_page.push(snapshot);
            samples.fresh_page.push(fresh);
        }
    }
    let spread = |samples: &[f64]| Percentiles::of(samples).context("nothing was measured");
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
    Ok(Measured {
        policies: costs.collect::<anyhow::Result<_>>()?,
        gvisor: Percentiles::of(&on_gvisor.create)
            .zip(Percentiles::of(&on_gvisor.exec))
            .map(|(create_ms, create_exec_ms)| EngineCost {
                create_ms,
                create_exec_ms,
            }),
    })
}

/// Milliseconds to the agent's word and to the end of `true`, and the guest.
async fn time_to_first_exec<G>(
    coming: impl Future<Output = anyhow::Result<G>>,
    agent: impl FnOnce(&G) -> AgentClient,
) -> anyhow::Result<([f64; 2], G)> {
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    let began = Instant::now();
    let guest = coming.await?;
    let created = ms(began.elapsed());
    output(&agent(&guest), "true", &[]).await?;
    Ok(([created, ms(began.elapsed())], guest))
}

struct MicroVmSnapshots {
    prepared: PreparedTemplate,
    store: Store,
}

impl MicroVmSnapshots {
    async fn open(prepared: PreparedTemplate, store: Store) -> anyhow::Result<Self> {
        let microvms = Self { prepared, store };
        microvms.save(PLAIN_SNAPSHOT_ID, "true").await?;
        microvms.save(PAGES_SNAPSHOT_ID, WRITE_PAGES_SCRIPT).await?;
        Ok(microvms)
    }

    /// Boots a guest, runs `script` in it, and makes it snapshot `id`, with the working set of its
    /// first `true`.
    async fn save(&self, id: &str, script: &str) -> anyhow::Result<()> {
        let vm = self.prepared.boot(&SandboxSpec::default()).await?;
        output(&jiffy_engines::agent(&vm), "/bin/sh", &["-c", script]).await?;
        let spec = SnapshotSpec {
            id: id.to_owned(),
            template: "base".to_owned(),
            then: AfterSnapshot::Stop,
            durability: Durability::PageCache,
            max_bytes: None,
            working_set: false,
        };
        let (snapshot, _) = vm.snapshot(&self.store, &spec).await?;
        vm.ended().await;
        let vm = self.bring_up(id, RestorePolicy::Map).await?;
        output(&jiffy_engines::agent(&vm), "true", &[]).await?;
        let set = vm.working_set(&self.store).await?;
        snapshot.put_working_set(&set.touched)?;
        snapshot.put_written_pages(&set.written)?;
        vm.stop_shared().await;
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

    /// Milliseconds to the agent's word and to the end of `true`, and MiB that are the sandbox's
    /// alone.
    async fn restore(&self, policy: RestorePolicy) -> anyhow::Result<[f64; 3]> {
        let ([created, used], vm) = time_to_first_exec(
            self.bring_up(PLAIN_SNAPSHOT_ID, policy),
            jiffy_engines::agent,
        )
        .await?;
        let own = anonymous_mib(vm.vmm_pid())?;
        vm.stop_shared().await;
        Ok([created, used, own])
    }

    async fn touch(&self, policy: RestorePolicy) -> anyhow::Result<[f64; 2]> {
        let vm = self.bring_up(PAGES_SNAPSHOT_ID, policy).await?;
        let text = output(&jiffy_engines::agent(&vm), "python3", &["-c", TOUCH_SCRIPT]).await?;
        vm.stop_shared().await;
        let mut figures = text.split_whitespace().map(str::parse);
        match (figures.next(), figures.next()) {
            (Some(Ok(snapshot)), Some(Ok(fresh))) => Ok([snapshot, fresh]),
            _ => anyhow::bail!("the guest answered {text:?} instead of two figures"),
        }
    }
}

async fn output(agent: &AgentClient, command: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let spec = ProcessSpec::new(command, arguments.iter().copied());
    let process = agent.start(&spec).await?;
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

fn policies(file: &HostFile, rounds: usize) -> String {
    let mut text = format!(
        "      restores of microVMs of template base, 2 vCPUs, 512 MiB, {rounds} rounds each after \
         {WARM_UP_ROUNDS} (page figures: {FAULT_ROUNDS} guests each); min / median / p99\n      \
         {:<12} {:>22} {:>22} {:>22} {:>22} {:>22}\n",
        "memory",
        "create, ms",
        "create + exec, ms",
        "own memory, MiB",
        "snapshot's page, us",
        "fresh page, us"
    );
    for cost in &file.costs {
        let show = |s: Percentiles| format!("{:.1} / {:.1} / {:.1}", s.min, s.median, s.p99);
        let fine = |s: Percentiles| format!("{:.2} / {:.2} / {:.2}", s.min, s.median, s.p99);
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

fn engines(
    costs: [(EngineName, Option<EngineCost>); 2],
    chosen: EngineName,
    rounds: usize,
) -> String {
    let mut text = format!(
        "      the engines in the same {rounds} rounds\n      {:<12} {:>22} {:>22}\n",
        "engine", "create, ms", "create + exec, ms"
    );
    for (engine, cost) in costs {
        let show = |s: Percentiles| format!("{:.1} / {:.1} / {:.1}", s.min, s.median, s.p99);
        let mark = if engine == chosen { '*' } else { ' ' };
        let name = engine.to_string();
        text += &match cost {
            Some(cost) => format!(
                "    {mark} {name:<12} {:>22} {:>22}\n",
                show(cost.create_ms),
                show(cost.create_exec_ms)
            ),
            None => format!("    {mark} {name:<12} cannot be used here\n"),
        };
    }
    text
}
