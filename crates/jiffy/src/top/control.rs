//! Keys of `jiffy top`: each key changes the model, or causes an effect that needs input and
//! output.

use super::command_text::CommandText;
use super::keys::Key;
use super::model::{Mode, Model, SnapshotList, Target};
use super::text_control::press_in_text;
use super::text_view::{TextSource, TextView};
use jiffy_client::terminal;

/// Maximum number of operations in flight.
const MAX_OPERATIONS: usize = 16;
/// Maximum length of a filter or a searched text in bytes.
const MAX_FILTER_BYTES: usize = 256;

/// Commands that `y` copies, by key.
const COPY_KEYS: &str = "s shell  l logs  Enter inspect  p pause  r resume  f fork  S snapshot  \
    b snapshots  K kill";

/// Operation on a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    Pause,
    Resume,
    Fork,
    Snapshot,
    /// Rollback to the snapshot with this id.
    Rollback(String),
    Kill,
}

impl Operation {
    /// Returns the text in the column of the state while the operation is in flight.
    pub fn progress(&self) -> &'static str {
        match self {
            Self::Pause => "pausing",
            Self::Resume => "resuming",
            Self::Fork => "forking",
            Self::Snapshot => "storing",
            Self::Rollback(_) => "rollback",
            Self::Kill => "killing",
        }
    }

    /// Returns the words of the equivalent command.
    pub fn words<'a>(&'a self, id: &'a str) -> Vec<&'a str> {
        match self {
            Self::Pause => vec!["pause", id],
            Self::Resume => vec!["resume", id],
            Self::Fork => vec!["fork", id],
            Self::Snapshot => vec!["snapshot", id],
            Self::Rollback(snapshot) => vec!["rollback", id, snapshot],
            Self::Kill => vec!["kill", id],
        }
    }
}

/// Effect of a key outside the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    Quit,
    /// Draws the whole screen again.
    Redraw,
    /// Executes an operation.
    Operate(Operation, Target),
    /// Reads the text of the open view.
    ReadText,
    /// Reads the snapshots of a sandbox for the open list.
    ReadSnapshots(Target),
    /// Opens a shell in a sandbox.
    Shell(Target),
    /// Copies a text to the clipboard of the terminal.
    Copy(String),
    /// Copies a text of several lines.
    CopyText(Vec<String>),
}

/// Applies a key to the model. Returns its effect.
pub fn press(model: &mut Model, key: Key, commands: &CommandText) -> Option<Effect> {
    if key == Key::Ctrl('c') {
        return Some(Effect::Quit);
    }
    if key == Key::Ctrl('l') {
        return Some(Effect::Redraw);
    }
    model.shows_message = false;
    // Sets the mode of the table. The functions below restore or change the mode.
    match std::mem::take(&mut model.mode) {
        Mode::Table => press_in_table(model, &key),
        Mode::Filter(before) => {
            press_in_filter(model, before, &key);
            None
        }
        Mode::Copy(target) => copy(model, &target, &key, commands),
        Mode::Kill(target) => match key {
            Key::Char('y' | 'Y') => operate(model, Operation::Kill, target),
            _ => {
                model.report(&format!("{} was not killed", target.label), false);
                None
            }
        },
        Mode::Snapshots(list) => press_in_snapshots(model, list, &key, commands),
        Mode::Text(view) => press_in_text(model, view, &key, commands),
    }
}

/// Returns the question or the list of keys for the last line.
pub fn prompt(mode: &Mode) -> Option<String> {
    match mode {
        Mode::Copy(_) => Some(format!("Copy the command: {COPY_KEYS}  y id")),
        Mode::Text(view) if view.is_copying => Some(match view.source.target() {
            Some(_) => format!("Copy: y the text, or the command: {COPY_KEYS}"),
            None => "Copy: y the text".to_owned(),
        }),
        Mode::Kill(target) => Some(format!(
            "Kill {}? Its memory and disk are lost. y: kill  any other key: cancel",
            target.label
        )),
        Mode::Snapshots(_) => Some(
            "Enter: roll back; later changes are lost  y: copy the command  Esc: cancel".to_owned(),
        ),
        Mode::Table | Mode::Filter(_) | Mode::Text(_) => None,
    }
}

/// Returns a number of rows for scrolling.
pub fn rows(count: usize) -> isize {
    isize::try_from(count.max(1)).unwrap_or(isize::MAX)
}

/// Handles a key that is pressed while the table is shown.
fn press_in_table(model: &mut Model, key: &Key) -> Option<Effect> {
    let page = rows(model.page());
    match key {
        Key::Char('q') => return Some(Effect::Quit),
        Key::Up | Key::Char('k') => model.select_by(-1),
        Key::Down | Key::Char('j') => model.select_by(1),
        Key::PageUp | Key::Ctrl('b') => model.select_by(-page),
        Key::PageDown | Key::Ctrl('f') => model.select_by(page),
        Key::Home | Key::Char('g') => model.select(0),
        Key::End | Key::Char('G') => model.select(usize::MAX),
        Key::Left | Key::Char('<') => model.sort_by_neighbour(false),
        Key::Right | Key::Char('>') => model.sort_by_neighbour(true),
        Key::Char('o') => model.reverse_sort(),
        Key::Char('/') => model.mode = Mode::Filter(model.filter().to_owned()),
        Key::Escape => model.set_filter(String::new()),
        Key::Char('e') => return open_text(model, TextSource::Messages),
        Key::Char('?' | 'h') => return open_text(model, TextSource::Help),
        key => return press_for_target(model, key),
    }
    None
}

