//! Row of the table of `jiffy top`: a sandbox and its usage. All texts are free of control
//! characters.

use crate::cli::SortColumn;
use jiffy_api_types::{Metric, SandboxInfo, StateName};
use jiffy_client::{Listed, terminal};
use std::cmp::{Ordering, Reverse};
use std::fmt::Write as _;

/// Maximum number of characters of a text. Longer texts are cut.
const MAX_TEXT: usize = 256;
/// Number of characters of an id that are shown.
const SHORT_ID_LENGTH: usize = 8;

/// Usage of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// Usage of all processors together, in percent.
    pub cpu_percent: f64,
    /// Used memory in bytes.
    pub memory: u64,
    /// Written disk in bytes.
    pub disk: u64,
    /// Sent and received bytes. `None` without a network.
    pub network: Option<(u64, u64)>,
}

impl From<&Metric> for Usage {
    fn from(metric: &Metric) -> Self {
        Self {
            cpu_percent: metric.cpu_used_pct,
            memory: metric.mem_used,
            disk: metric.disk_used,
            network: metric.net_bytes_out.zip(metric.net_bytes_in),
        }
    }
}

/// Sandbox as the table shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Id for calls of the API. Not escaped.
    pub id: String,
    /// Name. Empty without a name.
    pub name: String,
    pub state: StateName,
    /// Host of the fleet. Empty without a fleet.
    pub host: String,
    pub template: String,
    pub engine: String,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub created_ms: u64,
    /// Timeout of a running sandbox in milliseconds since 1970.
    pub deadline_ms: Option<u64>,
    /// Usage. `None` if the sandbox does not run, or before the first sample.
    pub usage: Option<Usage>,
    /// Texts that a filter searches, in lower case, one per line.
    searched: String,
}

/// Escapes and cuts a text.
fn shown(text: &str) -> String {
    let end = text
        .char_indices()
        .nth(MAX_TEXT)
        .map_or(text.len(), |c| c.0);
    terminal::line(&text[..end]).into_owned()
}

/// Returns the start of an id. A server may send an id that is not ASCII text.
pub fn short_id(id: &str) -> String {
    shown(id).chars().take(SHORT_ID_LENGTH).collect()
}

impl Row {
    /// Creates the row of a sandbox without its usage.
    pub fn new(listed: &Listed<SandboxInfo>) -> Self {
        let info = &listed.record;
        let mut row = Self {
            id: info.id.clone(),
            name: shown(info.name.as_deref().unwrap_or_default()),
            state: info.state.kind(),
            host: shown(listed.host.as_deref().unwrap_or_default()),
            template: shown(&info.template),
            engine: shown(info.engine.as_deref().unwrap_or_default()),
            vcpus: info.size.vcpus,
            memory_mib: info.size.memory_mib,
            created_ms: info.created_ms,
            deadline_ms: info
                .deadline_ms
                .filter(|_| info.state.kind() == StateName::Running),
            usage: None,
            searched: String::new(),
        };
        let mut searched = format!(
            "{}\n{}\n{}\n{}\n{}\n",
            row.name,
            row.state.name(),
            row.host,
            row.template,
            row.engine
        );
        for (key, value) in &info.settings.metadata {
            // Writing to a string cannot fail.
            let _ = writeln!(searched, "{}={}", shown(key), shown(value));
        }
        row.searched = searched.to_lowercase();
        row
    }

    /// Returns the name, or the start of the id of a sandbox without a name.
    pub fn label(&self) -> String {
        if self.name.is_empty() {
            self.short_id()
        } else {
            self.name.clone()
        }
    }

    /// Returns the start of the id.
    pub fn short_id(&self) -> String {
        short_id(&self.id)
    }

    /// Returns whether the row matches all words, which are in lower case.
    pub fn matches(&self, words: &[&str]) -> bool {
        words
            .iter()
            .all(|word| self.searched.contains(word) || self.id.starts_with(word))
    }

    /// Compares the values of a column. Rows without a value are last.
    pub fn compare(&self, other: &Self, column: SortColumn) -> Ordering {
        let text = |of: fn(&Self) -> &String| {
            let key = |row| (of(row).is_empty(), of(row).to_lowercase());
            key(self).cmp(&key(other))
        };
        let usage = |of: fn(&Usage) -> u64| {
            let key = |row: &Self| Reverse(row.usage.as_ref().map(of));
            key(self).cmp(&key(other))
        };
        match column {
            SortColumn::Name => text(|row| &row.name),
            SortColumn::State => self.state.name().cmp(other.state.name()),
            SortColumn::Host => text(|row| &row.host),
            SortColumn::Template => text(|row| &row.template),
            SortColumn::Cpu => {
                let key = |row: &Self| row.usage.map_or(-1.0, |usage| usage.cpu_percent);
                key(other).total_cmp(&key(self))
            }
            SortColumn::Memory => usage(|usage| usage.memory),
            SortColumn::Disk => usage(|usage| usage.disk),
            SortColumn::Age => other.created_ms.cmp(&self.created_ms),
            SortColumn::Expires => {
                let key = |row: &Self| row.deadline_ms.unwrap_or(u64::MAX);
                key(self).cmp(&key(other))
            }
        }
    }
}
