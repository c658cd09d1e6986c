//! Draws the model of `jiffy top` into a buffer of cells.
//!
//! The model contains all state of the screen. Drawing changes only the size of the screen in the
//! model and in its open view.

use super::columns::{Column, columns};
use super::control::prompt;
use super::model::{Mode, Model, SnapshotList};
use super::row::Row;
use super::text_search::TextSearch;
use super::text_view::TextView;
use crate::cli::SortColumn;
use jiffy_api_types::StateName;
use ratatui::buffer::Buffer;
use ratatui::layout::{Position, Rect};
use ratatui::style::{Color, Modifier, Style};

/// Lines above the rows: the header and the headings.
const HEAD_LINES: u16 = 2;
/// Keys in the last line of the table.
const KEYS: &str = "/ filter  <> sort  Enter details  s shell  l log  p pause  r resume  f fork  \
    S snapshot  b rollback  K kill  y copy  ? help  q quit";
/// Keys in the last line of a text.
const TEXT_KEYS: &str =
    "/ search  y copy  Up Down PgUp PgDn Home End Left Right: scroll  Esc: back";
/// Keys in the last line of a text with a search.
const SEARCH_KEYS: &str = "n N: next, previous  / edit  y copy  Esc: end the search";

const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
/// Searched text outside the selected line.
const FOUND: Style = Style::new()
    .add_modifier(Modifier::BOLD)
    .add_modifier(Modifier::UNDERLINED);

/// Part of a buffer. Text outside this area is not drawn.
struct Canvas<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
}

impl Canvas<'_> {
    /// Draws a text at a position of the area, with at most `width` columns. Returns the column
    /// after the text.
    fn text(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) -> u16 {
        if x >= self.area.width || y >= self.area.height {
            return x;
        }
        let width = width.min(self.area.width - x);
        let (left, top) = (self.area.x + x, self.area.y + y);
        let end = self
            .buffer
            .set_stringn(left, top, text, width.into(), style);
        end.0 - self.area.x
    }

    fn line(&mut self, y: u16, text: &str, style: Style) -> u16 {
        self.text(0, y, u16::MAX, text, style)
    }

    /// Sets the style of a whole line.
    fn style(&mut self, y: u16, style: Style) {
        if y < self.area.height {
            let line = Rect::new(self.area.x, self.area.y + y, self.area.width, 1);
            self.buffer.set_style(line, style);
        }
    }
}

/// Lines of the last part of the screen.
struct Footer {
    lines: Vec<String>,
    style: Style,
    /// True if the cursor is after the last character.
    has_cursor: bool,
}

/// Draws the model. Returns the position of the cursor, if it is shown. `now_ms` is the time in
/// milliseconds since 1970.
pub fn draw(model: &mut Model, buffer: &mut Buffer, now_ms: u64) -> Option<Position> {
    let area = *buffer.area();
    let footer = footer(model, area);
    let footer_height = u16::try_from(footer.lines.len())
        .unwrap_or(0)
        .min(area.height);
    let body_height = area.height - footer_height;
    let page = usize::from(body_height.saturating_sub(HEAD_LINES));
    model.set_page(page);
    let header = model.header.text(model);
    // The open view is taken from the model while it is drawn: `draw_text` changes the view, and
    // `draw_table` borrows the model.
    let mut mode = std::mem::take(&mut model.mode);
    let mut canvas = Canvas {
        buffer,
        area: Rect {
            height: body_height,
            ..area
        },
    };
    canvas.line(0, &header, BOLD);
    match &mut mode {
        Mode::Text(view) => draw_text(&mut canvas, view, page),
        Mode::Snapshots(list) => draw_snapshots(&mut canvas, list, page),
        _ => draw_table(&mut canvas, model, now_ms),
    }
    model.mode = mode;
    canvas.area = area;
    let mut end = 0;
    for (y, line) in (body_height..).zip(&footer.lines) {
        end = canvas.line(y, line, footer.style);
    }
    let x = end.min(area.width.saturating_sub(1));
    let cursor = Position::new(area.x + x, area.bottom().saturating_sub(1));
    (footer.has_cursor && !area.is_empty()).then_some(cursor)
}

/// Returns all rows as text of at most `width` columns, for output that is not a terminal.
pub fn text(model: &mut Model, width: u16, now_ms: u64) -> String {
    // All rows determine the widths of the columns.
    model.set_page(model.shown_count());
    let columns = columns(model, width);
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, 1));
    let mut line = |draw: &dyn Fn(&mut Canvas<'_>)| {
        buffer.reset();
        let area = *buffer.area();
        draw(&mut Canvas {
            buffer: &mut buffer,
            area,
        });
        buffer_text(&buffer)
    };
    let header = model.header.text(model);
    let mut text = line(&|canvas| {
        canvas.line(0, &header, Style::new());
    });
    text += &line(&|canvas| draw_headings(canvas, 0, &columns, model.sort()));
    for (row, _) in model.all_shown() {
        text += &line(&|canvas| draw_row(canvas, 0, &columns, row, None, now_ms));
    }
    text
}