/// Applies a key that concerns the selected sandbox.
fn press_for_target(model: &mut Model, key: &Key) -> Option<Effect> {
    let is_for_target = matches!(
        key,
        Key::Enter | Key::Char('s' | 'l' | 'p' | 'r' | 'f' | 'S' | 'b' | 'K' | 'y')
    );
    if !is_for_target {
        return None;
    }
    let Some(target) = model.target() else {
        model.report("no sandbox is selected", true);
        return None;
    };
    let operation = match key {
        Key::Char('p') => Operation::Pause,
        Key::Char('r') => Operation::Resume,
        Key::Char('f') => Operation::Fork,
        Key::Char('S') => Operation::Snapshot,
        Key::Char('s') => return Some(Effect::Shell(target)),
        Key::Char('l') => return open_text(model, TextSource::Log(target)),
        Key::Char('b') => {
            model.mode = Mode::Snapshots(SnapshotList {
                target: target.clone(),
                snapshots: None,
                selected: 0,
            });
            return Some(Effect::ReadSnapshots(target));
        }
        Key::Char('K') => {
            model.mode = Mode::Kill(target);
            return None;
        }
        Key::Char('y') => {
            model.mode = Mode::Copy(target);
            return None;
        }
        _ => return open_text(model, TextSource::Details(target)),
    };
    operate(model, operation, target)
}

/// Returns the effect of an operation, unless the sandbox is busy or the limit is reached.
fn operate(model: &mut Model, operation: Operation, target: Target) -> Option<Effect> {
    if let Some(other) = model.operation(&target.id) {
        let text = format!("{} is busy ({other}): wait until it is done", target.label);
        model.report(&text, true);
        return None;
    }
    if model.operation_count() >= MAX_OPERATIONS {
        let text = format!("{MAX_OPERATIONS} operations are in flight: wait until one is done");
        model.report(&text, true);
        return None;
    }
    model.set_operation(&target.id, Some(operation.progress()));
    Some(Effect::Operate(operation, target))
}

fn open_text(model: &mut Model, source: TextSource) -> Option<Effect> {
    model.mode = Mode::Text(TextView::new(source));
    Some(Effect::ReadText)
}

/// Edits the filter, which is applied at each key. `before` is the previous filter, which Escape
/// restores.
fn press_in_filter(model: &mut Model, before: String, key: &Key) {
    match key {
        // `press` has set the mode of the table, which remains.
        Key::Enter => return,
        Key::Escape => {
            model.set_filter(before);
            return;
        }
        _ => {}
    }
    if let Some(filter) = edited(model.filter(), key) {
        model.set_filter(filter);
    }
    model.mode = Mode::Filter(before);
}

/// Returns an edited line after a key. `None` if the line would be too long.
pub fn edited(line: &str, key: &Key) -> Option<String> {
    let mut line = line.to_owned();
    match key {
        Key::Char(c) => line.push(*c),
        Key::Paste(text) => line.push_str(&terminal::line(text)),
        Key::Backspace => {
            line.pop();
        }
        Key::Ctrl('u') => line.clear(),
        Key::Ctrl('w') => {
            let words = line.trim_end();
            let end = words
                .rfind(char::is_whitespace)
                .map_or(0, |space| space + 1);
            line.truncate(end);
        }
        _ => {}
    }
    (line.len() <= MAX_FILTER_BYTES).then(|| terminal::line(&line).into_owned())
}

/// Copies the command that a key selects.
pub fn copy(
    model: &mut Model,
    target: &Target,
    key: &Key,
    commands: &CommandText,
) -> Option<Effect> {
    let id = &*target.id;
    let words = match key {
        Key::Char('y') => return Some(Effect::Copy(id.to_owned())),
        Key::Char('s') => vec!["shell", id],
        Key::Char('l') => vec!["logs", id],
        Key::Char('p') => Operation::Pause.words(id),
        Key::Char('r') => Operation::Resume.words(id),
        Key::Char('f') => Operation::Fork.words(id),
        Key::Char('S') => Operation::Snapshot.words(id),
        Key::Char('b') => vec!["snapshots", id],
        Key::Char('K') => Operation::Kill.words(id),
        Key::Enter => vec!["inspect", id],
        _ => {
            model.report("nothing was copied", false);
            return None;
        }
    };
    Some(Effect::Copy(commands.line(&words)))
}

/// Handles a key in the list of snapshots, from which the user selects the target of a rollback.
fn press_in_snapshots(
    model: &mut Model,
    mut list: SnapshotList,
    key: &Key,
    commands: &CommandText,
) -> Option<Effect> {
    let all = list.snapshots.as_deref().unwrap_or_default();
    let last = all.len().saturating_sub(1);
    let selected = all.get(list.selected).map(|snapshot| snapshot.id.clone());
    match (key, selected) {
        (Key::Escape | Key::Char('q'), _) => return None,
        (Key::Enter, Some(snapshot)) => {
            return operate(model, Operation::Rollback(snapshot), list.target);
        }
        (Key::Char('y'), Some(snapshot)) => {
            let words = Operation::Rollback(snapshot);
            return Some(Effect::Copy(commands.line(&words.words(&list.target.id))));
        }
        (Key::Up | Key::Char('k'), _) => list.selected = list.selected.saturating_sub(1),
        (Key::Down | Key::Char('j'), _) => list.selected = (list.selected + 1).min(last),
        (Key::Home | Key::Char('g'), _) => list.selected = 0,
        (Key::End | Key::Char('G'), _) => list.selected = last,
        _ => {}
    }
    model.mode = Mode::Snapshots(list);
    None
}
