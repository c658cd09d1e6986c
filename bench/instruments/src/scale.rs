//! Instrument `scale`: cost of calls, of a restart, of memory and of disk by the number of objects.

mod calls;
mod population;

use crate::data_directory::DataDirectory;
use crate::goals;
use crate::own_daemon::{self, OwnDaemon};
use anyhow::ensure;
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::{Measured, Series};
use population::Population;
use std::collections::BTreeMap;

/// Number of restarts at each number of objects.
const RESTARTS: usize = 3;

/// Samples at one number of objects.
struct Step {
    number: usize,
    rows: Vec<(&'static str, &'static str, Vec<f64>)>,
}

/// Medians by name, at each number of objects.
type Medians = BTreeMap<&'static str, Vec<(usize, f64)>>;

/// Measures the costs at each of `numbers`, in ascending order.
pub async fn scale(n: usize, numbers: &[usize]) -> anyhow::Result<Measured> {
    ensure!(
        numbers.first().is_some_and(|first| *first >= calls::PAGE)
            && numbers.is_sorted_by(|one, next| one < next),
        "--numbers must be in ascending order, starting at {} or more",
        calls::PAGE
    );
    let home = DataDirectory::new()?;
    let mut not_available = Vec::new();
    let measured = steps(&home, n, numbers, &mut not_available).await;
    if measured.is_err() {
        // Kill guests of interrupted operations.
        let kill_sandboxes = true;
        own_daemon::stop(&home, kill_sandboxes).await.ok();
    }
    let measured = measured?;
    let mut series = Vec::new();
    let mut medians = Medians::new();
    for step in &measured {
        for (name, unit, samples) in &step.rows {
            let one = Series::new(
                format!("{name}, {} of each", step.number),
                unit,
                goal(name, step.number),
                samples.clone(),
            );
            medians
                .entry(name)
                .or_default()
                .push((step.number, one.p50));
            series.push(one);
        }
    }
    series.extend(growths(&medians));
    Ok(Measured {
        method: "a separate data directory (in TMPDIR) with the given number of snapshots, \
            sandboxes paused in them, templates and keys. All objects are fabricated, except those \
            of the measured guests: rows of the journal and of keys, manifests of templates, and \
            directories of snapshots with an empty memory layer, in which all files except the \
            manifest are links to shared files. A daemon with default settings; sequential calls \
            on one persistent connection, spread over all objects; a restart from the start of the \
            process to the first answer about a sandbox, with a warm page cache; memory is VmRSS, \
            at the first answer and after the calls",
        limits: "a cold page cache; concurrent calls; layers with content; a store; background \
            work of a daemon after its first answers",
        not_available: [not_available, Meter::new().not_available()].concat(),
        ..Measured::new("scale", series, &Meter::new())
    })
}

/// Returns the goal of a measurement at one number of objects.
fn goal(name: &str, number: usize) -> Option<f64> {
    match (name, number) {
        ("restart to the first answer", _) => Some(goals::RESTART),
        ("memory of the daemon at its first answer", 10_000) => Some(goals::PAUSED_SANDBOXES_MIB),
        _ => None,
    }
}

/// Returns the ratio of the last to the first median, for all measurements of time.
fn growths(medians: &Medians) -> Vec<Series> {
    let calls = medians
        .iter()
        .filter(|(name, _)| !name.contains("memory") && !name.contains("disk"));
    let both = calls.filter_map(|(name, found)| Some((name, found.first()?, found.last()?)));
    // Growth needs measurements at two numbers of objects.
    both.filter(|(_, first, last)| first.0 < last.0)
        .map(|(name, first, last)| {
            // A restart reads all objects, and has a goal for its absolute time.
            let goal = (!name.starts_with("restart")).then_some(goals::GROWTH);
            let title = format!("{name}: {} beside {}", last.0, first.0);
            Series::new(title, "times", goal, vec![last.1 / first.1])
        })
        .collect()
}

