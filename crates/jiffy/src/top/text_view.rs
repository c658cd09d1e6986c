//! Text that is shown instead of the table, for example the console of a sandbox.

use super::model::Target;
use super::text_search::TextSearch;
use super::view::wrapped;
use jiffy_client::terminal;

/// Maximum number of lines. Earlier lines are removed.
const MAX_LINES: usize = 10_000;

/// Content of a text view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextSource {
    /// Details of a sandbox. They are read periodically.
    Details(Target),
    /// Console of a sandbox. It is read periodically.
    Log(Target),
    /// Messages of this program.
    Messages,
    /// Description of the keys.
    Help,
}

impl TextSource {
    /// Returns the title of the view.
    pub fn title(&self) -> String {
        match self {
            Self::Details(target) => format!("Details of {}", target.label),
            Self::Log(target) => format!("Console of {}", target.label),
            Self::Messages => "Messages".to_owned(),
            Self::Help => "Keys".to_owned(),
        }
    }

    /// Returns the sandbox that the text describes.
    pub fn target(&self) -> Option<&Target> {
        match self {
            Self::Details(target) | Self::Log(target) => Some(target),
            Self::Messages | Self::Help => None,
        }
    }

    /// Returns whether long lines are wrapped, for example errors. Other texts are moved to the
    /// left and right.
    fn is_wrapped(&self) -> bool {
        matches!(self, Self::Details(_) | Self::Messages)
    }
}

/// Text with a position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextView {
    pub source: TextSource,
    /// Text without control characters. `None` until it is read.
    text: Option<Vec<String>>,
    /// Lines on a screen of the current width.
    lines: Vec<String>,
    /// Index of the first line on the screen. `None` while the end of the text is followed.
    first: Option<usize>,
    /// Number of lines on the screen.
    page: usize,
    /// Number of columns of the screen. 0 until the view is drawn.
    columns: usize,
    /// Column of the text at the left edge of the screen.
    pub left: usize,
    pub search: TextSearch,
    /// True if the next key selects the text that is copied.
    pub is_copying: bool,
}

impl TextView {
    /// Creates a view whose text is not read yet. A console is shown from its end.
    pub fn new(source: TextSource) -> Self {
        let first = match source {
            TextSource::Log(_) | TextSource::Messages => None,
            _ => Some(0),
        };
        Self {
            source,
            text: None,
            lines: Vec::new(),
            first,
            page: 1,
            columns: 0,
            left: 0,
            search: TextSearch::default(),
            is_copying: false,
        }
    }

    /// Replaces the text. Control characters are escaped, and tabs are replaced by spaces.
    pub fn set_text(&mut self, lines: impl IntoIterator<Item = String>) {
        let escaped = |line: String| terminal::line(&line.replace('\t', "    ")).into_owned();
        let mut lines: Vec<String> = lines.into_iter().map(escaped).collect();
        lines.drain(..lines.len().saturating_sub(MAX_LINES));
        self.text = Some(lines);
        self.arrange();
    }

    /// Divides the text into lines of the screen.
    fn arrange(&mut self) {
        let text = self.text.as_deref().unwrap_or_default();
        let mut lines: Vec<String> = if self.source.is_wrapped() && self.columns > 0 {
            let width = u16::try_from(self.columns).unwrap_or(u16::MAX);
            let lines = text.iter().map(|line| wrapped(line, width, usize::MAX));
            lines.flatten().collect()
        } else {
            text.to_vec()
        };
        lines.drain(..lines.len().saturating_sub(MAX_LINES));
        self.lines = lines;
    }

    /// Returns whether the text was read.
    pub fn is_loaded(&self) -> bool {
        self.text.is_some()
    }

    /// Returns the text, which is independent of the size of the screen. `None` until it is read.
    pub fn text(&self) -> Option<&[String]> {
        self.text.as_deref()
    }

    /// Returns the number of lines.
    pub fn line_count(&self) -> usize {
        self.lines.len()
    }

    /// Returns the number of characters of the longest line.
    pub fn width(&self) -> usize {
        self.lines
            .iter()
            .map(|line| line.chars().count())
            .max()
            .unwrap_or(0)
    }

    fn last_first(&self) -> usize {
        self.line_count().saturating_sub(self.page)
    }

    /// Returns the index of the first line on the screen.
    pub fn first(&self) -> usize {
        let last = self.last_first();
        self.first.map_or(last, |first| first.min(last))
    }

    /// Sets the numbers of lines and columns on the screen.
    pub fn set_size(&mut self, page: usize, columns: usize) {
        self.page = page;
        if self.columns != columns {
            self.columns = columns;
            self.arrange();
        }
    }

    /// Returns the number of lines on the screen.
    pub fn page(&self) -> usize {
        self.page
    }

    /// Returns the lines on the screen.
    pub fn visible(&self) -> &[String] {
        let lines = &self.lines;
        let end = self.first().saturating_add(self.page).min(lines.len());
        &lines[self.first().min(end)..end]
    }

    /// Searches a text, and selects the first line with it from the selected line on, or from the
    /// first line on the screen.
    pub fn set_search(&mut self, text: &str) {
        let start = self.search.selected().unwrap_or(self.first());
        self.search.set_text(text);
        self.select(start, true);
    }

    /// Selects the next or previous line with the searched text. The last line is followed by the
    /// first line.
    pub fn select_neighbour(&mut self, is_next: bool) {
        let count = self.line_count().max(1);
        let start = match self.search.selected() {
            Some(line) if is_next => line + 1,
            Some(line) => line + count - 1,
            None => self.first(),
        };
        self.select(start % count, is_next);
    }

    /// Selects the first line with the searched text from a line on, and moves the screen to it.
    fn select(&mut self, start: usize, is_forward: bool) {
        let Some((line, column)) = self.search.select(&self.lines, start, is_forward) else {
            return;
        };
        let first = self.first();
        let is_visible = (first..first.saturating_add(self.page)).contains(&line);
        // Further lines of a console do not move the line.
        self.first = Some(if is_visible {
            first
        } else {
            line.saturating_sub(self.page / 2)
        });
        let end = column + self.search.text().chars().count();
        if column < self.left || end > self.left.saturating_add(self.columns) {
            self.left = column.saturating_sub(self.columns / 2);
        }
    }

    /// Returns the number of lines with the searched text, and the position of the selected line
    /// among them, from 1.
    pub fn matches(&self) -> (usize, Option<usize>) {
        self.search.count(&self.lines)
    }

    /// Scrolls down by lines, or up if the number is negative. At the end of a console, follows
    /// further lines.
    pub fn scroll_by(&mut self, lines: isize) {
        let first = self
            .first()
            .saturating_add_signed(lines)
            .min(self.last_first());
        let is_end = first == self.last_first();
        let is_followed = is_end && matches!(self.source, TextSource::Log(_));
        self.first = (!is_followed).then_some(first);
    }
}
