//! Tests of keys.

use super::*;
use crate::top::control::Operation;
use crate::top::model::{Mode, SnapshotLine, Target};

fn target(id: &str, label: &str) -> Target {
    Target {
        id: id.to_owned(),
        label: label.to_owned(),
    }
}

#[test]
fn the_filter_is_edited_at_the_last_line_and_removed_by_escape() {
    let mut model = model(vec![named("a", "web"), named("b", "db")]);
    assert_eq!(type_keys(&mut model, "/wex\u{7f}"), []);
    let lines = screen(&mut model, 80, 10);
    assert_eq!(lines[9], "/we");
    assert_eq!(labels(&model), ["web"]);
    // Keys of the table are text while the filter is edited.
    type_keys(&mut model, "Kq");
    assert_eq!(model.filter(), "weKq");
    // Ctrl-U removes the text.
    type_keys(&mut model, "\u{15}db\r");
    assert_eq!(
        (labels(&model), &model.mode),
        (vec!["db".to_owned()], &Mode::Table)
    );
    assert!(screen(&mut model, 80, 10)[9].starts_with("filter `db`: 1 of 2"));
    type_keys(&mut model, "\u{1b}");
    assert_eq!(labels(&model), ["db", "web"]);
    // Escape while editing restores the previous filter.
    type_keys(&mut model, "/x\u{1b}");
    assert_eq!(labels(&model), ["db", "web"]);
}

#[test]
fn keys_request_the_operations_of_the_selected_sandbox() {
    for (key, operation) in [
        ("p", Operation::Pause),
        ("r", Operation::Resume),
        ("f", Operation::Fork),
        ("S", Operation::Snapshot),
    ] {
        let mut model = model(vec![named("a", "web")]);
        let expected = Effect::Operate(operation.clone(), target("a", "web"));
        assert_eq!(type_keys(&mut model, key), [expected], "{key}");
        let lines = screen(&mut model, 100, 6);
        assert!(lines[2].contains(operation.progress()), "{lines:?}");
        // A second operation waits for the first one.
        assert_eq!(type_keys(&mut model, "p"), []);
        assert!(model.message().is_some_and(|message| message.is_error));
        model.set_operation("a", None);
        assert_eq!(type_keys(&mut model, "p").len(), 1);
    }
    let mut model = model(vec![named("a", "web")]);
    assert_eq!(
        type_keys(&mut model, "s"),
        [Effect::Shell(target("a", "web"))]
    );
    assert_eq!(type_keys(&mut model, "l"), [Effect::ReadText]);
    assert_eq!(type_keys(&mut model, "q"), []);
    assert_eq!(type_keys(&mut model, "q"), [Effect::Quit]);
    assert_eq!(type_keys(&mut model, "\u{3}"), [Effect::Quit]);
}

#[test]
fn a_kill_needs_a_confirmation_and_concerns_the_sandbox_of_the_key() {
    let mut model = model(vec![named("a", "one"), named("b", "two")]);
    assert_eq!(type_keys(&mut model, "K"), []);
    assert!(screen(&mut model, 100, 6)[5].starts_with("Kill one?"));
    for key in ["\r", "n", "\u{1b}", "K", "q", "\u{1b}[200~y\u{1b}[201~"] {
        model.mode = Mode::Table;
        assert_eq!(type_keys(&mut model, &format!("K{key}")), [], "{key:?}");
        assert_eq!(model.mode, Mode::Table, "{key:?}");
    }
    // The selection moves while the question is shown.
    type_keys(&mut model, "K");
    model.change(vec![("a".to_owned(), None)]);
    assert_eq!(selected(&model).as_deref(), Some("two"));
    let expected = Effect::Operate(Operation::Kill, target("a", "one"));
    assert_eq!(type_keys(&mut model, "y"), [expected]);
}

#[test]
fn pasted_text_executes_no_keys() {
    let mut model = model(vec![named("a", "web")]);
    assert_eq!(type_keys(&mut model, "\u{1b}[200~pKyq\u{1b}[201~"), []);
    assert_eq!(model.mode, Mode::Table);
    // A pasted filter is one line.
    type_keys(&mut model, "/\u{1b}[200~we\nb\u{1b}[201~");
    assert_eq!(model.filter(), "we\\nb");
}