/// Returns the lines of a buffer without their styles and trailing spaces.
pub fn buffer_text(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area().width).max(1);
    let mut text = String::new();
    for line in buffer.content().chunks(width) {
        // A wide character is followed by cells that contain a space.
        let symbols: String = line.iter().map(|cell| cell.symbol()).collect();
        text += symbols.trim_end();
        text.push('\n');
    }
    text
}

/// Draws the table of sandboxes.
fn draw_table(canvas: &mut Canvas<'_>, model: &Model, now_ms: u64) {
    let columns = columns(model, canvas.area.width);
    draw_headings(canvas, 1, &columns, model.sort());
    canvas.style(1, Style::new().add_modifier(Modifier::UNDERLINED));
    for (y, (row, is_selected)) in (HEAD_LINES..).zip(model.visible()) {
        draw_row(canvas, y, &columns, row, model.operation(&row.id), now_ms);
        if is_selected {
            canvas.style(y, REVERSED);
        }
    }
    if model.shown_count() == 0 {
        let text = match (model.is_loaded, model.count()) {
            (false, _) => "reading the sandboxes ...".to_owned(),
            (true, 0) => "no sandboxes; create one with `jiffy create`".to_owned(),
            (true, count) => format!("no match for `{}` in {count} sandboxes", model.filter()),
        };
        canvas.line(HEAD_LINES, &text, DIM);
    }
}

/// Draws the headings. A mark shows the column of the order, and whether the order is reversed.
fn draw_headings(
    canvas: &mut Canvas<'_>,
    y: u16,
    columns: &[Column],
    (sort, is_reversed): (SortColumn, bool),
) {
    let mut x = 0;
    for column in columns {
        let mark = match (column.sort == Some(sort), is_reversed) {
            (false, _) => "",
            (true, false) => "*",
            (true, true) => "^",
        };
        let title = format!("{}{mark}", column.title);
        cell(canvas, x, y, column, &title, Style::new());
        x += column.stride();
    }
}

/// Draws the row of a sandbox.
fn draw_row(
    canvas: &mut Canvas<'_>,
    y: u16,
    columns: &[Column],
    row: &Row,
    operation: Option<&'static str>,
    now_ms: u64,
) {
    let mut x = 0;
    for column in columns {
        let style = match column.sort {
            Some(SortColumn::State) => state_style(row.state, operation.is_some()),
            _ => Style::new(),
        };
        let text = column.cell(row, operation, now_ms);
        cell(canvas, x, y, column, &text, style);
        x += column.stride();
    }
}

fn state_style(state: StateName, is_busy: bool) -> Style {
    let color = match state {
        _ if is_busy => Color::Cyan,
        StateName::Running => Color::Green,
        StateName::Paused => Color::Yellow,
        StateName::Broken | StateName::Killed => Color::Red,
        StateName::Creating => Color::Cyan,
    };
    Style::new().fg(color)
}

/// Draws a cell of the table.
fn cell(canvas: &mut Canvas<'_>, x: u16, y: u16, column: &Column, text: &str, style: Style) {
    let length = u16::try_from(text.chars().count()).unwrap_or(u16::MAX);
    let free = column.width.saturating_sub(length);
    let indent = if column.is_right_aligned { free } else { 0 };
    canvas.text(x + indent, y, column.width - indent, text, style);
}

/// Draws a text that can be scrolled.
fn draw_text(canvas: &mut Canvas<'_>, view: &mut TextView, page: usize) {
    view.set_size(page, canvas.area.width.into());
    let title = view.source.title();
    let position = match view.line_count() {
        0 => String::new(),
        count => format!("  line {} of {count}", view.first() + 1),
    };
    canvas.line(1, &format!("{title}{position}"), Style::new());
    canvas.style(1, Style::new().add_modifier(Modifier::UNDERLINED));
    if !view.is_loaded() {
        canvas.line(HEAD_LINES, "reading ...", DIM);
    }
    for (y, (index, line)) in (HEAD_LINES..).zip((view.first()..).zip(view.visible())) {
        let start = offset(line, view.left);
        let is_selected = view.search.selected() == Some(index);
        draw_text_line(canvas, y, &line[start..], &view.search, is_selected);
    }
}

/// Returns the offset in bytes of the character with an index, or the length of the line.
fn offset(line: &str, index: usize) -> usize {
    line.char_indices().nth(index).map_or(line.len(), |c| c.0)
}

