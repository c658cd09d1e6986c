//! Calibration: costs of a host's own operations, measured in the same run as the results that they
//! explain.
//!
//! The cost of an exit, of a page or of a sync differs several-fold between hosts of the same kind.
//! Two results are comparable if their calibrations agree.

mod exits;
mod files;
mod pages;
mod processes;

use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time for the measurement of one cost. The last batch may exceed it.
const TIME_PER_COST: Duration = Duration::from_millis(100);
/// Maximum number of batches per cost.
const MAX_BATCHES: usize = 25;

/// Measures one cost. Creates its files in the directory. The error contains the reason of a
/// failure.
type Measurement = fn(&Path) -> Result<Cost, String>;

/// Names and measurements of the costs, in the order of the table.
const MEASUREMENTS: [(&str, Measurement); 9] = [
    ("KVM exit", |_| exits::in_kernel()),
    ("KVM exit to its VMM", |_| exits::to_vmm()),
    ("page fault, fresh", |_| pages::fresh_fault()),
    ("page fault, file", pages::file_fault),
    ("copy of 4 KiB", |_| pages::copy()),
    ("4 KiB into new page cache", files::new_page_cache),
    ("fsync of 4 KiB", files::fsync),
    ("fork and exec", |_| processes::fork_and_exec()),
    ("context switch", |_| processes::context_switch()),
];

/// Cost of one operation in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Cost in the fastest batch, which other work on the host affected least.
    pub min_us: f64,
    /// Cost in the median batch.
    pub median_us: f64,
}

/// Costs of a host's operations.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Calibration {
    /// Costs by name.
    pub costs: BTreeMap<&'static str, Cost>,
    /// Costs that could not be measured, with the reason.
    pub not_available: Vec<String>,
    /// Duration of the calibration in milliseconds.
    pub took_ms: f64,
}

impl Calibration {
    /// Measures this host in about a second. Creates temporary files in `directory`.
    pub fn measure(directory: &Path) -> Self {
        let began = Instant::now();
        let mut found = Self::default();
        for (name, measurement) in MEASUREMENTS {
            match measurement(directory) {
                Ok(cost) => {
                    found.costs.insert(name, cost);
                }
                // A missing cost does not prevent a benchmark.
                Err(why) => found
                    .not_available
                    .push(format!("calibration: {name}: not available: {why}")),
            }
        }
        found.took_ms = began.elapsed().as_secs_f64() * 1000.0;
        found
    }

    /// Returns the names of all costs, in the order of the table.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MEASUREMENTS.iter().map(|(name, _)| *name)
    }

    /// Returns one line with the median of each cost.
    pub fn line(&self) -> String {
        let measurements = MEASUREMENTS.iter();
        let costs = measurements.filter_map(|(name, _)| Some((name, self.costs.get(name)?)));
        let costs: Vec<String> = costs
            .map(|(name, cost)| format!("{name} {:.2}", cost.median_us))
            .collect();
        costs.join(", ")
    }
}

/// Runs batches of `operations` each for [`TIME_PER_COST`]. `batch` returns the duration of its
/// operations.
fn batches(
    operations: u32,
    mut batch: impl FnMut() -> Result<Duration, String>,
) -> Result<Cost, String> {
    let began = Instant::now();
    let mut each = Vec::with_capacity(MAX_BATCHES);
    // At least one batch runs, even if it takes longer than the time limit.
    while each.is_empty() || (each.len() < MAX_BATCHES && began.elapsed() < TIME_PER_COST) {
        each.push(batch()?.as_secs_f64() * 1e6 / f64::from(operations));
    }
    // The median is robust against other work of the host, the minimum shows the undisturbed cost.
    each.sort_by(f64::total_cmp);
    match (each.first(), each.get(each.len() / 2)) {
        (Some(min), Some(median)) => Ok(Cost {
            min_us: *min,
            median_us: *median,
        }),
        _ => Err("no batch was measured".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_has_sane_costs_in_less_than_two_seconds_and_leaves_no_file() {
        let place = tempfile::tempdir().unwrap();
        let found = Calibration::measure(place.path());
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        assert_eq!(
            found.costs.len() + found.not_available.len(),
            MEASUREMENTS.len()
        );
        let unavailable = &found.not_available;
        // A test host may lack KVM, but nothing else.
        assert!(
            unavailable.iter().all(|why| why.contains("KVM")),
            "{unavailable:?}"
        );
        for (name, cost) in &found.costs {
            assert!(cost.min_us > 0.0 && cost.min_us <= cost.median_us, "{name}");
            assert!(cost.median_us < 1e6, "{name}: {cost:?}");
        }
        let cost = |name| found.costs.get(name).map(|cost| cost.min_us);
        assert!(cost("copy of 4 KiB") < cost("fork and exec"));
        assert!(cost("page fault, fresh") < cost("fork and exec"));
        assert!(found.line().contains("context switch "), "{}", found.line());
        // A calibration takes about a second. The limit is higher, because other work may delay it.
        assert!(found.took_ms < 20_000.0, "{} ms", found.took_ms);
    }

    #[test]
    fn a_cost_is_the_average_time_of_an_operation_in_a_batch() {
        let mut times = [30, 10, 20].into_iter().cycle();
        let cost = batches(10, || Ok(Duration::from_micros(times.next().unwrap()))).unwrap();
        assert_eq!((cost.min_us, cost.median_us), (1.0, 2.0));
        let failed = batches(1, || Err("why".to_owned()));
        assert_eq!(failed, Err("why".to_owned()));
    }
}
