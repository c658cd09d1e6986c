//! Instruments `boot` and `memory`, on guests that this process starts itself, without a daemon.

use crate::goals;
use crate::memory as vmm_memory;
use anyhow::Context;
use jiffy_benchmark::counters::{Counters, Meter};
use jiffy_benchmark::{Measured, Series, prepare_guests};
use jiffy_engine_api::BootReport;
use jiffy_engines::SandboxSpec;

/// Measures cold boots by phase.
pub async fn boot(n: usize, warm_up: usize) -> anyhow::Result<Measured> {
    let prepared = prepare_guests().await?;
    let meter = Meter::new();
    let mut reports: Vec<BootReport> = Vec::new();
    // Sequential boots: concurrent guests would compete for the processors.
    for round in 0..warm_up + n {
        let vm = prepared.boot(&SandboxSpec::default()).await?;
        if round >= warm_up {
            meter.add("boot", Counters::of_vm(&vm).await?);
            reports.push(vm.report());
        }
        vm.stop().await;
    }
    let phase = |name: &str, goal, of: fn(&BootReport) -> u64| {
        // Reports are in microseconds.
        let samples = reports.iter().map(|r| of(r) as f64 / 1000.0).collect();
        Series::new(name, "ms", goal, samples)
    };
    let series = vec![
        phase("total", Some(goals::BOOT), |r| r.total_us),
        phase("vmm: spawn to first instruction", None, |r| r.vmm_us),
        phase("kernel: to the agent's first", None, |r| r.kernel_us),
        phase("init: mounts, services", None, |r| r.init_us),
        phase("agent: identity taken", None, |r| r.agent_us),
    ];
    Ok(Measured {
        method: "sequential boots of guests, template base, 2 vCPUs, 512 MiB: from the request for \
            the sandbox to the agent's ready message",
        limits: "cold page cache; guests under load; concurrent boots",
        ..Measured::new("boot", series, &meter)
    })
}

/// Measures the memory of a new guest and of its VMM.
pub async fn memory(n: usize) -> anyhow::Result<Measured> {
    let prepared = prepare_guests().await?;
    let meter = Meter::new();
    let spec = SandboxSpec::default();
    let (mut own, mut behind, mut used) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..n {
        let vm = prepared.boot(&spec).await?;
        meter.add("boot", Counters::of_vm(&vm).await?);
        let client = jiffy_engines::agent(&vm);
        // The memory is read before the request below, which makes the guest use more.
        let host = vmm_memory::of_process(vm.vmm_pid(), spec.size.memory_mib)?;
        own.push(host.own as f64 / 1024.0);
        behind.push(host.guest as f64 / 1024.0);
        let meminfo = client.read("/proc/meminfo", None, 1 << 16).await?;
        used.push(in_use(&String::from_utf8_lossy(&meminfo)).context("the guest's /proc/meminfo")?);
        vm.stop().await;
    }
    let series = vec![
        Series::new("VMM private", "MiB", Some(goals::VMM_MEMORY), own),
        Series::new("host memory behind the guest", "MiB", None, behind),
        Series::new("in use as the guest sees it", "MiB", None, used),
    ];
    Ok(Measured {
        method: "after boot, without further processes: private memory of the VMM process outside \
            guest memory (smaps), host memory that backs the guest's memory, and MemTotal - \
            MemAvailable in the guest",
        limits: "growth after boot; memory shared between guests",
        ..Measured::new("memory", series, &meter)
    })
}

/// Returns the memory in use in MiB.
fn in_use(meminfo: &str) -> Option<f64> {
    let field = |key: &str| {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(key))?;
        // A line is `MemTotal:  507904 kB`.
        line.trim_start_matches(':')
            .trim()
            .trim_end_matches(" kB")
            .parse::<f64>()
            .ok()
    };
    Some((field("MemTotal")? - field("MemAvailable")?) / 1024.0)
}
