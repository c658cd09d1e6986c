//! Placements per second, and quality, of the scheduler and of other algorithms.
//!
//!     cargo run --release -p jiffy-scheduler --example placement [DECISIONS] [HOSTS]
//!
//! Prints one line of JSON for each workload, algorithm and number of hosts: HOSTS, or 1,000, 5,000
//! and 50,000.
//!
//! - Hosts are unequal: 16 to 128 processors, 2 to 8 GiB of memory for each.
//! - Sandboxes have heavy-tailed sizes and 0.5 to 8 GiB for each processor, and arrive in bursts.
//! - Half of the sandboxes use a template that all hosts have, the others one of 64 templates. A
//!   host has 4 of these 64 at first, fetches missing ones, and caches at most 8.
//!
//! The workload `preferred` has sandboxes that need processors, and prefer hosts with their
//! template. The workload `required` has the requests of a fleet (`jiffy_fleet::node`): sandboxes
//! share processors, and are only placed on hosts that have their template.
//!
//! The fleet is filled to 85 % of its scarcer resource. Bursts of 100 placements are then timed,
//! each followed by removals. Finally the fleet is filled to 95 %. `stranded_percent` is the part
//! of the free scarcer resource on hosts without room for a sandbox of usual size. Such hosts lack
//! the other resource, or their free amount is too small. The usual size is the median of the
//! requests, and `stranded_mean_percent` applies to their mean, which is larger.
//!
//! Fleets of at most 1,000 hosts are filled by the measured algorithm, except for two choices.
//! Others are filled by first fit, because the linear algorithms are slow.

#[path = "../tests/support/mod.rs"]
mod support;

use jiffy_scheduler::{HostId, HostReport, PlacementRequest, Resources, Scheduler, TemplateId};
use std::collections::VecDeque;
use std::time::Instant;
use support::{Random, report, request, resources, spec, with_template};

const TEMPLATES: u64 = 64;
/// Maximum number of templates on a host, including the template that all hosts have.
const CACHED: usize = 9;
/// Number of requests from which the usual and the mean size are determined.
const SAMPLES: usize = 100_001;
/// Number of hosts up to which the linear algorithms fill the fleet.
const MAX_LINEAR_FILL: u32 = 1_000;

/// A host of the simple algorithms.
#[derive(Clone)]
struct Host {
    free: Resources,
    templates: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Algorithm {
    /// The scheduler.
    Indexed,
    /// The first host with room.
    FirstFit,
    /// Of all hosts with room, the one with the least free amount of the scarcer resource.
    LinearBestFit,
    /// Of all hosts with room, the one whose ratio of memory and processors is the nearest to the
    /// ratio of the sandbox. Of these, the one with the least free amount of the scarcer resource.
    LinearAligned,
    /// Of two random hosts, the one with room and the least free memory.
    TwoChoices,
}

impl Algorithm {
    const ALL: [(Self, &str); 5] = [
        (Self::Indexed, "scheduler"),
        (Self::LinearAligned, "exact ratio, then best fit, linear"),
        (Self::LinearBestFit, "exact best fit, linear"),
        (Self::FirstFit, "first fit"),
        (Self::TwoChoices, "two choices"),
    ];
}

/// Requirements of the sandboxes.
#[derive(Clone, Copy, PartialEq)]
enum Workload {
    Preferred,
    Required,
}

impl Workload {
    const ALL: [(Self, &str); 2] = [(Self::Preferred, "preferred"), (Self::Required, "required")];

