//! Prints tables on a terminal. Each column is as wide as its longest cell.

use jiffy_client::terminal::line;
use std::fmt::Write as _;

/// Spaces between two columns.
const COLUMN_GAP: usize = 2;

/// Alignment of the cells in a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// Table with a heading.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table without rows.
    pub fn new<const N: usize>(columns: [(&'static str, Align); N]) -> Self {
        Self {
            columns: columns.into(),
            rows: Vec::new(),
        }
    }

    /// Adds a row with a cell for each column. Empty cells are printed as `-`, and control
    /// characters are escaped.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        let shown = cells.map(|cell| {
            if cell.is_empty() {
                "-".to_owned()
            } else {
                line(&cell).into_owned()
            }
        });
        self.rows.push(shown.into());
    }

    /// Removes the column with heading `name`.
    pub fn remove_column(&mut self, name: &str) {
        let Some(at) = self.columns.iter().position(|column| column.0 == name) else {
            return;
        };
        self.columns.remove(at);
        for row in &mut self.rows {
            row.remove(at);
        }
    }

    /// Returns the text of the table. Each line ends with a line feed.
    pub fn text(&self) -> String {
        let names = self.columns.iter().map(|(name, _)| (*name).to_owned());
        let head: Vec<String> = names.collect();
        let lines = || std::iter::once(&head).chain(&self.rows);
        let width = |at: usize| {
            let cells = lines().filter_map(|line| line.get(at));
            // Characters that occupy two columns are not supported.
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        for line in lines() {
            let mut shown = String::new();
            for ((cell, width), (_, align)) in line.iter().zip(&widths).zip(&self.columns) {
                if !shown.is_empty() {
                    shown.push_str(&" ".repeat(COLUMN_GAP));
                }
                // Writing to a String does not fail.
                let _ = match align {
                    Align::Left => write!(shown, "{cell:<width$}"),
                    Align::Right => write!(shown, "{cell:>width$}"),
                };
            }
            // The last column has no padding.
            text.push_str(shown.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_lines_without_control_characters() {
        let mut table = Table::new([("NAME", Align::Left), ("SIZE", Align::Right)]);
        table.row(["a\n\u{1b}[2J".into(), "1".into()]);
        assert_eq!(table.text(), "NAME        SIZE\na\\n\\x1b[2J     1\n");
    }

    #[test]
    fn columns_are_as_wide_as_their_longest_cell() {
        let mut table = Table::new([("NAME", Align::Left), ("SIZE", Align::Right)]);
        table.row(["a".into(), "12 MiB".into()]);
        table.row(["größer".into(), String::new()]);
        assert_eq!(
            table.text(),
            "NAME      SIZE\n\
             a       12 MiB\n\
             größer       -\n"
        );
    }
}
