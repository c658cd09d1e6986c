//! Keys of `jiffy top` while a text is shown.

use super::command_text::CommandText;
use super::control::{Effect, copy, edited, rows};
use super::keys::Key;
use super::model::{Mode, Model};
use super::text_view::TextView;

/// Columns by which a text is moved to the left or right.
const HORIZONTAL_STEP: usize = 16;

/// Handles a key that is pressed while a text is shown.
pub fn press_in_text(
    model: &mut Model,
    mut view: TextView,
    key: &Key,
    commands: &CommandText,
) -> Option<Effect> {
    let mut effect = None;
    if std::mem::take(&mut view.is_copying) {
        effect = copy_from_text(model, &view, key, commands);
    } else if view.search.is_edited {
        edit_search(&mut view, key);
    } else {
        let page = rows(view.page());
        match key {
            Key::Escape if !view.search.text().is_empty() => view.set_search(""),
            Key::Escape | Key::Enter | Key::Char('q') => return None,
            Key::Up | Key::Char('k') => view.scroll_by(-1),
            Key::Down | Key::Char('j') => view.scroll_by(1),
            Key::PageUp | Key::Ctrl('b') => view.scroll_by(-page),
            Key::PageDown | Key::Ctrl('f') | Key::Char(' ') => view.scroll_by(page),
            Key::Home | Key::Char('g') => view.scroll_by(isize::MIN),
            Key::End | Key::Char('G') => view.scroll_by(isize::MAX),
            Key::Left => view.left = view.left.saturating_sub(HORIZONTAL_STEP),
            Key::Right => {
                view.left = view.left.saturating_add(HORIZONTAL_STEP).min(view.width());
            }
            Key::Char('/') => view.search.is_edited = true,
            Key::Char('n') => view.select_neighbour(true),
            Key::Char('N') => view.select_neighbour(false),
            Key::Char('y') => view.is_copying = true,
            _ => {}
        }
    }
    model.mode = Mode::Text(view);
    effect
}

/// Edits the searched text, which is searched at each key. Escape ends the search.
fn edit_search(view: &mut TextView, key: &Key) {
    match key {
        Key::Enter => view.search.is_edited = false,
        Key::Escape => {
            view.search.is_edited = false;
            view.set_search("");
        }
        key => {
            if let Some(text) = edited(view.search.text(), key) {
                view.set_search(&text);
            }
        }
    }
}

/// Copies the whole text, or the command that a key selects.
fn copy_from_text(
    model: &mut Model,
    view: &TextView,
    key: &Key,
    commands: &CommandText,
) -> Option<Effect> {
    match (key, view.source.target(), view.text()) {
        (Key::Char('y'), _, Some(text)) => Some(Effect::CopyText(text.to_vec())),
        (Key::Char('y'), _, None) | (_, None, _) => {
            model.report("nothing was copied", false);
            None
        }
        (key, Some(target), _) => copy(model, target, key, commands),
    }
}