    /// Returns the usual size (the median of each resource), and the mean size.
    fn sizes(self) -> [Resources; 2] {
        let mut random = Random::new(3);
        let needs: Vec<_> = (0..SAMPLES)
            .map(|_| next_request(&mut random, self).needs)
            .collect();
        let amounts = |of: fn(&Resources) -> u32| {
            let mut all: Vec<u32> = needs.iter().map(of).collect();
            all.sort_unstable();
            let sum: u64 = all.iter().map(|&amount| u64::from(amount)).sum();
            [all[SAMPLES / 2], (sum / SAMPLES as u64) as u32]
        };
        let (cpu, memory) = (amounts(|r| r.cpu_milli), amounts(|r| r.memory_mib));
        [0, 1].map(|i| resources(cpu[i], memory[i], 1))
    }
}

/// A fleet with one of the algorithms.
struct Fleet {
    algorithm: Algorithm,
    hosts: Vec<Host>,
    scheduler: Scheduler,
    random: Random,
    now_ms: u64,
    /// Processors are scarcer than memory. Updated before each burst.
    is_cpu_scarce: bool,
}

impl Fleet {
    fn new(algorithm: Algorithm, count: u32) -> Self {
        let mut random = Random::new(7);
        let mut scheduler = Scheduler::new();
        let hosts: Vec<Host> = (0..count)
            .map(|number| {
                let processors = 16 << random.below(4);
                let free = resources(
                    processors * 1000,
                    processors * 1024 * (2 + random.below(7)),
                    processors << 14,
                );
                let templates: Vec<u64> = (0..4)
                    .map(|_| u64::from(random.below(TEMPLATES as u32)))
                    .chain([0])
                    .collect();
                let state = HostReport {
                    templates: templates.iter().map(|&t| TemplateId(t)).collect(),
                    ..report(free)
                };
                scheduler.add_host(HostId(number), spec(free), state);
                Host { free, templates }
            })
            .collect();
        Self {
            algorithm,
            hosts,
            scheduler,
            random,
            now_ms: 0,
            is_cpu_scarce: false,
        }
    }

    /// Selects a host and takes its resources. Returns the host and whether it has the template.
    fn place(&mut self, request: &PlacementRequest) -> Option<(usize, bool)> {
        let needs = &request.needs;
        let fits = |host: &Host| {
            let has_template = || {
                let template = request.template;
                template.is_none_or(|template| host.templates.contains(&template.0))
            };
            host.free.missing(needs).is_none() && (!request.requires_template || has_template())
        };
        let host = match self.algorithm {
            Algorithm::Indexed => {
                let placement = self.scheduler.place(request, self.now_ms).ok()?;
                self.scheduler.confirm(placement.reservation);
                placement.host.0 as usize
            }
            Algorithm::FirstFit => self.hosts.iter().position(fits)?,
            Algorithm::LinearBestFit | Algorithm::LinearAligned => {
                let is_cpu_scarce = self.is_cpu_scarce && needs.cpu_milli > 0;
                let rank = |free: &Resources| {
                    let scarce = if is_cpu_scarce {
                        free.cpu_milli
                    } else {
                        free.memory_mib
                    };
                    let is_aligned = self.algorithm == Algorithm::LinearAligned;
                    (if is_aligned { distance(free, needs) } else { 0 }, scarce)
                };
                let hosts = self.hosts.iter().enumerate().filter(|(_, host)| fits(host));
                hosts.min_by_key(|(_, host)| rank(&host.free))?.0
            }
            Algorithm::TwoChoices => {
                let mut choose = || self.random.below(self.hosts.len() as u32) as usize;
                let choices = [choose(), choose()];
                let fitting = choices.into_iter().filter(|&host| fits(&self.hosts[host]));
                fitting.min_by_key(|&host| self.hosts[host].free.memory_mib)?
            }
        };
        self.hosts[host].free = self.hosts[host].free.minus(needs);
        let has_template = request
            .template
            .is_some_and(|t| self.hosts[host].templates.contains(&t.0));
        Some((host, has_template))
    }

    /// The host has fetched the template of a sandbox. It caches [`CACHED`] templates.
    fn fetch_template(&mut self, host: usize, request: &PlacementRequest) {
        let Some(template) = request.template else {
            return;
        };
        let templates = &mut self.hosts[host].templates;
        templates.push(template.0);
        if templates.len() > CACHED {
            // All hosts have the first template.
            templates.remove(1);
        }
        self.report(host);
    }

    fn remove(&mut self, host: usize, needs: &Resources) {
        self.hosts[host].free = self.hosts[host].free.plus(needs);
        self.report(host);
    }

