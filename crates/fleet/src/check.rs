//! `jiffy store check` and `jiffy fleet init`: tests whether a store or etcd executes conditional
//! writes correctly. A conditional write succeeds only if the record still has the version that the
//! writer has read. If two concurrent writers could both succeed, two hosts might run the same
//! sandbox.

use crate::{Page, RecordError, RecordKey, Records, Versioned, Written};
use bytes::Bytes;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Size of a check.
#[derive(Debug, Clone, Copy)]
pub struct CheckOptions {
    /// Number of rounds. Each has one creation and one replacement.
    pub rounds: usize,
    /// Number of concurrent writers in a round.
    pub writers: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self {
            rounds: 20,
            writers: 32,
        }
    }
}

/// Result of a check that the records passed.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// Number of rounds.
    pub rounds: usize,
    /// Number of concurrent writers.
    pub writers: usize,
    /// Median duration of a replacement without concurrent writers, in milliseconds.
    pub replace_p50_ms: f64,
    /// 99th percentile of these durations, in milliseconds.
    pub replace_p99_ms: f64,
}

/// Checks that exactly one of several concurrent writers succeeds, that an outdated replacement is
/// rejected, and that reads and listings contain each completed write.
///
/// # Errors
/// [`RecordError::Unsuitable`] with the reason if the records must not be used by several hosts.
pub async fn check(
    records: &Arc<dyn Records>,
    options: CheckOptions,
) -> Result<CheckReport, RecordError> {
    let folder: RecordKey = format!("check/{}", hex(&random()?)).parse()?;
    let checked = rounds(records, &folder, options).await;
    // The records of a failed check are removed as well.
    for round in 0..options.rounds {
        let key = folder.child(&round.to_string())?;
        if let Err(e) = records.purge(&key).await {
            tracing::warn!(record = %key, error = %e, "cannot remove a record of the check");
        }
    }
    let mut times = checked?;
    times.sort();
    let percentile = |percent: usize| {
        let index = (times.len().saturating_sub(1)) * percent / 100;
        times
            .get(index)
            .map_or(0.0, |time| time.as_secs_f64() * 1000.0)
    };
    Ok(CheckReport {
        rounds: options.rounds,
        writers: options.writers,
        replace_p50_ms: percentile(50),
        replace_p99_ms: percentile(99),
    })
}

/// Runs the check. In each round, several writers race to create and to replace one record, and
/// exactly one of them must succeed. Returns the duration of one write per round.
async fn rounds(
    records: &Arc<dyn Records>,
    folder: &RecordKey,
    options: CheckOptions,
) -> Result<Vec<Duration>, RecordError> {
    let mut times = Vec::new();
    for round in 0..options.rounds {
        let key = folder.child(&round.to_string())?;
        let created = race(records, &key, None, options.writers, "creations").await?;
        let replaced = race(
            records,
            &key,
            Some(&created),
            options.writers,
            "replacements",
        )
        .await?;
        if let Written::Done(_) = records.replace(&key, content()?, &created.version).await? {
            return Err(unsuitable("a replacement of an outdated version succeeded"));
        }
        let start = Instant::now();
        let last = match records.replace(&key, content()?, &replaced.version).await? {
            Written::Done(version) => version,
            Written::Lost(_) => {
                return Err(unsuitable(
                    "a replacement of the current version was rejected",
                ));
            }
        };
        times.push(start.elapsed());
        if records.get(&key).await?.map(|read| read.version) != Some(last) {
            return Err(unsuitable(
                "a read does not return the last completed write",
            ));
        }
        let Page { keys, .. } = records.list(folder, None, options.rounds + 1).await?;
        if keys.len() != round + 1 || !keys.contains(&key) {
            return Err(unsuitable(
                "a listing does not contain all completed writes",
            ));
        }
    }
    Ok(times)
}

/// Lets several writers write one record concurrently. Returns the record, which exactly one of
/// them must have written.
async fn race(
    records: &Arc<dyn Records>,
    key: &RecordKey,
    current: Option<&Versioned>,
    writers: usize,
    kind: &str,
) -> Result<Versioned, RecordError> {
    let mut running = JoinSet::new();
    for _ in 0..writers {
        let (records, key, value) = (records.clone(), key.clone(), content()?);
        let version = current.map(|current| current.version.clone());
        running.spawn(async move {
            let written = match &version {
                Some(version) => records.replace(&key, value.clone(), version).await,
                None => records.create(&key, value.clone()).await,
            };
            written.map(|written| matches!(written, Written::Done(_)).then_some(value))
        });
    }
    let mut winners = Vec::new();
    while let Some(ended) = running.join_next().await {
        let written = ended.map_err(|e| unsuitable(&e.to_string()))?;
        winners.extend(written?);
    }
    let [winner] = &winners[..] else {
        return Err(unsuitable(&format!(
            "{} of {writers} concurrent {kind} of one record succeeded, instead of one",
            winners.len()
        )));
    };
    match records.get(key).await? {
        Some(read) if read.value == *winner => Ok(read),
        _ => Err(unsuitable(
            "a read does not return the write that succeeded",
        )),
    }
}

fn unsuitable(reason: &str) -> RecordError {
    RecordError::Unsuitable(format!(
        "{reason}; use a server with atomic conditional writes (docs/store.md lists suitable ones)"
    ))
}

/// Returns unique content.
fn content() -> Result<Bytes, RecordError> {
    Ok(Bytes::copy_from_slice(&random()?))
}

fn random() -> Result<[u8; 16], RecordError> {
    let mut bytes = [0; 16];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|e| RecordError::Unsuitable(format!("no random bytes: {e}")))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
