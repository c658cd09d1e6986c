//! Text that is shown instead of the table, for example the console of a sandbox.

use super::model::Target;
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
}

/// Text with a position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextView {
    pub source: TextSource,
    /// Lines without control characters. `None` until they are read.
    lines: Option<Vec<String>>,
    /// Index of the first line on the screen. `None` while the end of the text is followed.
    first: Option<usize>,
    /// Number of lines on the screen.
    page: usize,
    /// Column of the text at the left edge of the screen.
    pub left: usize,
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
            lines: None,
            first,
            page: 1,
            left: 0,
        }
    }

    /// Replaces the text. Control characters are escaped, and tabs are replaced by spaces.
    pub fn set_text(&mut self, lines: impl IntoIterator<Item = String>) {
        let escaped = |line: String| terminal::line(&line.replace('\t', "    ")).into_owned();
        let mut lines: Vec<String> = lines.into_iter().map(escaped).collect();
        lines.drain(..lines.len().saturating_sub(MAX_LINES));
        self.lines = Some(lines);
    }

    /// Returns whether the text was read.
    pub fn is_loaded(&self) -> bool {
        self.lines.is_some()
    }

    /// Returns the number of lines.
    pub fn line_count(&self) -> usize {
        self.lines.as_ref().map_or(0, Vec::len)
    }

    /// Returns the number of characters of the longest line.
    pub fn width(&self) -> usize {
        let lines = self.lines.as_deref().unwrap_or_default();
        lines
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

    /// Sets the number of lines on the screen.
    pub fn set_page(&mut self, page: usize) {
        self.page = page;
    }

    /// Returns the number of lines on the screen.
    pub fn page(&self) -> usize {
        self.page
    }

    /// Returns the lines on the screen.
    pub fn visible(&self) -> &[String] {
        let lines = self.lines.as_deref().unwrap_or_default();
        let end = self.first().saturating_add(self.page).min(lines.len());
        &lines[self.first().min(end)..end]
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
