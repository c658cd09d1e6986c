//! Tests of the screen.

use super::*;
use jiffy_api_types::StateName;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Modifier;

#[test]
fn hostile_names_neither_control_the_terminal_nor_change_other_cells() {
    let hostile = "a\u{1b}[2J\u{9b}1;1Hb\r\nc\u{202e}d\u{7}\u{200f}";
    let changes = json!({
        "name": hostile, "template": hostile, "engine": hostile,
        "terms": { "metadata": { hostile: hostile } },
    });
    let mut model = model(vec![
        row_of("h\u{1b}[2J", changes, Some(hostile)),
        named("x", "zeta"),
    ]);
    model.header.server = hostile.to_owned();
    let is_hostile =
        |c: char| c.is_control() || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}');
    // Each input closes the open view and opens the next one. The views are the table, the details,
    // the question before a kill, the filter `\u`, the filtered table, the keys for copying, and
    // the snapshots.
    for input in ["", "\r", "\u{1b}K", "x/\\u", "\r", "y", "xb"] {
        type_keys(&mut model, input);
        model.report(hostile, true);
        for (width, height) in [(200, 20), (40, 8)] {
            let buffer = draw(&mut model, width, height);
            for cell in buffer.content() {
                assert!(!cell.symbol().contains(is_hostile), "{input:?} {cell:?}");
            }
        }
    }
    let mut model = Model::new("", SortColumn::Name, false);
    model.replace(vec![named("h", hostile), named("x", "zeta")]);
    let lines = screen(&mut model, 120, 8);
    assert!(
        lines[2].contains("a\\x1b[2J\\u{9b}1;1Hb\\r\\nc"),
        "{lines:?}"
    );
    assert!(lines[3].contains("zeta"), "{lines:?}");
}

#[test]
fn very_long_texts_are_cut() {
    let long = "x".repeat(1 << 20);
    let changes = json!({
        "name": long, "template": long,
        "terms": { "metadata": { "k": long } },
    });
    let row = row("a", changes);
    assert!(format!("{row:?}").len() < 4096);
    let mut model = model(vec![row]);
    model.report(&long, true);
    let lines = screen(&mut model, 80, 10);
    assert!(lines[9].ends_with("... (e: all)"), "{lines:?}");
    // The filter is bounded too.
    type_keys(&mut model, &format!("/{}", &long[..4096]));
    assert!(model.filter().len() <= 256);
}

#[test]
fn a_thousand_sandboxes_are_shown_in_pages_on_large_and_small_screens() {
    for (width, height) in [(120, 40), (20, 5)] {
        let mut model = model(many(1000));
        // The header, the headings and the last line contain no rows.
        let rows = usize::from(height) - 3;
        let lines = screen(&mut model, width, height);
        assert_eq!(lines.len(), usize::from(height));
        assert!(
            lines
                .iter()
                .all(|line| line.chars().count() <= width.into())
        );
        assert_eq!(model.visible().count(), rows);
        for (keys, index) in [
            ("G", 999),
            ("\u{1b}[5~", 999 - rows),
            ("g", 0),
            ("\u{1b}[6~", rows),
            ("k", rows - 1),
        ] {
            type_keys(&mut model, keys);
            let buffer = draw(&mut model, width, height);
            let name = format!("web-{index:04}");
            assert_eq!(selected(&model), Some(name.clone()), "{keys:?}");
            // The selected row is on the screen and is marked.
            let marked: Vec<u16> = (0..height)
                .filter(|&y| buffer[(0, y)].modifier.contains(Modifier::REVERSED))
                .collect();
            assert_eq!(marked.len(), 1, "{keys:?}");
            let text = view::buffer_text(&buffer);
            let line = text.lines().nth(marked[0].into()).unwrap();
            // The small screen has no column of names, but shows the start of the id.
            let shown = if width == 20 { "0000000" } else { &name };
            assert!(line.contains(shown), "{line}");
        }
        // Only the usage of these sandboxes is measured.
        let measured = model.visible_running();
        assert!(
            measured.len() <= rows && !measured.is_empty(),
            "{}",
            measured.len()
        );
    }
    let mut model = model(many(1000));
    let header = screen(&mut model, 120, 40).swap_remove(0);
    assert!(
        header.starts_with("jiffy top  alpha  500 running, 500 paused"),
        "{header}"
    );
}

#[test]
fn any_size_of_the_screen_is_drawn() {
    let mut model = model(many(30));
    model.report(&"an error of several words ".repeat(20), true);
    // An input closes the open view and opens the next one, as in the test of hostile names.
    let all_views = [
        "", "j", "/web", "\r", "\u{1b}?", "\u{1b}K", "ny", "xb", "\u{1b}e",
    ];
    for keys in all_views {
        type_keys(&mut model, keys);
        for width in [0, 1, 2, 7, 20, 79, 300] {
            for height in [0, 1, 2, 3, 4, 24, 100] {
                draw(&mut model, width, height);
            }
        }
    }
}

