//! Costs of the host's own operations, several times.

use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::{Measured, Series, calibrate};

/// Calibrates the host `n` times.
pub async fn calibration(n: usize) -> anyhow::Result<Measured> {
    let mut all = Vec::with_capacity(n);
    while all.len() < n {
        all.push(calibrate().await?);
    }
    let series = jiffy_benchmark::calibration::Calibration::names().filter_map(|name| {
        let found = all.iter().filter_map(|one| one.costs.get(name));
        let samples: Vec<f64> = found.map(|cost| cost.median_us).collect();
        (!samples.is_empty()).then(|| Series::new(name, "us", None, samples))
    });
    Ok(Measured {
        method: "a guest of one page that reads an emulated register or writes to a port; first \
            touches of anonymous memory and of a mapped file in the page cache (with its \
            neighbours); copies in 16 MiB; writes to a new file and one with fsync, in the data \
            directory; a copy of this process that runs `true`; two threads on one processor that \
            wake each other. Medians of batches, microseconds",
        limits: "costs of several at once; caches of a processor that had other work",
        ..Measured::new("calibration", series.collect(), &Meter::new())
    })
}
