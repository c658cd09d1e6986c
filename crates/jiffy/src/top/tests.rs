//! Tests of the model: rows, keys and drawing, without a terminal.

mod control;
mod drawing;
mod rows;

use super::command_text::CommandText;
use super::control::{Effect, press};
use super::keys::KeyDecoder;
use super::model::Model;
use super::row::{Row, Usage};
use super::view;
use crate::cli::SortColumn;
use jiffy_api_types::SandboxInfo;
use jiffy_client::Listed;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Time of the drawings in milliseconds since 1970.
const NOW_MS: u64 = 1_800_000_000_000;

/// Returns the row of a list item with these changed fields.
fn row_of(id: &str, changes: Value, host: Option<&str>) -> Row {
    let mut record = json!({
        "id": id, "state": "running", "template": "base", "vcpus": 2, "memory_mib": 512,
        "disk_mib": 1024, "env": {}, "engine": "microvm", "terms": { "metadata": {} },
        "created_ms": NOW_MS - 60_000, "changed_ms": 1,
    });
    if let Value::Object(changes) = changes {
        record.as_object_mut().unwrap().extend(changes);
    }
    let item = json!({ "jiffy": record, "host": host });
    let item: Listed<SandboxInfo> = serde_json::from_value(item).unwrap();
    Row::new(&item)
}

/// Returns the row of a sandbox of a single host with these changed fields.
fn row(id: &str, changes: Value) -> Row {
    row_of(id, changes, None)
}

/// Returns the row of a sandbox with a name.
fn named(id: &str, name: &str) -> Row {
    row(id, json!({ "name": name }))
}

/// Returns a model of the table with these rows, ordered by name.
fn model(rows: Vec<Row>) -> Model {
    let mut model = Model::new("", SortColumn::Name, false);
    model.header.server = "alpha".to_owned();
    model.set_page(10);
    model.replace(rows);
    model
}

/// Returns rows of many sandboxes, alternately running and paused.
fn many(count: usize) -> Vec<Row> {
    let state = |n: usize| ["running", "paused"][n % 2];
    let one = |n| {
        let changes = json!({ "name": format!("web-{n:04}"), "state": state(n) });
        row(&format!("{n:020}"), changes)
    };
    (0..count).map(one).collect()
}

fn draw(model: &mut Model, width: u16, height: u16) -> Buffer {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    view::draw(model, &mut buffer, NOW_MS);
    buffer
}

fn screen(model: &mut Model, width: u16, height: u16) -> Vec<String> {
    let text = view::buffer_text(&draw(model, width, height));
    text.lines().map(str::to_owned).collect()
}

/// Returns the labels of all rows that match the filter, in order.
fn labels(model: &Model) -> Vec<String> {
    model.all_shown().map(|(row, _)| row.label()).collect()
}

fn selected(model: &Model) -> Option<String> {
    model.target().map(|target| target.label)
}

/// Sets the text of the open view.
fn set_text(model: &mut Model, lines: &[&str]) {
    let super::model::Mode::Text(view) = &mut model.mode else {
        panic!("{:?}", model.mode);
    };
    view.set_text(lines.iter().map(|&line| line.to_owned()));
}

/// Presses the keys of a terminal's input. Returns their effects. The inputs of some keys are `\r`
/// (return), `\u{1b}` (escape), `\u{7f}` (backspace) and `\u{15}` (Ctrl-U).
fn type_keys(model: &mut Model, input: &str) -> Vec<Effect> {
    let mut decoder = KeyDecoder::default();
    let mut keys = decoder.feed(input.as_bytes());
    keys.extend(decoder.flush());
    let commands = CommandText::default();
    keys.into_iter()
        .filter_map(|key| press(model, key, &commands))
        .collect()
}