#[test]
fn a_resized_screen_is_drawn_completely_and_shows_the_selection() {
    let mut model = model(many(100));
    let mut terminal = Terminal::new(TestBackend::new(120, 40)).unwrap();
    type_keys(&mut model, "G");
    for (width, height) in [(120, 40), (20, 5), (200, 60), (60, 10)] {
        terminal.backend_mut().resize(width, height);
        terminal.resize(Rect::new(0, 0, width, height)).unwrap();
        terminal
            .draw(|frame| {
                view::draw(&mut model, frame.buffer_mut(), NOW_MS);
            })
            .unwrap();
        let expected = draw(&mut model, width, height);
        assert_eq!(terminal.backend().buffer().content(), expected.content());
        let last = model
            .visible()
            .last()
            .map(|(row, is_selected)| (row.label(), is_selected));
        assert_eq!(last, Some(("web-0099".to_owned(), true)));
    }
}

#[test]
fn the_host_is_a_column_in_a_fleet_only() {
    let mut single = model(vec![named("a", "web")]);
    let lines = screen(&mut single, 140, 6);
    assert!(!lines[1].contains("HOST"), "{lines:?}");
    let mut fleet = model(vec![
        row_of("a", json!({ "name": "web" }), Some("h1")),
        // Its host is lost.
        row_of(
            "b",
            json!({ "name": "xyz", "state": "broken", "cause": "" }),
            None,
        ),
    ]);
    fleet.is_loaded = true;
    let lines = screen(&mut fleet, 140, 6);
    assert!(lines[1].contains("HOST"), "{lines:?}");
    assert!(lines[2].contains("  h1 "), "{lines:?}");
    assert_eq!(fleet.count_in(StateName::Broken), 1);
}

#[test]
fn usage_is_shown_for_running_sandboxes_and_survives_a_new_list() {
    let mut model = model(vec![named("a", "web")]);
    let usage = Usage {
        cpu_percent: 12.34,
        memory: 300 << 20,
        disk: 5 << 20,
        network: Some((1 << 20, 2 << 30)),
    };
    model.set_usage(&BTreeMap::from([("a".to_owned(), usage)]));
    model.replace(vec![named("a", "web")]);
    let lines = screen(&mut model, 160, 6);
    for text in [
        "12.3 %",
        "300.0 MiB",
        "512 MiB",
        "5.0 MiB",
        "1.0 MiB",
        "2.0 GiB",
        "60 s",
    ] {
        assert!(lines[2].contains(text), "{text} in {lines:?}");
    }
    let paused = row("a", json!({ "name": "web", "state": "paused" }));
    model.change(vec![("a".to_owned(), Some(paused))]);
    let lines = screen(&mut model, 160, 6);
    assert!(!lines[2].contains("12.3 %"), "{lines:?}");
}

#[test]
fn an_error_is_shown_completely_and_remains_in_the_messages() {
    let mut model = model(many(3));
    let error = "web: the sandbox cannot be paused because its disk is full; remove snapshots with \
        `jiffy prune` and try again, or increase the disk of the host";
    model.report(error, true);
    let lines = screen(&mut model, 60, 12);
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert!(
        words(&lines.join(" "))
            .join(" ")
            .contains(&words(error).join(" ")),
        "{lines:?}"
    );
    // The next key replaces it by the list of keys.
    type_keys(&mut model, "j");
    assert!(screen(&mut model, 60, 12)[11].starts_with("/ filter"));
    assert_eq!(model.messages().count(), 1);
    // Repeated errors are one message.
    model.report(error, true);
    assert_eq!(model.messages().count(), 1);
}

#[test]
fn a_long_error_is_wrapped_in_the_messages_and_copied_as_one_line() {
    let mut model = model(many(3));
    let error = "cannot pause the sandbox because its disk is full ".repeat(5);
    type_keys(&mut model, "e");
    set_text(&mut model, &[error.trim_end()]);
    let lines = screen(&mut model, 60, 12);
    assert_eq!(lines[2..7].join(" "), error.trim_end(), "{lines:?}");
    let text = Effect::CopyText(vec![error.trim_end().to_owned()]);
    assert_eq!(type_keys(&mut model, "yy"), [text]);
}

#[test]
fn the_selected_match_of_a_search_is_on_the_screen_and_marked() {
    let mut model = model(many(3));
    type_keys(&mut model, "l");
    let wide = format!("{}-050", "x".repeat(100));
    let mut lines: Vec<String> = (0..100).map(|n| format!("line-{n:03}")).collect();
    lines[50].clone_from(&wide);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    set_text(&mut model, &lines);
    for (width, height) in [(40, 10), (20, 5)] {
        assert!(!screen(&mut model, width, height).join("").contains("-050"));
        type_keys(&mut model, "/-050\r");
        let buffer = draw(&mut model, width, height);
        let marked = buffer.content().iter();
        let marked = marked.filter(|cell| cell.modifier.contains(Modifier::REVERSED));
        let marked: String = marked.map(|cell| cell.symbol()).collect();
        assert_eq!(marked, "-050", "{width} x {height}");
        // The end of the search is followed by the end of the text.
        type_keys(&mut model, "\u{1b}G");
    }
}
