//! First line of the screen: the server, its sandboxes, and the resources of the host, of the hosts
//! of a fleet, or of the caller's key.
//!
//! A *warm pool* has guests that were started in advance.

use super::model::Model;
use jiffy_api_types::{Budget, FleetNode, Host, StateName};
use jiffy_client::terminal;
use jiffy_sandbox_manager::Bytes;
use std::fmt::Write as _;

/// Maximum number of hosts that are named.
const MAX_NAMED_HOSTS: usize = 8;

/// Source of the resources that the caller may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResourceSource {
    Fleet,
    Host,
    Key,
}

/// Resources that the caller may see.
#[derive(Debug, Default)]
pub enum Resources {
    /// Not read yet.
    #[default]
    Unknown,
    /// Resources of the host.
    Host(Box<Host>),
    /// Hosts of a fleet.
    Fleet(Vec<FleetNode>),
    /// Usage and limits of the caller's key, which may not see the host.
    Key(Box<Budget>),
}

impl Resources {
    /// Returns the source. `None` if the resources were not read.
    pub fn source(&self) -> Option<ResourceSource> {
        match self {
            Self::Unknown => None,
            Self::Host(_) => Some(ResourceSource::Host),
            Self::Fleet(_) => Some(ResourceSource::Fleet),
            Self::Key(_) => Some(ResourceSource::Key),
        }
    }
}

/// Server and resources.
#[derive(Debug, Default)]
pub struct Header {
    /// Name of the host, or URL of the server.
    pub server: String,
    pub resources: Resources,
}

/// Formats MiB.
fn mib(mib: u64) -> String {
    Bytes(mib.saturating_mul(1 << 20)).to_string()
}

/// Formats a used and a maximum value. `None` is no limit.
fn of(used: u64, limit: Option<u32>) -> String {
    limit.map_or_else(|| used.to_string(), |limit| format!("{used}/{limit}"))
}

impl Header {
    /// Returns the line, without control characters.
    pub fn text(&self, model: &Model) -> String {
        let mut text = format!("jiffy top  {}  ", self.server);
        let states = [
            StateName::Running,
            StateName::Paused,
            StateName::Broken,
            StateName::Creating,
        ];
        let mut separator = "";
        for state in states {
            let count = model.count_in(state);
            // Only the number of running sandboxes is shown if it is 0.
            if count > 0 || state == StateName::Running {
                let _ = write!(text, "{separator}{count} {}", state.name());
                separator = ", ";
            }
        }
        let resources = match &self.resources {
            Resources::Unknown => String::new(),
            Resources::Host(host) => host_text(host),
            Resources::Fleet(nodes) => fleet_text(nodes),
            Resources::Key(budget) => key_text(budget),
        };
        if !resources.is_empty() {
            let _ = write!(text, "  {resources}");
        }
        terminal::line(&text).into_owned()
    }
}

/// Returns the line about the host.
fn host_text(host: &Host) -> String {
    let mut parts = Vec::new();
    if let (Some(free), Some(total)) = (host.memory_available_mb, host.memory_total_mb) {
        parts.push(format!("memory {} of {} free", mib(free), mib(total)));
    }
    if let (Some(free), Some(total)) = (host.disk_free_mb, host.disk_total_mb) {
        parts.push(format!("disk {} of {} free", mib(free), mib(total)));
    }
    if host.warm > 0 {
        parts.push(format!("{} in warm pools", host.warm));
    }
    parts.push(format!("version {}", host.version));
    parts.join("  ")
}

/// Returns the line about the hosts of a fleet: states, running sandboxes and free memory.
fn fleet_text(nodes: &[FleetNode]) -> String {
    let members: Vec<&FleetNode> = nodes.iter().filter(|node| node.state != "left").collect();
    let mut text = format!("{} hosts:", members.len());
    for node in members.iter().take(MAX_NAMED_HOSTS) {
        let _ = write!(text, " {}", node.id);
        if node.state != "up" {
            let _ = write!(text, " ({})", node.state);
        }
        if let Some(running) = node.running {
            let _ = write!(text, " {running}");
        }
    }
    if members.len() > MAX_NAMED_HOSTS {
        text.push_str(" ...");
    }
    let free: Vec<u64> = nodes
        .iter()
        .filter_map(|node| node.free_memory_mib)
        .collect();
    if !free.is_empty() {
        let sum = free
            .iter()
            .fold(0u64, |sum, free| sum.saturating_add(*free));
        let _ = write!(text, "  memory {} free", mib(sum));
    }
    text
}

/// Returns the line about the limits of the caller's key.
fn key_text(budget: &Budget) -> String {
    let (used, limits) = (&budget.used, &budget.limits);
    let memory = limits
        .memory_mb
        .map(|limit| format!(" of {}", mib(limit.into())));
    format!(
        "key {}: {} sandboxes, {} CPUs, memory {}{}",
        budget.name,
        of(used.sandboxes, limits.sandboxes),
        of(used.vcpus, limits.vcpus),
        mib(used.memory_mb),
        memory.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    fn text(resources: Resources) -> String {
        let header = Header {
            server: "alpha".to_owned(),
            resources,
        };
        header.text(&Model::default())
    }

    #[test]
    fn the_header_shows_the_resources_that_the_caller_may_see() {
        let host: Host = from_value(json!({
            "version": "1.0", "pid": 1, "running": 0, "warm": 2, "network": "",
            "memoryTotalMB": 4096, "memoryAvailableMB": 1536, "memoryLimitMB": null,
            "diskTotalMB": 10240, "diskFreeMB": 2048,
        }))
        .unwrap();
        assert_eq!(
            text(Resources::Host(Box::new(host))),
            "jiffy top  alpha  0 running  memory 1.5 GiB of 4.0 GiB free  \
             disk 2.0 GiB of 10.0 GiB free  2 in warm pools  version 1.0"
        );
        let node = |id: &str, state: &str, running: Value| {
            from_value(json!({
                "id": id, "state": state, "running": running, "freeMemoryMib": running,
            }))
            .unwrap()
        };
        let nodes = vec![
            node("h1", "up", json!(1024)),
            node("h2", "dead", Value::Null),
            node("h3", "left", Value::Null),
        ];
        assert_eq!(
            text(Resources::Fleet(nodes)),
            "jiffy top  alpha  0 running  2 hosts: h1 1024 h2 (dead)  memory 1.0 GiB free"
        );
        let disk = json!({
            "paused": 0, "snapshots": 0, "templates": 0, "uploads": 0, "buildSteps": 0,
            "functions": 0,
        });
        let budget: Budget = from_value(json!({
            "keyID": "k", "name": "ci\u{1b}[2J",
            "limits": {
                "sandboxes": 10, "vcpus": null, "memoryMB": 2048, "createsPerMinute": null,
                "paused": null, "snapshots": null, "templates": null, "builds": null,
                "exchanges": null, "diskBytes": null,
            },
            "used": {
                "sandboxes": 3, "vcpus": 6, "memoryMB": 512, "paused": 0, "snapshots": 0,
                "templates": 0, "builds": 0, "uploads": 0, "exchanges": 0, "diskBytes": 0,
                "disk": disk,
            },
        }))
        .unwrap();
        assert_eq!(
            text(Resources::Key(Box::new(budget))),
            "jiffy top  alpha  0 running  key ci\\x1b[2J: 3/10 sandboxes, 6 CPUs, \
             memory 512.0 MiB of 2.0 GiB"
        );
    }
}
