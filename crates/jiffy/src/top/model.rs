//! State of `jiffy top` without input and output: rows, filter, order, selection and the open view.

use super::header::Header;
use super::row::{Row, Usage};
use super::text_view::TextView;
use crate::cli::SortColumn;
use jiffy_api_types::StateName;
use jiffy_client::terminal;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Maximum number of messages that are retained.
const MAX_MESSAGES: usize = 100;

/// Sandbox that a key applies to. A later change of the selection does not change the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Complete id.
    pub id: String,
    /// Name or start of the id, for messages.
    pub label: String,
}

/// Snapshot in the list for a rollback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotLine {
    /// Complete id.
    pub id: String,
    /// Description without control characters.
    pub text: String,
}

/// List of snapshots for a rollback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotList {
    /// Sandbox to roll back.
    pub target: Target,
    /// Snapshots, newest first. `None` until they are read.
    pub snapshots: Option<Vec<SnapshotLine>>,
    /// Index of the selected snapshot.
    pub selected: usize,
}

/// Meaning of the next key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Mode {
    /// The table is shown.
    #[default]
    Table,
    /// The filter is being edited. The value is the previous filter.
    Filter(String),
    /// The next key selects the command that is copied.
    Copy(Target),
    /// The kill of a sandbox waits for a confirmation.
    Kill(Target),
    /// A list of snapshots is shown.
    Snapshots(SnapshotList),
    /// A text is shown.
    Text(TextView),
}

/// Last line of the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Text without control characters.
    pub text: String,
    /// True for the failure of an operation.
    pub is_error: bool,
}

/// State of the program.
#[derive(Debug, Default)]
pub struct Model {
    /// Sandboxes by id.
    rows: BTreeMap<String, Row>,
    /// Ids of the rows that match the filter, in order.
    shown: Vec<String>,
    /// Numbers of rows by state.
    counts: Vec<(StateName, usize)>,
    /// True in a fleet: the column of the host is shown.
    has_hosts: bool,
    selected: Option<String>,
    /// Index of the first row on the screen.
    first: usize,
    /// Number of rows on the screen.
    page: usize,
    filter: String,
    sort: SortColumn,
    is_reversed: bool,
    /// Operations in flight by sandbox.
    operations: BTreeMap<String, &'static str>,
    messages: VecDeque<Message>,
    /// True if the newest message is shown.
    pub shows_message: bool,
    /// Error of the connection to the daemon. `None` while it answers.
    pub connection_error: Option<String>,
    pub header: Header,
    pub mode: Mode,
    /// True after the first list of sandboxes.
    pub is_loaded: bool,
}

impl Model {
    /// Creates the model with a filter and an order.
    pub fn new(filter: &str, sort: SortColumn, is_reversed: bool) -> Self {
        Self {
            filter: terminal::line(filter).into_owned(),
            sort,
            is_reversed,
            ..Self::default()
        }
    }

    /// Replaces all rows. Retains the usage of running sandboxes.
    pub fn replace(&mut self, rows: Vec<Row>) {
        let mut before = std::mem::take(&mut self.rows);
        for mut row in rows {
            row.usage = before.remove(&row.id).and_then(|old| old.usage);
            self.insert(row);
        }
        self.is_loaded = true;
        self.count_rows();
        self.arrange();
    }

    /// Changes rows. `None` removes a row.
    pub fn change(&mut self, changes: Vec<(String, Option<Row>)>) {
        for (id, row) in changes {
            let before = self.rows.remove(&id);
            if let Some(mut row) = row {
                row.usage = before.and_then(|old| old.usage);
                self.insert(row);
            }
        }
        self.count_rows();
        self.arrange();
    }

    /// Killed sandboxes have no row, and only running sandboxes have a usage.
    fn insert(&mut self, mut row: Row) {
        if row.state != StateName::Running {
            row.usage = None;
        }
        if row.state != StateName::Killed {
            self.rows.insert(row.id.clone(), row);
        }
    }

