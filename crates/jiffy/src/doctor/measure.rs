//! `jiffy doctor --measure`: measures restores of microVMs with each memory policy and restores of
//! gVisor, and configures the host accordingly.
//!
//! The *working set* of a snapshot consists of the pages that a restored guest touches first. A
//! *memory policy* determines when the memory of a snapshot is read: all before the guest starts,
//! only the working set, or each page on its first access.

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
/// Number of rounds whose samples are discarded.
const WARM_UP_ROUNDS: usize = 2;
/// Maximum size of the output of a command in the guest, in bytes.
const MAX_OUTPUT_BYTES: usize = 1 << 16;

/// Number of guests per policy whose page faults are measured. Each guest touches thousands of
/// pages.
const FAULT_ROUNDS: usize = 5;

/// Snapshot of a booted guest.
const PLAIN_SNAPSHOT_ID: &str = "plain";
/// Snapshot of a booted guest with random pages in memory that only [`TOUCH_SCRIPT`] accesses.
const PAGES_SNAPSHOT_ID: &str = "pages";
/// Writes random pages to a file in memory.
const WRITE_PAGES_SCRIPT: &str = "head -c 32M /dev/urandom > /dev/shm/pages";
/// Prints the time of the first access to a page of the snapshot and to a new page, in
/// microseconds. The time of a second pass without page faults, which is the cost of the loop, is
/// subtracted.
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
    start = time.perf_counter_ns()
    work(value)
    return time.perf_counter_ns() - start
def first_touch(work):
    first = timed(work, 1)
    return (first - timed(work, 2)) / 1000 / (SIZE // PAGE)
print(first_touch(read), first_touch(write))
";

/// Measures, prints the tables, and stores the selected policy.
pub fn run(args: &DoctorArgs, report: &mut dyn FnMut(Finding)) {
    match measure_and_store(args) {
        Ok(findings) => findings.into_iter().for_each(report),
        Err(e) => report(Finding::fail(
            CHECK_NAME,
            format!("measurement failed: {e:#}"),
            "see the findings above; the previous settings remain in effect",
        )),
    }
}

/// Measures the memory policies and engines on this host, prints the results, and stores the
/// selected policy.
fn measure_and_store(args: &DoctorArgs) -> anyhow::Result<Vec<Finding>> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let host = Host::open()?;
    let measured = crate::runtime()?.block_on(measure(&host, args.rounds))?;
    let host_file = HostFile::new(HostFingerprint::here(), measured.policies, measured.gvisor);
    if !args.json {
        let policies = host_file.as_ref().map(|file| policies(file, args.rounds));
        out!("{}", policies.unwrap_or_default());
        let microvm = host_file.as_ref().and_then(HostFile::microvm);
        let microvm = microvm.map(|cost| EngineCost {
            create_ms: cost.create_ms,
            create_exec_ms: cost.create_exec_ms,
        });
        let facts = EngineFacts {
            measured_ms: host_file.as_ref().and_then(HostFile::engines_ms),
            ..EngineFacts::of(&host)
        };
        let costs = [
            (EngineName::MicroVm, microvm),
            (EngineName::Gvisor, measured.gvisor),
        ];
        out!("{}", engines(costs, facts.choose().engine, args.rounds));
    }
    let mut findings = Vec::new();
    if let Some(file) = host_file {
        file.write(host.home().path())?;
        findings.push(Finding::ok(
            CHECK_NAME,
            format!(
                "memory of restored sandboxes: {} (measured, stored in host.json); a running \
                 daemon uses it after its next start",
                file.policy
            ),
        ));
    }
    // The facts are read again, because they include the measurement stored above.
    let choice = EngineFacts::of(&host).choose();
    findings.push(Finding::ok(
        "engine",
        format!(
            "new sandboxes use {}, with a running daemon after its next start: {}",
            choice.engine, choice.why
        ),
    ));
    Ok(findings)
}

