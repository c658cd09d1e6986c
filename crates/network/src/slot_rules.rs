//! Packet filter rules of new slots. The program `nft` compiles them once, in the first slot. The
//! result is recorded, and replayed over netlink in further slots, which is faster.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::NetError;
use crate::connections::statement;
use crate::guest::{self, ADDRESS, ADDRESS6, GATEWAY, MAC};
use crate::policy::EgressPolicy;
use crate::program;
use crate::ruleset::{RecordedRuleset, RulesetScope};
use crate::slot_layout::{PROXY_PORTS, TAP, UPLINK};
use jiffy_engine_api::RefusalReason;
use parking_lot::Mutex;
use std::sync::Arc;

/// Rules of new slots.
#[derive(Debug)]
pub(crate) struct SlotRules {
    /// Script in the language of `nft`.
    script: String,
    recording: Mutex<Recording>,
}

/// Recording of the rules.
#[derive(Debug, Clone)]
enum Recording {
    /// The rules were not applied to a slot yet.
    Pending,
    /// Recording of the first slot.
    Recorded {
        ruleset: Arc<RecordedRuleset>,
        /// True if a replayed ruleset was compared with the recording.
        is_verified: bool,
    },
    /// This kernel's rulesets cannot be replayed.
    Unsupported,
}

impl SlotRules {
    /// Creates the rules of slots with the policy `default_policy` and at most `connections`
    /// connections. Rejected packets are logged if `logs_refusals`.
    pub fn new(default_policy: &EgressPolicy, connections: u32, logs_refusals: bool) -> Self {
        let script =
            script(logs_refusals, connections) + &default_policy.script(connections, logs_refusals);
        Self {
            script,
            recording: Mutex::new(Recording::Pending),
        }
    }

    /// Applies the rules in the network namespace of this thread, which has no rules yet.
    pub fn apply(&self) -> Result<(), NetError> {
        let recording = self.recording.lock().clone();
        match recording {
            Recording::Pending => {
                program::nft(&self.script)?;
                self.record();
                Ok(())
            }
            Recording::Recorded {
                ruleset,
                is_verified,
            } => match replay(&ruleset, is_verified) {
                Ok(()) => {
                    // Another thread may have disabled replaying meanwhile.
                    if let Recording::Recorded { is_verified, .. } = &mut *self.recording.lock() {
                        *is_verified = true;
                    }
                    Ok(())
                }
                Err(why) => {
                    // The replay may have succeeded with different rules, so the script removes all
                    // rules first.
                    self.disable(&why);
                    program::nft(&format!("flush ruleset\n{}", self.script))
                }
            },
            Recording::Unsupported => program::nft(&self.script),
        }
    }

    /// Reads the rules that `nft` has created for the first slot, to replay them for later slots.
    /// The recorded rules are verified at the first replay.
    fn record(&self) {
        match RecordedRuleset::read(RulesetScope::Everything) {
            Ok(ruleset) => {
                let ruleset = Arc::new(ruleset);
                let is_verified = false;
                *self.recording.lock() = Recording::Recorded {
                    ruleset,
                    is_verified,
                };
            }
            Err(e) => self.disable(&e.to_string()),
        }
    }

    /// Falls back to `nft` for all further slots, because the kernel did not accept a replayed
    /// ruleset.
    fn disable(&self, why: &str) {
        tracing::warn!(
            error = why,
            "cannot replay the rules of network slots: `nft` is run for each slot"
        );
        *self.recording.lock() = Recording::Unsupported;
    }
}

/// Returns the rules of every slot, independently of its policy. Packets from the guest's interface
/// must have the guest's addresses. In the namespace itself, the guest reaches only the DNS server
/// and, for redirected connections, the proxy. The gateway also answers pings and IPv6 neighbour
/// discovery. DNS questions over UDP and pings are not tracked: each would occupy an entry in a
/// connection tracking table for a while.
fn script(logs_refusals: bool, connections: u32) -> String {
    let mac = guest::mac_text(MAC);
    let [http, tls] = PROXY_PORTS;
    let log = if logs_refusals {
        format!(
            "    iifname \"{TAP}\" {}\n",
            statement(RefusalReason::Rules)
        )
    } else {
        String::new()
    };
    format!(
        r#"table netdev jiffy_guard {{
  chain guest {{
    type filter hook ingress device "{TAP}" priority 0; policy drop;
    ether saddr != {mac} drop
    ether type arp arp saddr ether {mac} arp saddr ip {ADDRESS} accept
    ether type ip ip saddr {ADDRESS} accept
    ether type ip6 ip6 saddr {ADDRESS6} accept
  }}
}}
table inet jiffy_slot {{
  chain untracked {{
    type filter hook prerouting priority raw;
    iifname "{TAP}" ip daddr {GATEWAY} udp dport 53 notrack
    iifname "{TAP}" ip daddr {GATEWAY} icmp type echo-request notrack
  }}
  chain untracked_back {{
    type filter hook output priority raw;
    oifname "{TAP}" ip saddr {GATEWAY} udp sport 53 notrack
    oifname "{TAP}" ip saddr {GATEWAY} icmp type echo-reply notrack
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    # Replies to the daemon's own connections.
    iifname "{TAP}" ct direction reply ct state established accept
    iifname "{TAP}" ct state new ct count over {connections} drop
    iifname "{TAP}" ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 accept
    iifname "{TAP}" ip daddr {GATEWAY} icmp type echo-request accept
    iifname "{TAP}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    iifname "{TAP}" ct status dnat tcp dport {{ {http}, {tls} }} accept
    iifname "{UPLINK}" ct state established accept
{log}    iifname "{TAP}" meta l4proto tcp reject with tcp reset
    iifname "{TAP}" reject with icmpx type admin-prohibited
  }}
  chain clamp {{
    type filter hook forward priority mangle;
    tcp flags syn tcp option maxseg size set rt mtu
  }}
  chain leave {{
    type nat hook postrouting priority srcnat;
    oifname "{UPLINK}" masquerade
  }}
}}
"#
    )
}

/// Replays a recording in the network namespace of this thread. Unless `is_verified`, reads the
/// rules back and compares them.
fn replay(ruleset: &RecordedRuleset, is_verified: bool) -> Result<(), String> {
    ruleset.apply(None).map_err(|e| e.to_string())?;
    if is_verified {
        return Ok(());
    }
    let replayed = RecordedRuleset::read(RulesetScope::Everything).map_err(|e| e.to_string())?;
    if replayed == *ruleset {
        Ok(())
    } else {
        Err("the replayed rules differ from the recorded ones".to_owned())
    }
}

#[cfg(test)]
#[path = "slot_rules_tests.rs"]
mod tests;