    /// Sets the usage of sandboxes.
    pub fn set_usage(&mut self, usage: &BTreeMap<String, Usage>) {
        for (id, usage) in usage {
            let row = self.rows.get_mut(id);
            if let Some(row) = row.filter(|row| row.state == StateName::Running) {
                row.usage = Some(*usage);
            }
        }
        if self.is_sorted_by_usage() {
            self.arrange();
        }
    }

    /// Filters and sorts the rows. If the selected row was removed, selects the row at its place.
    fn arrange(&mut self) {
        let index = self.selected_index().unwrap_or(0);
        let filter = self.filter.to_lowercase();
        let words: Vec<&str> = filter.split_whitespace().collect();
        let mut rows: Vec<&Row> = self.rows.values().filter(|r| r.matches(&words)).collect();
        let (sort, is_reversed) = (self.sort, self.is_reversed);
        // Rows with equal values are in the order of their ids, so that they do not change places.
        rows.sort_by(|a, b| {
            let order = a.compare(b, sort);
            let order = if is_reversed { order.reverse() } else { order };
            order.then_with(|| a.id.cmp(&b.id))
        });
        self.shown = rows.into_iter().map(|row| row.id.clone()).collect();
        if self.selected_index().is_none() {
            let index = index.min(self.shown.len().saturating_sub(1));
            self.selected = self.shown.get(index).cloned();
        }
        self.scroll();
    }

    fn selected_index(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.shown.iter().position(|id| id == selected)
    }

    /// Moves the first row on the screen so that the selected row is on the screen.
    fn scroll(&mut self) {
        let index = self.selected_index().unwrap_or(0);
        let lowest = (index + 1).saturating_sub(self.page.max(1));
        let last = self.shown.len().saturating_sub(self.page).max(lowest);
        self.first = self.first.clamp(lowest, index).min(last);
    }

    /// Sets the number of rows on the screen.
    pub fn set_page(&mut self, page: usize) {
        if self.page != page {
            self.page = page;
            self.scroll();
        }
    }

    /// Returns the number of rows on the screen.
    pub fn page(&self) -> usize {
        self.page
    }

    /// Returns the rows on the screen, each with a flag that is true for the selected row.
    pub fn visible(&self) -> impl Iterator<Item = (&Row, bool)> {
        self.rows_in(self.first..self.first.saturating_add(self.page))
    }

    /// Returns all rows that match the filter.
    pub fn all_shown(&self) -> impl Iterator<Item = (&Row, bool)> {
        self.rows_in(0..self.shown.len())
    }

    fn rows_in(&self, range: Range<usize>) -> impl Iterator<Item = (&Row, bool)> {
        let end = range.end.min(self.shown.len());
        let ids = &self.shown[range.start.min(end)..end];
        ids.iter().filter_map(move |id| {
            let is_selected = self.selected.as_ref() == Some(id);
            Some((self.rows.get(id)?, is_selected))
        })
    }

    /// Returns the number of rows that match the filter.
    pub fn shown_count(&self) -> usize {
        self.shown.len()
    }

    /// Returns the number of all rows.
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of sandboxes in a state.
    pub fn count_in(&self, state: StateName) -> usize {
        let mut counts = self.counts.iter();
        counts
            .find(|(s, _)| *s == state)
            .map_or(0, |(_, count)| *count)
    }

    /// Counts the rows, so that drawing does not visit all of them.
    fn count_rows(&mut self) {
        self.counts.clear();
        self.has_hosts = false;
        for row in self.rows.values() {
            self.has_hosts |= !row.host.is_empty();
            match self.counts.iter_mut().find(|(s, _)| *s == row.state) {
                Some((_, count)) => *count += 1,
                None => self.counts.push((row.state, 1)),
            }
        }
    }

    /// Returns whether a sandbox is on a named host.
    pub fn has_hosts(&self) -> bool {
        self.has_hosts
    }

