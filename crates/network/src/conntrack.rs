//! Limits of sandboxes in the host's connection tracking table (conntrack).
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! Every connection of a sandbox has an entry in the table of its own namespace. It has another one
//! in the host's table, because the host translates its address. The limit
//! `net.netfilter.nf_conntrack_max` applies to each namespace separately. Therefore a sandbox could
//! fill the host's table, and then no program on the host could open a connection.
//!
//! The host counts its own entries, by incoming device, and does not rely on the table of the
//! slot's namespace. That table may have dropped an entry that the host still has, for example if a
//! reset was lost.
//!
//! The limit per sandbox depends on the fill level of the table. The kernel counts against three
//! limits at once. The limits whose chains contain rules take effect, so that no count is lost when
//! the level changes. Closed connections remain in the table for a while without being counted. A
//! rate limit of new connections and timeouts shorter than the kernel's defaults bound their
//! number.

use crate::NetError;
use crate::program;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Interval between checks of the table. A guest can open a few thousand connections in this time.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// File with the number of entries in the table.
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";
/// File with the maximum number of entries in the table.
const MAXIMUM: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// Maximum number of counted devices: the devices of all slots and of slots that are being removed.
const MAX_COUNTED_DEVICES: u32 = 16_384;
/// Seconds in which a sandbox may open as many connections as its limit. After a pause, it may open
/// this number at once.
const REFILL_SECONDS: u32 = 10;
/// Timeouts in seconds of sandboxes' TCP connections before they are established and after they are
/// closed, if the kernel supports them. The kernel's defaults are up to 120.
const SHORT_TIMEOUTS: &str =
    "syn_sent: 30, syn_recv: 30, fin_wait: 30, last_ack: 10, time_wait: 10, close: 5";
/// Minimum limit of connections of a sandbox.
const MIN_CONNECTIONS: u32 = 8;

/// Limits for all sandboxes of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConntrackLimits {
    /// Maximum number of connections of one sandbox.
    pub per_sandbox: u32,
    /// Number of entries of the host's table that sandboxes may use. The limits per sandbox
    /// decrease at a half and at three quarters of it. Defaults to three quarters of the table.
    pub total: Option<u32>,
}

/// Fill level of the host's table in relation to the total for sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TablePressure {
    /// Each sandbox may use its full limit.
    #[default]
    None,
    /// Half of the total is in use: the limit is a sixteenth.
    High,
    /// Three quarters of the total are in use: the limit is so low that new sandboxes still get
    /// connections.
    Full,
}

impl TablePressure {
    /// Returns the next level if the table has `count` entries of `total`. Uses hysteresis when
    /// falling.
    fn next(self, count: u64, total: u64) -> Self {
        // Eighths of the total: levels rise at 4 and 6 eighths and fall below 3 and 5 eighths.
        let eighths = count.saturating_mul(8) / total.max(1);
        match (self, eighths) {
            (_, 6..) => Self::Full,
            (Self::Full, 5) => Self::Full,
            (_, 4..) => Self::High,
            (Self::None, _) => Self::None,
            (_, 3) => Self::High,
            _ => Self::None,
        }
    }
}

impl ConntrackLimits {
    /// Returns the maximum number of connections of one sandbox under each pressure.
    pub fn tiers(self) -> [u32; 3] {
        let all = self.per_sandbox;
        // The limits have the order of `TablePressure`. The minimum keeps a sandbox usable at full
        // pressure.
        [all, all / 16, all / 256].map(|limit| limit.max(MIN_CONNECTIONS).min(all))
    }

    /// Returns the total for sandboxes in the host's table. `None` if the configured total is 0.
    /// Without a configured total, `None` also if the table is missing or unlimited.
    fn total(self) -> Option<u64> {
        let maximum = number(MAXIMUM).filter(|maximum| *maximum > 0);
        // Divide first: the product of a large maximum could overflow.
        self.total
            .map(u64::from)
            .or_else(|| Some(maximum? / 4 * 3))
            .filter(|total| *total > 0)
    }

