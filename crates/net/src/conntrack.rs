//! Share of sandboxes in the host's table of connections (conntrack).
//!
//! Every connection of a sandbox is an entry in the table of its own namespace and, because the host translates its address, one in the
//! host's. The limit `net.netfilter.nf_conntrack_max` is the host's, and each namespace is held against it by itself: what can be filled
//! is the host's table, and then nobody on the host gets a new connection. The host therefore counts for itself, by the device that a
//! connection comes from: what a slot has forgotten, the host may still have (a reset that does not live to reach it, say).
//!
//! How many a sandbox may have depends on how full the table is: the kernel counts against three limits at once, and which of them are
//! enforced is switched by emptying or filling a chain each, so no count is ever lost. Connections that have ended stay in the table for a
//! while and are not counted any more: for them there is a pace of new connections, and shorter times than the kernel's.

use crate::NetError;
use crate::program;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time between two looks at the table. A guest makes some thousand connections meanwhile.
const INTERVAL: Duration = Duration::from_millis(250);
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";
const MAXIMUM: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// Devices that are counted at the same time: those of slots there are and of some that are on their way out.
const MAX_COUNTED_DEVICES: u32 = 16_384;
/// Seconds in which a sandbox may make as many connections as it may have; as many at once after a rest.
const SECONDS_FOR_ALL: u32 = 10;
/// Seconds for which TCP connections of sandboxes stay in the table that are not open yet or not any more, where the kernel lets itself be
/// told. Its own are up to 120.
const ENDED: &str =
    "syn_sent: 30, syn_recv: 30, fin_wait: 30, last_ack: 10, time_wait: 10, close: 5";
/// Fewest connections of a sandbox that any limit leaves.
const MIN_CONNECTIONS: u32 = 8;

/// Limits of a host's sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most connections of one sandbox.
    pub per_sandbox: u32,
    /// Entries of the host's table beyond which sandboxes get hardly any new ones; none: three quarters of the table.
    pub total: Option<u32>,
}

/// How full the host's table is, as seen from sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    /// Each may have all of its connections.
    #[default]
    None,
    /// Half of the total is in use: a sixteenth of them.
    High,
    /// Three quarters of the total are in use: so few that also the last newcomer has some.
    Full,
}

impl Pressure {
    /// The next one, if the table has `count` entries of `total`. It falls later than it rises.
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

impl Limits {
    /// Most connections of one sandbox under each pressure.
    pub fn tiers(self) -> [u32; 3] {
        let all = self.per_sandbox;
        [all, all / 16, all / 256].map(|limit| limit.max(MIN_CONNECTIONS).min(all))
    }

    /// Entries of the host's table at which pressure is full; none: there is no limit, or no table.
    fn total(self) -> Option<u64> {
        let maximum = number(MAXIMUM).filter(|maximum| *maximum > 0);
        self.total
            .map(u64::from)
            .or_else(|| Some(maximum? / 4 * 3))
            .filter(|total| *total > 0)
    }

    /// Rule that refuses connections beyond the pace of a tier.
    fn pace(limit: u32, name: &str) -> String {
        let rate = (limit / SECONDS_FOR_ALL).max(1);
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

/// Enforces, in table `table`, what sandboxes may have under `pressure`.
fn enforce(table: &str, limits: Limits, pressure: Pressure) -> Result<(), NetError> {
    let [_, high, full] = limits.tiers();
    let chain = |name: &str, rule: &str, on: bool| {
        let rule = format!("add rule inet {table} {name} {rule}\n");
        format!(
            "flush chain inet {table} {name}\n{}",
            if on { &rule } else { "" }
        )
    };
    let (is_high, is_full) = (pressure >= Pressure::High, pressure == Pressure::Full);
    program::nft(
        &(chain("under_high", "goto refuse", is_high)
            + &chain("under_full", "goto refuse", is_full)
            + &chain("pace_high", &Limits::pace(high, "high"), is_high)
            + &chain("pace_full", &Limits::pace(full, "full"), is_full)),
    )
}

/// Objects that shorten how long ended connections are kept, and rules for new connections from devices `slots` that use them.
fn ended() -> (String, &'static str) {
    let of = |version: &str| {
        format!(
            "  ct timeout ended_{version} {{ protocol tcp; l3proto {version}; policy = {{ {ENDED} }}; }}\n"
        )
    };
    let rules = "    ct state new meta l4proto tcp meta nfproto ipv4 ct timeout set \"ended_ip\"\n    \
                 ct state new meta l4proto tcp meta nfproto ipv6 ct timeout set \"ended_ip6\"\n";
    (of("ip") + &of("ip6"), rules)
}

/// The same if this kernel has that (`nft` asks it, and changes nothing); empty otherwise.
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

/// The pressure in force, for what asks on behalf of sandboxes.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicU8);

impl Gauge {
    pub fn get(&self) -> Pressure {
        match self.0.load(Ordering::Relaxed) {
            0 => Pressure::None,
            1 => Pressure::High,
            _ => Pressure::Full,
        }
    }

    pub fn set(&self, pressure: Pressure) {
        self.0.store(pressure as u8, Ordering::Relaxed);
    }
}

/// Watches the table of this thread's network namespace until it is dropped.
#[derive(Debug)]
pub(crate) struct Watcher {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watcher {
    /// Begins; `table` is the host's, with the chains of `limits`.
    pub fn start(table: String, limits: Limits, gauge: Arc<Gauge>) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    look(&table, limits, &gauge);
                }
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

fn look(table: &str, limits: Limits, gauge: &Gauge) {
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
        let mut pressure = Pressure::None;
        let mut at = |count| {
            pressure = pressure.after(count, 800);
            pressure
        };
        assert_eq!(at(399), Pressure::None);
        assert_eq!(at(400), Pressure::High);
        assert_eq!(at(300), Pressure::High);
        assert_eq!(at(299), Pressure::None);
        assert_eq!(at(600), Pressure::Full);
        assert_eq!(at(500), Pressure::Full);
        assert_eq!(at(499), Pressure::High);
        assert_eq!(at(10_000), Pressure::Full);
        assert_eq!(at(0), Pressure::None);
    }

    #[test]
    fn what_all_slots_of_a_host_may_have_under_full_pressure_fits_the_usual_table() {
        let tiers = |per_sandbox| {
            let total = None;
            Limits { per_sandbox, total }.tiers()
        };
        let usual = tiers(4096);
        assert_eq!(usual, [4096, 256, 16]);
        // The table of a host with 8 GiB or more, three quarters of three quarters of which were full before.
        let table = 262_144;
        assert!(table / 4 * 3 / 4 * 3 + 4096 * usual[2] < table);
        assert_eq!(tiers(64), [64, 8, 8]);
        assert_eq!(tiers(4), [4, 4, 4]);
    }
}