/// Samples of one memory policy or engine. Times are in milliseconds, page times in microseconds,
/// and `own` is the anonymous memory of the VMM in MiB.
#[derive(Default)]
struct Samples {
    create: Vec<f64>,
    exec: Vec<f64>,
    own: Vec<f64>,
    snapshot_page: Vec<f64>,
    fresh_page: Vec<f64>,
}

/// Measured costs. Empty for unusable engines.
struct Measured {
    policies: Vec<PolicyCost>,
    gvisor: Option<EngineCost>,
}

/// Measures all usable engines. The snapshots are in a temporary directory.
async fn measure(host: &Host, rounds: usize) -> anyhow::Result<Measured> {
    let facts = EngineFacts::of(host);
    let prepare = || {
        let mut bar = jiffy_daemon::TemplateProgress::new("base");
        host.prepare("base", &mut |p| bar.update(p))
    };
    // Use the file system of the snapshots, because its speed affects the results.
    let dir = tempfile::tempdir_in(host.home().run())
        .context("cannot create a directory for the measurement")?;
    let microvms = match facts.check(EngineName::MicroVm) {
        Ok(()) => Some(MicroVmSnapshots::open(prepare()?, Store::open(dir.path())?).await?),
        Err(_) => None,
    };
    let gvisor = match facts.check(EngineName::Gvisor) {
        Ok(()) => {
            let (engine, prepared) = (EngineName::Gvisor, prepare()?);
            let guests = EphemeralGuests::open(host, engine, "base", prepared, FeatureSwitch::Off);
            Some(guests.await?)
        }
        Err(_) => None,
    };
    let measured = measure_alternately(microvms.as_ref(), gvisor.as_ref(), rounds).await;
    if let Some(gvisor) = gvisor {
        gvisor.close().await;
    }
    measured
}

/// Measures the memory policies and gVisor in turn, for `rounds` rounds after the warm-up.
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
    if let Some(guests) = gvisor {
        let guest = guests.boot(SandboxSize::default()).await?;
        output(&agent(&guest), "true", &[]).await?;
        guests.save(&*guest, PLAIN_SNAPSHOT_ID).await?;
    }
    // The policies alternate, so that other load of the host affects all of them equally.
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
        if let Some(guests) = gvisor {
            let restore = async { Ok(guests.restore(PLAIN_SNAPSHOT_ID).await?) };
            let (times, guest) = time_to_first_exec(restore, agent).await?;
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
    let spread = |samples: &[f64]| Percentiles::of(samples).context("no samples were measured");
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
        // `None` without samples, if gVisor is not usable.
        gvisor: Percentiles::of(&on_gvisor.create)
            .zip(Percentiles::of(&on_gvisor.exec))
            .map(|(create_ms, create_exec_ms)| EngineCost {
                create_ms,
                create_exec_ms,
            }),
    })
}

/// Returns the milliseconds to the agent's greeting (its first message) and to the exit of `true`,
/// and the guest.
async fn time_to_first_exec<G>(
    restore: impl Future<Output = anyhow::Result<G>>,
    agent: impl FnOnce(&G) -> AgentClient,
) -> anyhow::Result<([f64; 2], G)> {
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    let start = Instant::now();
    let guest = restore.await?;
    let created = ms(start.elapsed());
    output(&agent(&guest), "true", &[]).await?;
    Ok(([created, ms(start.elapsed())], guest))
}