/// Fills the data directory step by step, and measures a daemon at each number of objects.
async fn steps(
    home: &DataDirectory,
    n: usize,
    numbers: &[usize],
    not_available: &mut Vec<String>,
) -> anyhow::Result<Vec<Step>> {
    let mut population = Population::default();
    // The daemon creates its key and the template's snapshot.
    let daemon = OwnDaemon::start(home, "/health").await?;
    let built = population::require_template(home);
    let lived = match built {
        // With 0 samples, only the first round runs, which is discarded. It creates the template's
        // snapshot.
        Ok(()) => calls::measure_guests(&daemon.daemon, 0).await.map(drop),
        missing => missing,
    };
    let with_guests = lived.is_ok();
    if let Err(why) = lived {
        not_available.push(format!("operations on guests: not available: {why:#}"));
    }
    // Memory and disk of the empty directory are subtracted from the later values per sandbox ("for
    // each").
    let empty_kib = daemon.daemon.memory_kib().await?;
    daemon.stop(home).await?;
    let empty_disk = population::disk_use(home.path())?;
    let mut steps = Vec::new();
    for &number in numbers {
        population.fill(home, number)?;
        let mut rows = Vec::new();
        let mut restarts = Vec::new();
        // A sandbox from the middle, so that neither end of a list is favoured.
        let path = format!("/sandboxes/{}", population.sandboxes[number / 2]);
        // The first start reads files into the page cache.
        OwnDaemon::start(home, &path).await?.stop(home).await?;
        // The last of the restarts also serves the calls below.
        for _ in 1..RESTARTS {
            let daemon = OwnDaemon::start(home, &path).await?;
            restarts.push(daemon.first_answer_ms);
            daemon.stop(home).await?;
        }
        let daemon = OwnDaemon::start(home, &path).await?;
        restarts.push(daemon.first_answer_ms);
        rows.push(("restart to the first answer", "ms", restarts));
        let at_start = daemon.daemon.memory_kib().await? / 1024.0;
        rows.push((
            "memory of the daemon at its first answer",
            "MiB",
            vec![at_start],
        ));
        let found = calls::measure(&daemon, &mut population, n).await?;
        rows.extend(
            found
                .into_iter()
                .map(|(name, samples)| (name, "ms", samples)),
        );
        if with_guests {
            let found = calls::measure_guests(&daemon.daemon, n).await?;
            rows.extend(
                found
                    .into_iter()
                    .map(|(name, samples)| (name, "ms", samples)),
            );
        }
        let kib = daemon.daemon.memory_kib().await?;
        rows.push(("memory of the daemon", "MiB", vec![kib / 1024.0]));
        let each = (kib - empty_kib) / number as f64;
        rows.push(("memory of the daemon, for each", "KiB", vec![each]));
        daemon.stop(home).await?;
        for ((name, bytes), (_, before)) in population::disk_use(home.path())?
            .into_iter()
            .zip(&empty_disk)
        {
            let each = (bytes as f64 - *before as f64) / number as f64;
            rows.push((name, "bytes each", vec![each]));
        }
        steps.push(Step { number, rows });
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sandbox_manager::FabricatedJournal;

    #[test]
    fn calls_are_spread_over_existing_items() {
        let population = |number: usize| Population {
            sandboxes: vec![String::new(); number],
            ..Population::default()
        };
        let spread = |number: usize, n: usize| -> Vec<usize> {
            let population = population(number);
            (0..=n).map(|round| population.spread(round, n)).collect()
        };
        assert_eq!(spread(100, 3), [0, 25, 50, 75]);
        assert_eq!(spread(10, 20).last(), Some(&9));
    }

    #[test]
    fn growth_compares_the_largest_number_with_the_smallest() {
        let medians = Medians::from([
            ("get", vec![(10, 1.0), (1000, 1.2), (10_000, 1.6)]),
            ("memory of the daemon", vec![(10, 1.0), (10_000, 50.0)]),
            ("once", vec![(10, 1.0)]),
        ]);
        let found = growths(&medians);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "get: 10000 beside 10");
        assert_eq!((found[0].p50, found[0].goal), (1.6, Some(1.5)));
    }

    #[test]
    fn a_filled_data_directory_is_read_as_a_journal_snapshots_and_templates() {
        let home = DataDirectory::new().unwrap();
        // The keys of a daemon.
        let keys = rusqlite::Connection::open(home.path().join("keys.db")).unwrap();
        let table = "CREATE TABLE keys (id TEXT PRIMARY KEY, hash BLOB, name TEXT, scope TEXT, \
            created_ms INTEGER)";
        keys.execute_batch(table).unwrap();
        let mut population = Population::default();
        population.fill(&home, 10).unwrap();
        population.fill(&home, 12).unwrap();
        let journal = FabricatedJournal::open(&home.path().join("state.db")).unwrap();
        assert_eq!(journal.sandbox_ids().unwrap().len(), 12);
        let snapshots = journal.snapshot_ids().unwrap();
        let store = jiffy_snapshot::Store::open(home.path().join("snapshots")).unwrap();
        assert_eq!(store.ids().unwrap().len(), snapshots.len());
        for snapshot in &snapshots {
            store.get(snapshot).unwrap();
        }
        let templates = jiffy_image::Templates::new(&home.home().unwrap());
        let names: Vec<String> = templates
            .list()
            .unwrap()
            .into_iter()
            .map(|t| t.name)
            .collect();
        for at in 0..12 {
            assert!(names.contains(&population::template_name(at)), "{names:?}");
        }
        let count: i64 = keys
            .query_row("SELECT count(*) FROM keys", [], |row| row.get(0))
            .unwrap();
        assert_eq!(count, 12);
    }
}