#[test]
fn a_rollback_restores_the_selected_snapshot() {
    let mut model = model(vec![named("a", "web")]);
    let web = target("a", "web");
    assert_eq!(
        type_keys(&mut model, "b"),
        [Effect::ReadSnapshots(web.clone())]
    );
    // No snapshot can be selected before the list is read.
    assert_eq!(type_keys(&mut model, "\r"), []);
    let Mode::Snapshots(list) = &mut model.mode else {
        panic!("{:?}", model.mode);
    };
    let line = |id: &str| SnapshotLine {
        id: id.to_owned(),
        text: format!("snapshot {id}"),
    };
    list.snapshots = Some(vec![line("s2"), line("s1")]);
    let mut copied = type_keys(&mut model, "jjy");
    assert_eq!(
        copied.pop(),
        Some(Effect::Copy("jiffy rollback a s1".to_owned()))
    );
    type_keys(&mut model, "b");
    let Mode::Snapshots(list) = &mut model.mode else {
        panic!("{:?}", model.mode);
    };
    list.snapshots = Some(vec![line("s2"), line("s1")]);
    assert!(screen(&mut model, 60, 8)[3].contains("snapshot s1"));
    let expected = Effect::Operate(Operation::Rollback("s1".to_owned()), web);
    assert_eq!(type_keys(&mut model, "j\r"), [expected]);
    assert_eq!(model.mode, Mode::Table);
}

#[test]
fn commands_are_copied_by_the_key_of_their_action() {
    for (keys, text) in [
        ("yy", "a"),
        ("ys", "jiffy shell a"),
        ("yp", "jiffy pause a"),
        ("yK", "jiffy kill a"),
        ("y\r", "jiffy inspect a"),
    ] {
        let mut model = model(vec![named("a", "web")]);
        let copied = type_keys(&mut model, keys);
        assert_eq!(copied, [Effect::Copy(text.to_owned())], "{keys:?}");
    }
    let mut model = model(vec![named("a", "web")]);
    assert_eq!(type_keys(&mut model, "yx"), []);
    assert_eq!(model.mode, Mode::Table);
}

#[test]
fn a_text_is_searched_in_any_case_and_in_both_directions() {
    let mut model = model(vec![named("a", "web")]);
    type_keys(&mut model, "l");
    set_text(&mut model, &["one", "Error: a", "two", "error: b", "three"]);
    screen(&mut model, 80, 10);
    assert_eq!(type_keys(&mut model, "/ERR"), []);
    assert_eq!(screen(&mut model, 80, 10)[9], "2 found  /ERR");
    for (key, expected) in [
        ("\r", "/ERR: 1 of 2  "),
        ("n", "/ERR: 2 of 2  "),
        ("n", "/ERR: 1 of 2  "),
        ("N", "/ERR: 2 of 2  "),
        // The searched text is edited further.
        ("/: a\r", "/ERR: a: not found  "),
        ("/\u{15}ROR: a\r", "/ROR: a: 1 of 1  "),
        // Escape ends the search, and then closes the text.
        ("\u{1b}", "/ search"),
        ("/x\u{1b}", "/ search"),
    ] {
        assert_eq!(type_keys(&mut model, key), []);
        let line = screen(&mut model, 80, 10).swap_remove(9);
        assert!(line.starts_with(expected), "{key:?}: {line}");
    }
    type_keys(&mut model, "\u{1b}");
    assert_eq!(model.mode, Mode::Table);
}

#[test]
fn a_text_and_the_commands_of_its_sandbox_are_copied() {
    let mut model = model(vec![named("a", "web")]);
    let logs = Effect::Copy("jiffy logs a".to_owned());
    assert_eq!(type_keys(&mut model, "lyl"), [Effect::ReadText, logs]);
    // The text is not read yet.
    assert_eq!(type_keys(&mut model, "yy"), []);
    set_text(&mut model, &["one", "two"]);
    let text = Effect::CopyText(vec!["one".to_owned(), "two".to_owned()]);
    assert_eq!(type_keys(&mut model, "yy"), [text]);
    let inspect = Effect::Copy("jiffy inspect a".to_owned());
    assert_eq!(type_keys(&mut model, "y\r"), [inspect]);
    // Escape cancels the copy, and the text remains open.
    assert_eq!(type_keys(&mut model, "y\u{1b}"), []);
    assert!(matches!(model.mode, Mode::Text(_)));
    // The description of the keys has no sandbox.
    assert_eq!(type_keys(&mut model, "q?yl"), [Effect::ReadText]);
    set_text(&mut model, &["keys"]);
    let text = Effect::CopyText(vec!["keys".to_owned()]);
    assert_eq!(type_keys(&mut model, "yy"), [text]);
}