    /// Returns the rule that rejects connections beyond the rate of a tier. `name` selects the set
    /// that counts new connections per device.
    fn rate_rule(limit: u32, name: &str) -> String {
        let rate = (limit / REFILL_SECONDS).max(1);
        format!(
            "add @paced_{name} {{ iifname limit rate over {rate}/second burst {limit} packets }} goto refuse"
        )
    }

    /// Returns sets and chains of the host's table. New connections jump to `counted`. The chains
    /// `pace_*` and the sets `paced_*` limit the rate of new connections, and the sets `counted_*`
    /// count open ones. The chain `refuse` is defined in `host.rs`.
    pub fn chains(self) -> String {
        let [all, high, full] = self.tiers();
        let set = format!("{{ type ifname; size {MAX_COUNTED_DEVICES}; flags dynamic; }}");
        let rate_rule = Self::rate_rule(all, "none");
        format!(
            // The last three rules always count against all three limits. The lower two limits are
            // enforced only while `enforce` has added a rule to their chains (`under_high`,
            // `under_full`).
            r"  set paced_none {set}
  set paced_high {set}
  set paced_full {set}
  set counted_none {set}
  set counted_high {set}
  set counted_full {set}
  chain under_high {{
  }}
  chain under_full {{
  }}
  chain pace_high {{
  }}
  chain pace_full {{
  }}
  chain counted {{
    jump pace_full
    jump pace_high
    {rate_rule}
    add @counted_none {{ iifname ct count over {all} }} goto refuse
    add @counted_high {{ iifname ct count over {high} }} jump under_high
    add @counted_full {{ iifname ct count over {full} }} jump under_full
  }}
"
        )
    }
}

/// Activates the limits of `pressure` in table `table`.
fn enforce(table: &str, limits: ConntrackLimits, pressure: TablePressure) -> Result<(), NetError> {
    let [_, high, full] = limits.tiers();
    let chain = |name: &str, rule: &str, on: bool| {
        let rule = format!("add rule inet {table} {name} {rule}\n");
        format!(
            "flush chain inet {table} {name}\n{}",
            if on { &rule } else { "" }
        )
    };
    let (is_high, is_full) = (
        pressure >= TablePressure::High,
        pressure == TablePressure::Full,
    );
    // The changes form one transaction: no packet sees a part of them.
    program::nft(
        &(chain("under_high", "goto refuse", is_high)
            + &chain("under_full", "goto refuse", is_full)
            + &chain(
                "pace_high",
                &ConntrackLimits::rate_rule(high, "high"),
                is_high,
            )
            + &chain(
                "pace_full",
                &ConntrackLimits::rate_rule(full, "full"),
                is_full,
            )),
    )
}

/// Returns objects with short timeouts for closed connections, and the rules that assign them to
/// new connections.
fn short_timeouts() -> (String, &'static str) {
    let of = |version: &str| {
        format!(
            "  ct timeout ended_{version} {{ protocol tcp; l3proto {version}; policy = {{ {SHORT_TIMEOUTS} }}; }}\n"
        )
    };
    let rules = "    ct state new meta l4proto tcp meta nfproto ipv4 ct timeout set \"ended_ip\"\n    \
                 ct state new meta l4proto tcp meta nfproto ipv6 ct timeout set \"ended_ip6\"\n";
    (of("ip") + &of("ip6"), rules)
}

/// Like [`short_timeouts`]. Empty if the kernel does not support timeouts, as tested with `nft
/// --check`.
pub(crate) fn short_timeouts_if_supported() -> (String, &'static str) {
    let (objects, rules) = short_timeouts();
    let script = format!("table inet jiffy_probe {{\n{objects}  chain probe {{\n{rules}  }}\n}}\n");
    match program::run("nft", &["--check", "-f", "-"], &script) {
        Ok(_) => (objects, rules),
        Err(e) => {
            tracing::debug!(
                error = %e, "cannot shorten timeouts of closed connections"
            );
            (String::new(), "")
        }
    }
}

