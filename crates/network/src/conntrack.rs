//! Shares of sandboxes in the host's connection tracking table (conntrack).
//!
//! Every connection of a sandbox is an entry in the table of its own namespace and, because the
//! host translates its address, one in the host's. The limit `net.netfilter.nf_conntrack_max` is
//! the host's, and each namespace is held against it by itself: the table that can be filled is the
//! host's, and then no program on the host gets a new connection. The host therefore counts for
//! itself, by the device that a connection comes from: the host may still have an entry that a slot
//! has dropped (for example if a reset is lost on the way).
//!
//! The share of a sandbox depends on how full the table is: the kernel counts against three limits
//! at once, and enforces those whose chain is filled, so no count is ever lost. Connections that
//! have ended stay in the table for a while and are not counted any more: for them there is a rate
//! limit of new connections, and shorter timeouts than the kernel's.

use crate::NetError;
use crate::program;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time between two checks of the table. A guest makes some thousand connections meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";
const MAXIMUM: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// Devices that are counted at the same time: those of present slots and of some that are being
/// removed.
const MAX_COUNTED_DEVICES: u32 = 16_384;
/// Seconds in which a sandbox may make as many connections as its share; as many at once after a
/// pause.
const REFILL_SECONDS: u32 = 10;
/// Timeouts in seconds of sandboxes' TCP connections that are not open yet or not any more, if the
/// kernel supports them. Its own are up to 120.
const ENDED_TIMEOUTS: &str =
    "syn_sent: 30, syn_recv: 30, fin_wait: 30, last_ack: 10, time_wait: 10, close: 5";
/// Fewest connections of a sandbox under any limit.
const MIN_CONNECTIONS: u32 = 8;

/// Limits of all sandboxes of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConntrackLimits {
    /// Most connections of one sandbox.
    pub per_sandbox: u32,
    /// Entries of the host's table beyond which sandboxes get hardly any new ones; none: three
    /// quarters of the table.
    pub total: Option<u32>,
}

/// Fill level of the host's table, for sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TablePressure {
    /// Each may have all of its connections.
    #[default]
    None,
    /// Half of the total is in use: a sixteenth of them.
    High,
    /// Three quarters of the total are in use: so few that also the last newcomer has some.
    Full,
}

impl TablePressure {
    /// The next level, if the table has `count` entries of `total`. It falls later than it rises.
    fn after(self, count: u64, total: u64) -> Self {
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
    /// Most connections of one sandbox under each pressure.
    pub fn tiers(self) -> [u32; 3] {
        let all = self.per_sandbox;
        [all, all / 16, all / 256].map(|limit| limit.max(MIN_CONNECTIONS).min(all))
    }

    /// Entries of the host's table at the full level; none: there is no limit, or no table.
    fn total(self) -> Option<u64> {
        let maximum = number(MAXIMUM).filter(|maximum| *maximum > 0);
        self.total
            .map(u64::from)
            .or_else(|| Some(maximum? / 4 * 3))
            .filter(|total| *total > 0)
    }

    /// Rule that refuses connections beyond the rate of a tier.
    fn pace(limit: u32, name: &str) -> String {
        let rate = (limit / REFILL_SECONDS).max(1);
        format!(
            "add @paced_{name} {{ iifname limit rate over {rate}/second burst {limit} packets }} goto refuse"
        )
    }

    /// Sets and chains of the host's table; new connections jump to `counted`.
    pub fn chains(self) -> String {
        let [all, high, full] = self.tiers();
        let set = format!("{{ type ifname; size {MAX_COUNTED_DEVICES}; flags dynamic; }}");
        let pace = Self::pace(all, "none");
        format!(
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
    {pace}
    add @counted_none {{ iifname ct count over {all} }} goto refuse
    add @counted_high {{ iifname ct count over {high} }} jump under_high
    add @counted_full {{ iifname ct count over {full} }} jump under_full
  }}
"
        )
    }
}

