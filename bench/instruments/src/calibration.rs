//! Instrument `calibration`: repeated measurement of the host's own operations.

use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::{Measured, Series, calibrate};

/// Calibrates the host `n` times.
pub async fn calibration(n: usize) -> anyhow::Result<Measured> {
    let mut all = Vec::with_capacity(n);
    while all.len() < n {
        all.push(calibrate().await?);
    }
    let series = jiffy_benchmark::calibration::Calibration::names().filter_map(|name| {
        // A cost is missing if the host does not support its measurement, for example without KVM.
        let found = all.iter().filter_map(|one| one.costs.get(name));
        let samples: Vec<f64> = found.map(|cost| cost.median_us).collect();
        (!samples.is_empty()).then(|| Series::new(name, "us", None, samples))
    });
    Ok(Measured {
        method: "a guest of one page that reads an emulated register or writes to a port; first \
            accesses to anonymous memory and to a mapped file in the page cache (with \
            fault-around); copies in 16 MiB; writes to a new file and a write with fsync, in the \
            data directory; a fork of this process that executes `true`; two threads on one \
            processor that wake each other. Medians of batches, microseconds",
        limits: "concurrent operations; processor caches that contain data of other work",
        ..Measured::new("calibration", series.collect(), &Meter::new())
    })
}
