//! Tests of filter, order and selection.

use super::*;

#[test]
fn a_filter_finds_names_states_templates_hosts_labels_and_ids() {
    let one = json!({
        "name": "Web-1", "template": "node", "terms": { "metadata": { "team": "Red" } },
    });
    let two = json!({ "name": "db", "state": "paused", "engine": "gvisor" });
    let rows = vec![
        row_of("k3x9aa", one, Some("h1")),
        row_of("p7aabb", two, Some("h2")),
    ];
    let mut model = model(rows);
    for (filter, expected) in [
        ("", vec!["db", "Web-1"]),
        ("web", vec!["Web-1"]),
        ("paused", vec!["db"]),
        ("NODE", vec!["Web-1"]),
        ("h2", vec!["db"]),
        ("gvisor", vec!["db"]),
        ("team=red", vec!["Web-1"]),
        ("k3x", vec!["Web-1"]),
        // Only the start of an id is searched.
        ("3x9", vec![]),
        ("running web", vec!["Web-1"]),
        ("web paused", vec![]),
    ] {
        model.set_filter(filter.to_owned());
        assert_eq!(labels(&model), expected, "{filter}");
    }
}

#[test]
fn rows_with_equal_values_do_not_change_places() {
    let rows = || {
        (0..50)
            .map(|n| row(&format!("id{n:02}"), json!({})))
            .collect::<Vec<_>>()
    };
    let mut model = model(rows());
    let first = labels(&model);
    for reversed_input in [false, true] {
        for sort in SortColumn::ALL {
            let mut sorted = Model::new("", sort, false);
            let mut rows = rows();
            if reversed_input {
                rows.reverse();
            }
            sorted.replace(rows);
            assert_eq!(labels(&sorted), first, "{sort:?}");
        }
    }
    let usage = |percent| Usage {
        cpu_percent: percent,
        memory: 1,
        disk: 1,
        network: None,
    };
    model = Model::new("", SortColumn::Cpu, false);
    model.replace(rows());
    for percent in [1.0, 5.0, 0.0] {
        let all = (0..50).map(|n| (format!("id{n:02}"), usage(percent)));
        model.set_usage(&all.collect());
        assert_eq!(labels(&model), first);
    }
}

#[test]
fn each_column_has_its_natural_order_and_can_be_reversed() {
    let rows = vec![
        row_of(
            "a",
            json!({ "name": "b", "created_ms": 1, "deadline_ms": 9, "template": "z" }),
            Some("h2"),
        ),
        row_of(
            "b",
            json!({ "created_ms": 3, "template": "y", "state": "paused" }),
            Some("h1"),
        ),
        row_of(
            "c",
            json!({ "name": "A", "created_ms": 2, "deadline_ms": 5 }),
            None,
        ),
    ];
    let usage = |cpu_percent, memory, disk| Usage {
        cpu_percent,
        memory,
        disk,
        network: None,
    };
    let usage = BTreeMap::from([
        ("a".to_owned(), usage(10.0, 1, 7)),
        ("b".to_owned(), usage(99.0, 9, 9)),
        ("c".to_owned(), usage(50.0, 0, 8)),
    ]);
    for (sort, expected) in [
        (SortColumn::Name, ["c", "a", "b"]),
        (SortColumn::State, ["b", "a", "c"]),
        (SortColumn::Host, ["b", "a", "c"]),
        (SortColumn::Template, ["c", "b", "a"]),
        // A paused sandbox has no usage.
        (SortColumn::Cpu, ["c", "a", "b"]),
        (SortColumn::Memory, ["a", "c", "b"]),
        (SortColumn::Disk, ["c", "a", "b"]),
        (SortColumn::Age, ["b", "c", "a"]),
        (SortColumn::Expires, ["c", "a", "b"]),
    ] {
        let mut model = Model::new("", sort, false);
        model.replace(rows.clone());
        model.set_usage(&usage);
        let ids = |model: &Model| {
            let ids = model.all_shown().map(|(row, _)| row.id.clone());
            ids.collect::<Vec<_>>()
        };
        assert_eq!(ids(&model), expected, "{sort:?}");
        // Rows with equal values remain in the order of their ids.
        if sort == SortColumn::State {
            continue;
        }
        type_keys(&mut model, "o");
        let mut reversed = expected;
        reversed.reverse();
        assert_eq!(ids(&model), reversed, "{sort:?}");
    }
    let mut model = model(rows);
    for sort in SortColumn::ALL {
        assert_eq!(model.sort().0, sort);
        type_keys(&mut model, ">");
    }
    assert_eq!(model.sort().0, SortColumn::Name);
    // The left arrow key selects the previous column.
    type_keys(&mut model, "\u{1b}[D");
    assert_eq!(model.sort().0, SortColumn::Expires);
}

#[test]
fn the_selection_follows_its_sandbox_and_moves_to_a_neighbour_when_it_is_removed() {
    let mut model = model(vec![named("a", "a"), named("b", "b"), named("c", "c")]);
    assert_eq!(selected(&model).as_deref(), Some("a"));
    type_keys(&mut model, "j");
    assert_eq!(selected(&model).as_deref(), Some("b"));
    // A new row above the selection.
    model.change(vec![("0".to_owned(), Some(named("0", "0")))]);
    assert_eq!(selected(&model).as_deref(), Some("b"));
    // A killed sandbox is removed as well.
    let killed = row("b", json!({ "name": "b", "state": "killed" }));
    model.change(vec![("b".to_owned(), Some(killed))]);
    assert_eq!(labels(&model), ["0", "a", "c"]);
    assert_eq!(selected(&model).as_deref(), Some("c"));
    model.change(vec![("c".to_owned(), None)]);
    assert_eq!(selected(&model).as_deref(), Some("a"));
    model.replace(Vec::new());
    assert_eq!(selected(&model), None);
    // Keys have no effect without a selection.
    assert_eq!(type_keys(&mut model, "KpsS\rjG"), []);
    assert!(model.message().is_none_or(|message| message.is_error));
    model.replace(vec![named("z", "z")]);
    assert_eq!(selected(&model).as_deref(), Some("z"));
}