/// Snapshots of microVMs that are measured.
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

    /// Boots a guest, runs `script` in it, and takes snapshot `id` with the working set of a
    /// restored guest that runs `true`.
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
            disk_only: false,
        };
        let (snapshot, _) = vm.snapshot(&self.store, &spec).await?;
        vm.ended().await;
        // The working set is recorded in a restored guest, as after the first restore by a daemon.
        let vm = self.restore_vm(id, RestorePolicy::Map).await?;
        output(&jiffy_engines::agent(&vm), "true", &[]).await?;
        let set = vm.working_set(&self.store).await?;
        snapshot.put_working_set(&set.touched)?;
        snapshot.put_written_pages(&set.written)?;
        vm.stop_shared().await;
        Ok(())
    }

    /// Restores a snapshot with a memory policy.
    async fn restore_vm(&self, id: &str, policy: RestorePolicy) -> anyhow::Result<MicroVm> {
        let memory = match policy {
            RestorePolicy::Map => MemoryPolicy::Map,
            RestorePolicy::CopyAll => MemoryPolicy::CopyAll,
            RestorePolicy::CopyWorkingSet => {
                let set = self.store.get(id)?.working_set()?;
                // The file with the recorded chunks. Its index is not needed here.
                MemoryPolicy::CopyWorkingSet(set.context("no working set was recorded")?.1)
            }
        };
        let spec = SandboxSpec::default();
        Ok(self
            .prepared
            .restore(&spec, &self.store, id, memory)
            .await?)
    }

    /// Returns the milliseconds to the agent's greeting and to the exit of `true`, and the
    /// anonymous memory of the VMM in MiB.
    async fn restore(&self, policy: RestorePolicy) -> anyhow::Result<[f64; 3]> {
        let ([created, used], vm) = time_to_first_exec(
            self.restore_vm(PLAIN_SNAPSHOT_ID, policy),
            jiffy_engines::agent,
        )
        .await?;
        let own = anonymous_mib(vm.vmm_pid())?;
        vm.stop_shared().await;
        Ok([created, used, own])
    }

    /// Returns the microseconds of the first access to a page of the snapshot and to a new page.
    async fn touch(&self, policy: RestorePolicy) -> anyhow::Result<[f64; 2]> {
        let vm = self.restore_vm(PAGES_SNAPSHOT_ID, policy).await?;
        let text = output(&jiffy_engines::agent(&vm), "python3", &["-c", TOUCH_SCRIPT]).await?;
        vm.stop_shared().await;
        let mut figures = text.split_whitespace().map(str::parse);
        match (figures.next(), figures.next()) {
            (Some(Ok(snapshot)), Some(Ok(fresh))) => Ok([snapshot, fresh]),
            _ => anyhow::bail!("the guest printed {text:?} instead of two numbers"),
        }
    }
}

/// Runs a command in the guest, and returns its output. Fails if the command fails.
async fn output(agent: &AgentClient, command: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let spec = ProcessSpec::new(command, arguments.iter().copied());
    let process = agent.start(&spec).await?;
    let (status, stdout, stderr) = process.output(MAX_OUTPUT_BYTES).await?;
    ensure!(
        status.exit_code == 0,
        "`{command}` exited with {} in the guest: {}",
        status.exit_code,
        String::from_utf8_lossy(&stderr)
    );
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Returns the anonymous memory of a process in MiB.
fn anonymous_mib(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|l| l.strip_prefix("Anonymous:"));
    let kib = line.map(|l| l.trim().trim_end_matches(" kB").parse::<f64>());
    Ok(kib.context("no Anonymous in smaps_rollup")?? / 1024.0)
}

/// Returns the table of memory policies. A star marks the selected policy.
fn policies(file: &HostFile, rounds: usize) -> String {
    let mut text = format!(
        "      restores of microVMs of template base, 2 vCPUs, 512 MiB, {rounds} rounds after {WARM_UP_ROUNDS} \
         warm-up rounds (page times: {FAULT_ROUNDS} guests); min / median / p99\n      \
         {:<12} {:>22} {:>22} {:>22} {:>22} {:>22}\n",
        "policy",
        "create, ms",
        "create + exec, ms",
        "own memory, MiB",
        "snapshot page, us",
        "new page, us"
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

/// Returns the table of engines. A star marks the default engine of new sandboxes.
fn engines(
    costs: [(EngineName, Option<EngineCost>); 2],
    chosen: EngineName,
    rounds: usize,
) -> String {
    let mut text = format!(
        "      engines in the same {rounds} rounds\n      {:<12} {:>22} {:>22}\n",
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
            None => format!("    {mark} {name:<12} not usable on this host\n"),
        };
    }
    text
}
