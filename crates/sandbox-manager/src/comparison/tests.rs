//! Tests of comparisons of two sandboxes, from lists of changes against their template.

use super::listing::ListingError;
use super::*;
use jiffy_agent_client::comparison::{DetailedChange, DetailedChanges};

/// Returns the state of a regular file.
fn file(size: u64) -> FileState {
    FileState {
        kind: 'f',
        size,
        mode: 0o644,
        uid: 0,
        gid: 0,
    }
}

fn directory() -> FileState {
    FileState {
        kind: 'd',
        mode: 0o755,
        ..file(0)
    }
}

/// Returns a change that an agent reports.
fn change(
    kind: char,
    path: &str,
    now: Option<FileState>,
    before: Option<FileState>,
) -> DetailedChange {
    DetailedChange {
        path: path.to_owned(),
        path_bytes: None,
        kind,
        now,
        before,
        complete: false,
    }
}

fn listing(changes: Vec<DetailedChange>) -> FileListing {
    let more = false;
    FileListing::of(DetailedChanges { changes, more }).unwrap()
}

/// Compares two listings. Returns a line for each difference: its letter, the path, and the sizes
/// of the file in `a` and in `b`. Also returns the candidates: the paths of files whose contents
/// must be compared.
fn compared(a: Vec<DetailedChange>, b: Vec<DetailedChange>) -> (String, Vec<String>) {
    let comparison = Comparison::of(&listing(a), &listing(b));
    let text = |path: &[u8]| String::from_utf8(path.to_vec()).unwrap();
    let differences = comparison.differences.iter();
    let differences = differences.map(|d| {
        let letter = match d.kind {
            DifferenceKind::Added => 'A',
            DifferenceKind::Changed => 'C',
            DifferenceKind::Removed => 'D',
        };
        let size = |state: Option<FileState>| state.map_or("-".into(), |s| s.size.to_string());
        format!("{letter} {} {} {}\n", text(&d.path), size(d.a), size(d.b))
    });
    let candidates = comparison.candidates.iter().map(|c| text(&c.path));
    (differences.collect(), candidates.collect())
}

#[test]
fn files_are_compared_by_their_changes_against_the_template() {
    let a = vec![
        change('A', "/new-in-a", Some(file(1)), None),
        change('A', "/new", Some(file(1)), None),
        change('A', "/same", Some(file(2)), None),
        change('C', "/changed-in-a", Some(file(3)), Some(file(4))),
        change('C', "/touched-in-a", Some(file(4)), Some(file(4))),
        change('D', "/gone-in-a", None, Some(file(5))),
        change('D', "/gone", None, Some(file(5))),
        change('C', "/mode", Some(file(6)), Some(file(6))),
    ];
    let b = vec![
        change('A', "/new", Some(file(9)), None),
        change('A', "/same", Some(file(2)), None),
        change('A', "/new-in-b", Some(file(8)), None),
        change('D', "/gone", None, Some(file(5))),
        change('D', "/gone-in-b", None, Some(file(7))),
        change(
            'C',
            "/mode",
            Some(FileState {
                mode: 0o755,
                ..file(6)
            }),
            Some(file(6)),
        ),
    ];
    let (differences, candidates) = compared(a, b);
    let expected = "C /changed-in-a 3 4
D /gone-in-b 7 -
A /gone-in-a - 5
C /mode 6 6
C /new 1 9
D /new-in-a 1 -
A /new-in-b - 8
";
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&differences), sorted(expected));
    assert_eq!(candidates, ["/same", "/touched-in-a"]);
}

#[test]
fn deleted_new_and_replaced_directories_hide_the_files_of_the_template() {
    let below = |directory: &str| {
        let path = format!("{directory}/deep/file");
        change('C', &path, Some(file(2)), Some(file(1)))
    };
    let mut replaced = change('C', "/complete", Some(directory()), Some(directory()));
    replaced.complete = true;
    let a = vec![
        change('D', "/deleted", None, Some(directory())),
        change('C', "/file", Some(file(7)), Some(directory())),
        change('C', "/plain", Some(directory()), Some(directory())),
        replaced,
    ];
    let directories = ["/deleted", "/file", "/plain", "/complete"];
    let b: Vec<_> = directories.into_iter().map(below).collect();
    let (differences, candidates) = compared(a, b);
    let expected = "A /complete/deep/file - 2
A /deleted - 0
A /deleted/deep/file - 2
C /file 7 0
A /file/deep/file - 2
C /plain/deep/file 1 2
";
    assert_eq!((&*differences, candidates.len()), (expected, 0));
}

#[test]
fn contents_that_cannot_be_compared_are_reported_as_such() {
    let side = || {
        let files = ["/equal", "/different", "/unknown"];
        let files = files.map(|path| change('A', path, Some(file(1)), None));
        listing(files.into())
    };
    let comparison = Comparison::of(&side(), &side());
    assert_eq!(comparison.candidates.len(), 3);
    // In the order of the paths: different, equal, unknown.
    let hash = |text: &str| Some(text.to_owned());
    let a = [hash("x"), hash("z"), None];
    let b = [hash("y"), hash("z"), hash("z")];
    let differences = comparison.with_hashes(&a, &b);
    let found: Vec<_> = differences
        .iter()
        .map(|d| (&*d.path, d.is_verified))
        .collect();
    assert_eq!(
        found,
        [(&b"/different"[..], true), (&b"/unknown"[..], false)]
    );
}

#[test]
fn impossible_answers_of_an_agent_are_rejected() {
    let of = |change: DetailedChange| {
        let changes = vec![change];
        let more = false;
        FileListing::of(DetailedChanges { changes, more }).err()
    };
    for path in ["", "relative", "/zero\0", &format!("/{}", "x".repeat(5000))] {
        let change = change('A', path, Some(file(1)), None);
        assert_eq!(of(change), Some(ListingError::Invalid), "{path:?}");
    }
    let mut bytes = change('A', "/x", Some(file(1)), None);
    bytes.path_bytes = Some("not base64!".to_owned());
    assert_eq!(of(bytes), Some(ListingError::Invalid));
    let earlier = change('C', "/x", None, None);
    assert_eq!(of(earlier), Some(ListingError::EarlierAgent));
    for kind in ['A', 'X'] {
        let change = change(kind, "/x", Some(file(1)), Some(file(1)));
        assert_eq!(of(change), Some(ListingError::Invalid));
    }
}
