//! Rules of new slots: compiled by `nft` once, recorded, and replayed in each further slot.

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
    /// In the language of `nft`.
    script: String,
    recording: Mutex<Recording>,
}

/// Recording of the rules.
#[derive(Debug, Clone)]
enum Recording {
    /// No slot has the rules yet.
    Awaited,
    /// That of the first slot.
    Made {
        ruleset: Arc<RecordedRuleset>,
        /// The ruleset of a slot where it was replayed is the same.
        proven: bool,
    },
    /// This kernel's rulesets cannot be replayed.
    Useless,
}

impl SlotRules {
    /// Rules of slots with the policy `usual`, at most so many connections, and a log of refusals.
    pub fn new(usual: &EgressPolicy, connections: u32, logs_refusals: bool) -> Self {
        let script = script(logs_refusals, connections) + &usual.script(connections, logs_refusals);
        Self {
            script,
            recording: Mutex::new(Recording::Awaited),
        }
    }

    /// Puts them in force in the network namespace of this thread, which has no rules yet.
    pub fn apply(&self) -> Result<(), NetError> {
        let recording = self.recording.lock().clone();
        match recording {
            Recording::Awaited => {
                program::nft(&self.script)?;
                self.record();
                Ok(())
            }
            Recording::Made { ruleset, proven } => match replay(&ruleset, proven) {
                Ok(()) => {
                    if let Recording::Made { proven, .. } = &mut *self.recording.lock() {
                        *proven = true;
                    }
                    Ok(())
                }
                Err(why) => {
                    self.give_up(&why);
                    program::nft(&format!("flush ruleset\n{}", self.script))
                }
            },
            Recording::Useless => program::nft(&self.script),
        }
    }

    fn record(&self) {
        match RecordedRuleset::read(RulesetScope::Everything) {
            Ok(ruleset) => {
                let ruleset = Arc::new(ruleset);
                let proven = false;
                *self.recording.lock() = Recording::Made { ruleset, proven };
            }
            Err(e) => self.give_up(&e.to_string()),
        }
    }

    fn give_up(&self, why: &str) {
        tracing::warn!(
            "rules of network slots cannot be replayed here, so `nft` is run for each slot: {why}"
        );
        *self.recording.lock() = Recording::Useless;
    }
}

/// Rules of every slot, whatever its policy: packets from the guest's interface must have its own
/// addresses; of the namespace itself they reach DNS only, and the kernel does not track that:
/// every question would be an entry in a table for a while.
fn script(logs_refusals: bool, connections: u32) -> String {
    let mac = guest::text(MAC);
    let [http, tls] = PROXY_PORTS;
    let tell = match logs_refusals {
        true => format!(
            "    iifname \"{TAP}\" {}\n",
            statement(RefusalReason::Rules)
        ),
        false => String::new(),
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
    # Answers to the daemon's own connections.
    iifname "{TAP}" ct direction reply ct state established accept
    iifname "{TAP}" ct state new ct count over {connections} drop
    iifname "{TAP}" ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 accept
    iifname "{TAP}" ip daddr {GATEWAY} icmp type echo-request accept
    iifname "{TAP}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    iifname "{TAP}" ct status dnat tcp dport {{ {http}, {tls} }} accept
    iifname "{UPLINK}" ct state established accept
{tell}    iifname "{TAP}" meta l4proto tcp reject with tcp reset
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

fn replay(ruleset: &RecordedRuleset, proven: bool) -> Result<(), String> {
    ruleset.apply(None).map_err(|e| e.to_string())?;
    if proven {
        return Ok(());
    }
    let there = RecordedRuleset::read(RulesetScope::Everything).map_err(|e| e.to_string())?;
    match there == *ruleset {
        true => Ok(()),
        false => Err("the rules that are in force then are others".to_owned()),
    }
}

#[cfg(test)]
#[path = "slot_rules_tests.rs"]
mod tests;