/// Enforces the shares of `pressure` in table `table`.
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
    program::nft(
        &(chain("under_high", "goto refuse", is_high)
            + &chain("under_full", "goto refuse", is_full)
            + &chain("pace_high", &ConntrackLimits::pace(high, "high"), is_high)
            + &chain("pace_full", &ConntrackLimits::pace(full, "full"), is_full)),
    )
}

/// Objects that shorten the timeouts of ended connections, and rules that apply them to new
/// connections from devices `slots`.
fn ended() -> (String, &'static str) {
    let of = |version: &str| {
        format!(
            "  ct timeout ended_{version} {{ protocol tcp; l3proto {version}; policy = {{ {ENDED_TIMEOUTS} }}; }}\n"
        )
    };
    let rules = "    ct state new meta l4proto tcp meta nfproto ipv4 ct timeout set \"ended_ip\"\n    \
                 ct state new meta l4proto tcp meta nfproto ipv6 ct timeout set \"ended_ip6\"\n";
    (of("ip") + &of("ip6"), rules)
}

/// Same, if this kernel supports it (`nft --check` asks it and changes nothing); empty otherwise.
pub(crate) fn ended_if_known() -> (String, &'static str) {
    let (objects, rules) = ended();
    let script = format!("table inet jiffy_probe {{\n{objects}  chain probe {{\n{rules}  }}\n}}\n");
    match program::run("nft", &["--check", "-f", "-"], &script) {
        Ok(_) => (objects, rules),
        Err(e) => {
            tracing::debug!(
                "connections that have ended are kept as long as the kernel has it: {e}"
            );
            (String::new(), "")
        }
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The level in force, for requests on behalf of sandboxes.
#[derive(Debug, Default)]
pub(crate) struct PressureGauge(AtomicU8);

impl PressureGauge {
    pub fn get(&self) -> TablePressure {
        match self.0.load(Ordering::Relaxed) {
            0 => TablePressure::None,
            1 => TablePressure::High,
            _ => TablePressure::Full,
        }
    }

    pub fn set(&self, pressure: TablePressure) {
        self.0.store(pressure as u8, Ordering::Relaxed);
    }
}

/// Watches the table of this thread's network namespace until it is dropped.
#[derive(Debug)]
pub(crate) struct ConntrackWatcher {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for ConntrackWatcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ConntrackWatcher {
    /// Starts it; `table` is the host's, with the chains of `limits`.
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
                    look(&table, limits, &gauge);
                }
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

fn look(table: &str, limits: ConntrackLimits, gauge: &PressureGauge) {
    let (Some(count), Some(total)) = (number(COUNT), limits.total()) else {
        return;
    };
    let before = gauge.get();
    let now = before.after(count, total);
    if now == before {
        return;
    }
    match enforce(table, limits, now) {
        Ok(()) => gauge.set(now),
        Err(e) => return tracing::warn!("limits of connections stay as they are: {e}"),
    }
    let limit = limits.tiers()[now as usize];
    if now > before {
        tracing::warn!(
            "the host's table of connections has {count} entries of {total} that sandboxes may fill: \
             new connections are refused to sandboxes with more than {limit} \
             (see `jiffy doctor --security`)"
        );
    } else {
        tracing::info!("sandboxes may have {limit} connections each again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_rises_at_once_and_falls_late() {
        let mut pressure = TablePressure::None;
        let mut at = |count| {
            pressure = pressure.after(count, 800);
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
    fn the_shares_of_all_slots_at_full_pressure_fit_the_usual_table() {
        let tiers = |per_sandbox| {
            let total = None;
            ConntrackLimits { per_sandbox, total }.tiers()
        };
        let usual = tiers(4096);
        assert_eq!(usual, [4096, 256, 16]);
        // The table of a host with 8 GiB or more: three quarters of three quarters of it.
        let table = 262_144;
        assert!(table / 4 * 3 / 4 * 3 + 4096 * usual[2] < table);
        assert_eq!(tiers(64), [64, 8, 8]);
        assert_eq!(tiers(4), [4, 4, 4]);
    }
}