/// Reads a number from a file of the kernel. `None` if the file is missing or has no number.
fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Current fill level. The level is only a hint for rate limits and guards no other data, so
/// `Relaxed` accesses suffice.
#[derive(Debug, Default)]
pub(crate) struct PressureGauge(AtomicU8);

impl PressureGauge {
    /// Returns the current fill level.
    pub fn get(&self) -> TablePressure {
        match self.0.load(Ordering::Relaxed) {
            0 => TablePressure::None,
            1 => TablePressure::High,
            _ => TablePressure::Full,
        }
    }

    /// Changes the current fill level.
    pub fn set(&self, pressure: TablePressure) {
        self.0.store(pressure as u8, Ordering::Relaxed);
    }
}

/// Thread that monitors the table of the network namespace in which it was started. Dropping this
/// value stops the thread.
#[derive(Debug)]
pub(crate) struct ConntrackWatcher {
    /// End of a channel. The thread exits when this end is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for ConntrackWatcher {
    fn drop(&mut self) {
        // Without a sender, the thread's wait ends at once.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was logged by the panic hook; there is nothing to clean up.
            let _ = thread.join();
        }
    }
}

impl ConntrackWatcher {
    /// Starts the thread. `table` is the host's table with the chains of `limits`.
    pub fn start(
        table: String,
        limits: ConntrackLimits,
        gauge: Arc<PressureGauge>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    check(&table, limits, &gauge);
                }
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// Compares the number of tracked connections of the host with the limit, and changes the limit per
/// sandbox if necessary.
fn check(table: &str, limits: ConntrackLimits, gauge: &PressureGauge) {
    let (Some(count), Some(total)) = (number(COUNT), limits.total()) else {
        return;
    };
    let before = gauge.get();
    let now = before.next(count, total);
    if now == before {
        return;
    }
    // Update the level only if its rules are active, so that a failure is retried at the next
    // check.
    match enforce(table, limits, now) {
        Ok(()) => gauge.set(now),
        Err(e) => return tracing::warn!(error = %e, "cannot change the limits of connections"),
    }
    let limit = limits.tiers()[now as usize];
    if now > before {
        tracing::warn!(
            count,
            total,
            limit,
            "the host's connection tracking table is filling up: sandboxes with more connections than \
             the limit cannot open new ones \
             (see `jiffy doctor --security`)"
        );
    } else {
        tracing::info!(limit, "raised the limit of connections per sandbox");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_rises_at_once_and_falls_late() {
        let mut pressure = TablePressure::None;
        let mut at = |count| {
            pressure = pressure.next(count, 800);
            pressure
        };
        assert_eq!(at(399), TablePressure::None);
        assert_eq!(at(400), TablePressure::High);
        assert_eq!(at(300), TablePressure::High);
        assert_eq!(at(299), TablePressure::None);
        assert_eq!(at(600), TablePressure::Full);
        assert_eq!(at(500), TablePressure::Full);
        assert_eq!(at(499), TablePressure::High);
        assert_eq!(at(10_000), TablePressure::Full);
        assert_eq!(at(0), TablePressure::None);
    }

    #[test]
    fn the_shares_of_all_slots_at_full_pressure_fit_the_default_table() {
        let tiers = |per_sandbox| {
            let total = None;
            ConntrackLimits { per_sandbox, total }.tiers()
        };
        let default_tiers = tiers(4096);
        assert_eq!(default_tiers, [4096, 256, 16]);
        // The table of a host with at least 8 GiB. Full pressure begins at three quarters of the
        // total, which is three quarters of the table. Then each of 4096 slots may still reach its
        // limit.
        let table = 262_144;
        assert!(table / 4 * 3 / 4 * 3 + 4096 * default_tiers[2] < table);
        assert_eq!(tiers(64), [64, 8, 8]);
        assert_eq!(tiers(4), [4, 4, 4]);
    }
}
