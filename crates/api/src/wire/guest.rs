//! Conversion of the usage of sandboxes to the bodies of the API.

use super::moment;
use jiffy_api_types::Metric;
use jiffy_sandbox_manager::UsageSample;

/// Converts a sample. Values of traffic are present only together.
pub(crate) fn metric(sample: &UsageSample) -> Metric {
    let traffic = sample.net_out.zip(sample.net_in);
    Metric {
        timestamp: moment(sample.at_ms),
        timestamp_unix: sample.at_ms / 1000,
        cpu_count: sample.cpu_count,
        cpu_used_pct: sample.cpu_used_pct.into(),
        mem_used: sample.mem_used,
        mem_total: sample.mem_total,
        mem_cache: sample.mem_cache,
        disk_used: sample.disk_used,
        disk_total: sample.disk_total,
        net_bytes_out: traffic.map(|(out, _)| out),
        net_bytes_in: traffic.map(|(_, back)| back),
    }
}