/// Draws a line of a text, and marks the searched text.
fn draw_text_line(
    canvas: &mut Canvas<'_>,
    y: u16,
    line: &str,
    search: &TextSearch,
    is_selected: bool,
) {
    if search.text().is_empty() {
        canvas.line(y, line, Style::new());
        return;
    }
    // The rest is not on the screen. Each search reads the whole line.
    let mut rest = &line[..offset(line, canvas.area.width.into())];
    let style = if is_selected { REVERSED } else { FOUND };
    let mut x = 0;
    while let Some(found) = search.find(rest) {
        x = canvas.text(x, y, u16::MAX, &rest[..found.start], Style::new());
        x = canvas.text(x, y, u16::MAX, &rest[found.start..found.end], style);
        rest = &rest[found.end..];
    }
    canvas.text(x, y, u16::MAX, rest, Style::new());
}

/// Draws the list of snapshots to which a sandbox can be rolled back.
fn draw_snapshots(canvas: &mut Canvas<'_>, list: &SnapshotList, page: usize) {
    let title = format!("Roll back {} to a snapshot", list.target.label);
    canvas.line(1, &title, Style::new());
    canvas.style(1, Style::new().add_modifier(Modifier::UNDERLINED));
    let Some(snapshots) = &list.snapshots else {
        canvas.line(HEAD_LINES, "reading ...", DIM);
        return;
    };
    if snapshots.is_empty() {
        let text = format!("{} has no snapshots; take one with S", list.target.label);
        canvas.line(HEAD_LINES, &text, DIM);
    }
    let first = (list.selected + 1).saturating_sub(page);
    let visible = snapshots.iter().enumerate().skip(first).take(page);
    for (y, (index, snapshot)) in (HEAD_LINES..).zip(visible) {
        canvas.line(y, &snapshot.text, Style::new());
        if index == list.selected {
            canvas.style(y, REVERSED);
        }
    }
}

/// Returns the last part of the screen: a question, the filter, a message or the keys.
fn footer(model: &Model, area: Rect) -> Footer {
    let error = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
    let (text, style) = if let Some(prompt) = prompt(&model.mode) {
        (prompt, BOLD)
    } else if let Some(line) = edited_line(model) {
        return Footer {
            lines: vec![line],
            style: BOLD,
            has_cursor: true,
        };
    } else if let Some(message) = model.message() {
        let style = if message.is_error { error } else { BOLD };
        (message.text.clone(), style)
    } else if let Some(message) = &model.connection_error {
        (format!("{message}; retrying"), error)
    } else if let Mode::Text(view) = &model.mode {
        (text_keys(view), DIM)
    } else if model.filter().is_empty() {
        (KEYS.to_owned(), DIM)
    } else {
        let (shown, all) = (model.shown_count(), model.count());
        let filter = model.filter();
        (
            format!("filter `{filter}`: {shown} of {all}  Esc: remove the filter  {KEYS}"),
            DIM,
        )
    };
    // Messages and questions are shown completely if half of the screen suffices. Lists of keys,
    // which are dim, use one line.
    let lines = if style == DIM {
        vec![text]
    } else {
        wrapped(&text, area.width, usize::from(area.height / 2).max(1))
    };
    Footer {
        lines,
        style,
        has_cursor: false,
    }
}

/// Returns the line that the user edits: the filter or a searched text.
fn edited_line(model: &Model) -> Option<String> {
    match &model.mode {
        Mode::Filter(_) => Some(format!("/{}", model.filter())),
        Mode::Text(view) if view.search.is_edited => {
            let (count, _) = view.matches();
            Some(format!("{count} found  /{}", view.search.text()))
        }
        _ => None,
    }
}

/// Returns the keys for the last line of a text. If a text is searched, they follow the number of
/// lines that contain it.
fn text_keys(view: &TextView) -> String {
    let search = view.search.text();
    if search.is_empty() {
        return TEXT_KEYS.to_owned();
    }
    match view.matches() {
        (0, _) => format!("/{search}: not found  {SEARCH_KEYS}"),
        (count, Some(position)) => format!("/{search}: {position} of {count}  {SEARCH_KEYS}"),
        (count, None) => format!("/{search}: {count} found  {SEARCH_KEYS}"),
    }
}

/// Splits a text into lines of at most `width` characters, at spaces where possible. If the text
/// needs more lines than `max`, the last one names the key that shows the whole text.
pub fn wrapped(text: &str, width: u16, max: usize) -> Vec<String> {
    const MORE: &str = " ... (e: all)";
    let width = usize::from(width).max(1);
    let mut lines = Vec::new();
    let mut rest = text.trim_end();
    loop {
        let end = rest.char_indices().nth(width).map(|c| c.0);
        let Some(end) = end else {
            lines.push(rest.to_owned());
            return lines;
        };
        if lines.len() + 1 == max {
            let space = width.saturating_sub(MORE.len());
            let start: String = rest.chars().take(space).collect();
            lines.push(format!("{start}{MORE}"));
            return lines;
        }
        let split = rest[..end].rfind(' ').filter(|&at| at > 0).unwrap_or(end);
        lines.push(rest[..split].to_owned());
        rest = rest[split..].trim_start();
    }
}