    fn report(&mut self, host: usize) {
        if self.algorithm == Algorithm::Indexed {
            let templates = self.hosts[host]
                .templates
                .iter()
                .map(|&t| TemplateId(t))
                .collect();
            let state = HostReport {
                templates,
                ..report(self.hosts[host].free)
            };
            self.scheduler.report(HostId(host as u32), state);
        }
    }

    fn free(&self) -> (u64, u64) {
        self.hosts.iter().fold((0, 0), |(cpu, memory), host| {
            (
                cpu + u64::from(host.free.cpu_milli),
                memory + u64::from(host.free.memory_mib),
            )
        })
    }
}

/// Returns the distance between the ratios of a host and of a sandbox, in hundredths of a power of
/// two. A host with less memory for each processor counts twice.
fn distance(free: &Resources, needs: &Resources) -> u64 {
    if needs.cpu_milli == 0 {
        return 0;
    }
    let ratio = |r: &Resources| f64::from(r.memory_mib) / f64::from(r.cpu_milli.max(1));
    let difference = (ratio(free).max(1e-6) / ratio(needs)).log2() * 100.0;
    if difference >= 0.0 {
        difference as u64
    } else {
        (-2.0 * difference) as u64
    }
}

/// A request of heavy-tailed size: mostly 1 processor, rarely up to 16.
fn next_request(random: &mut Random, workload: Workload) -> PlacementRequest {
    // A number below 1000 has at least 22 leading zeros. Each further zero halves the probability
    // and doubles the size.
    let size = 1 << random.below(1000).leading_zeros().saturating_sub(22).min(4);
    // 0.5 to 8 GiB for each processor: less and more than hosts have.
    let memory = 512 * size * (1 << random.below(5));
    let template = if random.below(2) == 0 {
        0
    } else {
        u64::from(random.below(TEMPLATES as u32))
    };
    let is_required = workload == Workload::Required;
    let cpu_milli = if is_required { 0 } else { 1000 * size };
    PlacementRequest {
        requires_template: is_required,
        ..with_template(request(resources(cpu_milli, memory, 1)), template)
    }
}

fn main() {
    let argument = |index| -> Option<u32> { std::env::args().nth(index)?.parse().ok() };
    let decisions = argument(1).unwrap_or(200_000);
    let counts = match argument(2) {
        Some(hosts) => vec![hosts],
        None => vec![1_000, 5_000, 50_000],
    };
    for workload in Workload::ALL {
        for &count in &counts {
            for algorithm in Algorithm::ALL {
                measure(algorithm, workload, count, decisions);
            }
        }
    }
}

fn measure(
    (algorithm, name): (Algorithm, &str),
    (workload, workload_name): (Workload, &str),
    count: u32,
    decisions: u32,
) {
    let mut fleet = Fleet::new(algorithm, count);
    let (cpu, memory) = fleet.free();
    let mut random = Random::new(1);
    let mut running = VecDeque::new();
    // Fill to 85 % of the scarcer resource. Two choices would fail for most requests.
    let fills = match algorithm {
        Algorithm::Indexed => true,
        Algorithm::TwoChoices => false,
        _ => count <= MAX_LINEAR_FILL,
    };
    fleet.algorithm = if fills {
        algorithm
    } else {
        Algorithm::FirstFit
    };
    loop {
        let (free_cpu, free_memory) = fleet.free_parts(cpu, memory);
        fleet.is_cpu_scarce = free_cpu < free_memory;
        if free_cpu.min(free_memory) < 0.15 {
            break;
        }
        for _ in 0..count / 10 {
            let request = next_request(&mut random, workload);
            let Some((host, _)) = fleet.place(&request) else {
                continue;
            };
            running.push_back((host, request.needs));
        }
    }
    fleet.algorithm = algorithm;
    // Algorithms that search all hosts are measured with fewer placements.
    let slow = !matches!(algorithm, Algorithm::Indexed | Algorithm::TwoChoices);
    let decisions = if slow {
        (decisions / (count / 100)).max(1000)
    } else {
        decisions
    };
    let requests: Vec<_> = (0..decisions)
        .map(|_| next_request(&mut random, workload))
        .collect();
    let (mut times, mut placed, mut local) = (Vec::with_capacity(requests.len()), 0_u32, 0_u32);
    for (number, request) in requests.iter().enumerate() {
        // Before each burst of 100 placements, remove the oldest sandboxes until 15 % of the
        // scarcer resource are free.
        if number % 100 == 0 {
            fleet.now_ms += 1;
            let (free_cpu, free_memory) = fleet.free_parts(cpu, memory);
            fleet.is_cpu_scarce = free_cpu < free_memory;
            while running.len() > 100 && fleet.free_parts_at_most(cpu, memory, 0.15) {
                let Some((host, needs)) = running.pop_front() else {
                    break;
                };
                fleet.remove(host, &needs);
            }
        }
        let start = Instant::now();
        let placement = fleet.place(request);
        times.push(start.elapsed().as_nanos() as u64);
        if let Some((host, has_template)) = placement {
            placed += 1;
            local += u32::from(has_template);
            if !has_template {
                fleet.fetch_template(host, request);
            }
            running.push_back((host, request.needs));
        }
    }
    let total: u64 = times.iter().sum();
    times.sort_unstable();
    // Quality at 95 %: fill up with the same algorithm. The algorithm `TwoChoices` often fails
    // earlier.
    let (mut filled, mut filled_local, mut failures) = (0_u32, 0_u32, 0);
    while !fleet.free_parts_at_most(cpu, memory, 0.05) && failures < 1000 {
        let request = next_request(&mut random, workload);
        match fleet.place(&request) {
            Some((host, has_template)) => {
                if !has_template {
                    fleet.fetch_template(host, &request);
                }
                filled += 1;
                filled_local += u32::from(has_template);
                failures = 0;
            }
            None => failures += 1,
        }
    }
    let (free_cpu, free_memory) = fleet.free_parts(cpu, memory);
    let [usual, mean] = workload.sizes();
    let [stranded, stranded_mean] = [&usual, &mean].map(|size| fleet.stranded(size));
    println!(
        r#"{{"workload": "{workload_name}", "algorithm": "{name}", "hosts": {count}, "decisions": {decisions}, "per_second": {:.0}, "p50_ns": {}, "p99_ns": {}, "placed_percent": {:.1}, "with_template_percent": {:.1}, "filled_percent": {:.1}, "filled_with_template_percent": {:.1}, "stranded_percent": {:.1}, "stranded_mean_percent": {:.1}}}"#,
        f64::from(decisions) * 1e9 / total as f64,
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        f64::from(placed) * 100.0 / f64::from(decisions),
        f64::from(local) * 100.0 / f64::from(placed.max(1)),
        100.0 - free_cpu.min(free_memory) * 100.0,
        f64::from(filled_local) * 100.0 / f64::from(filled.max(1)),
        stranded * 100.0,
        stranded_mean * 100.0,
    );
}

impl Fleet {
    /// Free parts of processor time and memory.
    fn free_parts(&self, cpu: u64, memory: u64) -> (f64, f64) {
        let (free_cpu, free_memory) = self.free();
        (
            free_cpu as f64 / cpu as f64,
            free_memory as f64 / memory as f64,
        )
    }

    fn free_parts_at_most(&self, cpu: u64, memory: u64, part: f64) -> bool {
        let (free_cpu, free_memory) = self.free_parts(cpu, memory);
        free_cpu.min(free_memory) < part
    }

    /// Part of the free scarcer resource on hosts that cannot hold a sandbox of this size.
    fn stranded(&self, size: &Resources) -> f64 {
        let (cpu, memory) = self.free();
        let is_cpu_scarce = cpu * u64::from(size.memory_mib) < memory * u64::from(size.cpu_milli);
        let amount = |host: &Host| {
            u64::from(if is_cpu_scarce {
                host.free.cpu_milli
            } else {
                host.free.memory_mib
            })
        };
        let full = self
            .hosts
            .iter()
            .filter(|host| host.free.missing(size).is_some());
        let total: u64 = self.hosts.iter().map(amount).sum();
        full.map(amount).sum::<u64>() as f64 / total.max(1) as f64
    }
}