    /// Returns the ids of all running sandboxes that match the filter.
    pub fn running(&self) -> Vec<String> {
        let running = self
            .all_shown()
            .filter(|(row, _)| row.state == StateName::Running);
        running.map(|(row, _)| row.id.clone()).collect()
    }

    /// Returns the ids of the running sandboxes on the screen.
    pub fn visible_running(&self) -> Vec<String> {
        let running = self
            .visible()
            .filter(|(row, _)| row.state == StateName::Running);
        running.map(|(row, _)| row.id.clone()).collect()
    }

    /// Returns whether the order depends on the usage of sandboxes that are not on the screen.
    pub fn is_sorted_by_usage(&self) -> bool {
        let sorted_by = self.sort;
        matches!(
            sorted_by,
            SortColumn::Cpu | SortColumn::Memory | SortColumn::Disk
        )
    }

    /// Returns the selected sandbox.
    pub fn target(&self) -> Option<Target> {
        let row = self.rows.get(self.selected.as_ref()?)?;
        Some(Target {
            id: row.id.clone(),
            label: row.label(),
        })
    }

    /// Selects the row that is `rows` below the selected row, or above if it is negative.
    pub fn select_by(&mut self, rows: isize) {
        let index = self.selected_index().unwrap_or(0);
        self.select(index.saturating_add_signed(rows));
    }

    /// Selects the row at an index, or the last row.
    pub fn select(&mut self, index: usize) {
        let index = index.min(self.shown.len().saturating_sub(1));
        self.selected = self.shown.get(index).cloned();
        self.scroll();
    }

    pub fn filter(&self) -> &str {
        &self.filter
    }

    pub fn set_filter(&mut self, filter: String) {
        self.filter = filter;
        self.arrange();
    }

    /// Returns the column of the order, and whether the order is reversed.
    pub fn sort(&self) -> (SortColumn, bool) {
        (self.sort, self.is_reversed)
    }

    /// Sorts by the next or previous column.
    pub fn sort_by_neighbour(&mut self, is_next: bool) {
        let has_hosts = self.has_hosts();
        let is_column = |column: &SortColumn| has_hosts || *column != SortColumn::Host;
        let columns: Vec<_> = SortColumn::ALL.into_iter().filter(is_column).collect();
        let index = columns.iter().position(|column| *column == self.sort);
        let (index, count) = (index.unwrap_or(0), columns.len());
        let step = if is_next { 1 } else { count - 1 };
        self.sort = columns[(index + step) % count];
        self.is_reversed = false;
        self.arrange();
    }

    pub fn reverse_sort(&mut self) {
        self.is_reversed = !self.is_reversed;
        self.arrange();
    }

    /// Sets or removes the operation of a sandbox.
    pub fn set_operation(&mut self, id: &str, operation: Option<&'static str>) {
        match operation {
            Some(operation) => self.operations.insert(id.to_owned(), operation),
            None => self.operations.remove(id),
        };
    }

    /// Returns the operation of a sandbox that is in flight.
    pub fn operation(&self, id: &str) -> Option<&'static str> {
        self.operations.get(id).copied()
    }

    /// Returns the number of operations in flight.
    pub fn operation_count(&self) -> usize {
        self.operations.len()
    }

    /// Shows a message until the next key.
    pub fn report(&mut self, text: &str, is_error: bool) {
        self.shows_message = true;
        let message = Message {
            text: terminal::line(text).into_owned(),
            is_error,
        };
        // A periodic read may fail repeatedly.
        if self.messages.back() == Some(&message) {
            return;
        }
        if self.messages.len() == MAX_MESSAGES {
            self.messages.pop_front();
        }
        self.messages.push_back(message);
    }

    /// Returns the message that is shown.
    pub fn message(&self) -> Option<&Message> {
        self.messages.back().filter(|_| self.shows_message)
    }

    /// Returns the retained messages, oldest first.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.messages.iter()
    }
}
