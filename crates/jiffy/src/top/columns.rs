//! Columns of the table of `jiffy top`: contents and widths.

use super::model::Model;
use super::row::Row;
use crate::cli::SortColumn;
use crate::sandbox::table::{duration_text, mebibytes};
use jiffy_api_types::StateName;
use jiffy_sandbox_manager::Bytes;

/// Columns between two cells.
const GAP: u16 = 2;

/// Content of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    Id,
    Name,
    State,
    Host,
    Template,
    Engine,
    Cpu,
    Cpus,
    Memory,
    MemorySize,
    Disk,
    Sent,
    Received,
    Age,
    Expires,
}

/// Column on the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    pub content: Content,
    pub title: &'static str,
    /// Order by the values of this column. `None` if the table cannot be sorted by it.
    pub sort: Option<SortColumn>,
    pub is_right_aligned: bool,
    pub width: u16,
    /// Columns with the largest number are omitted first on a narrow screen.
    rank: u8,
}

/// Definition of a column: content, heading, order, alignment, minimum and maximum width, rank.
type Definition = (
    Content,
    &'static str,
    Option<SortColumn>,
    bool,
    u16,
    u16,
    u8,
);

/// All columns, from left to right. Of columns with equal ranks, the rightmost is omitted first.
const DEFINITIONS: [Definition; 15] = [
    (Content::Id, "ID", None, false, 8, 8, 0),
    (
        Content::Name,
        "NAME",
        Some(SortColumn::Name),
        false,
        6,
        28,
        2,
    ),
    (
        Content::State,
        "STATE",
        Some(SortColumn::State),
        false,
        8,
        8,
        1,
    ),
    (
        Content::Host,
        "HOST",
        Some(SortColumn::Host),
        false,
        5,
        8,
        6,
    ),
    (
        Content::Template,
        "TEMPLATE",
        Some(SortColumn::Template),
        false,
        9,
        28,
        7,
    ),
    (Content::Engine, "ENGINE", None, false, 7, 8, 11),
    (Content::Cpu, "CPU", Some(SortColumn::Cpu), true, 7, 7, 3),
    (Content::Cpus, "CPUS", None, true, 4, 4, 10),
    (
        Content::Memory,
        "MEMORY",
        Some(SortColumn::Memory),
        true,
        10,
        10,
        4,
    ),
    (Content::MemorySize, "OF", None, false, 8, 8, 9),
    (
        Content::Disk,
        "DISK",
        Some(SortColumn::Disk),
        true,
        10,
        10,
        8,
    ),
    (Content::Sent, "SENT", None, true, 10, 10, 12),
    (Content::Received, "RECEIVED", None, true, 10, 10, 13),
    (Content::Age, "AGE", Some(SortColumn::Age), true, 7, 7, 5),
    (
        Content::Expires,
        "EXPIRES",
        Some(SortColumn::Expires),
        true,
        8,
        8,
        7,
    ),
];

/// Returns the columns for a screen of this width. The texts in the visible rows determine the
/// width of names and templates.
pub fn columns(model: &Model, width: u16) -> Vec<Column> {
    let mut columns: Vec<Column> = DEFINITIONS
        .iter()
        .filter(|definition| definition.0 != Content::Host || model.has_hosts())
        .map(
            |&(content, title, sort, is_right_aligned, min, max, rank)| Column {
                content,
                title,
                sort,
                is_right_aligned,
                width: if min == max {
                    min
                } else {
                    text_width(model, content).clamp(min, max)
                },
                rank,
            },
        )
        .collect();
    // The first column is always shown.
    while columns.len() > 1 && total_width(&columns) > width {
        let last = columns.iter().map(|column| column.rank).max();
        let at = columns.iter().rposition(|column| Some(column.rank) == last);
        columns.remove(at.unwrap_or(columns.len() - 1));
    }
    columns
}

fn total_width(columns: &[Column]) -> u16 {
    columns
        .iter()
        .map(|column| column.width + GAP)
        .sum::<u16>()
        .saturating_sub(GAP)
}

/// Returns the number of characters of the longest visible text in a column of variable width.
fn text_width(model: &Model, content: Content) -> u16 {
    let widths = model.visible().map(|(row, _)| match content {
        Content::Name => row.name.chars().count(),
        Content::Template => row.template.chars().count(),
        Content::Host => row.host.chars().count(),
        _ => row.engine.chars().count(),
    });
    u16::try_from(widths.max().unwrap_or(0)).unwrap_or(u16::MAX)
}

impl Column {
    /// Returns the distance to the start of the next column.
    pub fn stride(&self) -> u16 {
        self.width + GAP
    }

    /// Returns the cell of a row. `operation` is its operation in flight, and `now_ms` the time in
    /// milliseconds since 1970.
    pub fn cell(&self, row: &Row, operation: Option<&'static str>, now_ms: u64) -> String {
        let usage = row.usage.as_ref();
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| Bytes(bytes).to_string());
        let network = usage.and_then(|usage| usage.network);
        let cell = match self.content {
            Content::Id => Some(row.short_id()),
            Content::Name => Some(row.name.clone()),
            Content::State => Some(operation.unwrap_or(row.state.name()).to_owned()),
            Content::Host => Some(row.host.clone()),
            Content::Template => Some(row.template.clone()),
            Content::Engine => Some(row.engine.clone()),
            Content::Cpu => usage.map(|usage| format!("{:.1} %", usage.cpu_percent)),
            Content::Cpus => Some(row.vcpus.to_string()),
            Content::Memory => bytes(usage.map(|usage| usage.memory)),
            Content::MemorySize => Some(mebibytes(row.memory_mib.into())),
            Content::Disk => bytes(usage.map(|usage| usage.disk)),
            Content::Sent => bytes(network.map(|(sent, _)| sent)),
            Content::Received => bytes(network.map(|(_, received)| received)),
            Content::Age => Some(duration_text(now_ms.saturating_sub(row.created_ms) / 1000)),
            Content::Expires => row
                .deadline_ms
                .filter(|_| row.state == StateName::Running)
                .map(|at| duration_text(at.saturating_sub(now_ms) / 1000)),
        };
        cell.filter(|cell| !cell.is_empty())
            .unwrap_or_else(|| "-".to_owned())
    }
}
