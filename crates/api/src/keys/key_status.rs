//! Keys in force, kept in memory for checks at every request to a sandbox.

use super::{KeyError, Keys};
use jiffy_engine::now_ms;
use rusqlite::Row;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Age at which the file is read again. A change by another process is noticed that much later.
const MAX_CACHE_AGE: Duration = Duration::from_millis(500);
/// Age from which on the file is read again for a key that is not known: keys that are gone cost no
/// more than that.
const MIN_CACHE_AGE: Duration = Duration::from_millis(10);
/// Interval at which the end of a key is looked for.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// State of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStatus {
    /// It can be used.
    InForce,
    /// It was revoked, has expired, or is not known.
    Over,
    /// It was revoked, and everything it has is to end.
    Ended,
}

/// State of all keys at one moment.
#[derive(Debug)]
pub(super) struct KeyStatuses {
    read: Instant,
    keys: HashMap<String, KeyEntry>,
    hashes: HashSet<Vec<u8>>,
}

#[derive(Debug)]
struct KeyEntry {
    revoked: bool,
    end: bool,
    expires_ms: Option<u64>,
}

impl KeyEntry {
    fn standing(&self, now: u64) -> KeyStatus {
        match self {
            Self { end: true, .. } => KeyStatus::Ended,
            Self { revoked: true, .. } => KeyStatus::Over,
            Self {
                expires_ms: Some(at),
                ..
            } if *at <= now => KeyStatus::Over,
            _ => KeyStatus::InForce,
        }
    }
}

impl Keys {
    /// State of the key with this id; none is the host's owner. At most half a second old.
    pub fn standing(&self, id: Option<&str>) -> KeyStatus {
        let Some(id) = id else {
            return KeyStatus::InForce;
        };
        let entry = |all: &Arc<KeyStatuses>| all.keys.get(id).map(|k| k.standing(now_ms()));
        let Some(all) = self.standings() else {
            return KeyStatus::Over;
        };
        // One that another process has just made is younger than what is in memory.
        let younger = || {
            let is_old = all.read.elapsed() > MIN_CACHE_AGE;
            is_old.then(|| self.forget_standing())?;
            entry(&self.standings()?)
        };
        entry(&all).or_else(younger).unwrap_or(KeyStatus::Over)
    }

    /// True if a key of this hash is in force, without a look at the file unless it is time.
    pub(crate) fn knows(&self, hash: &[u8; 32]) -> bool {
        self.standings()
            .is_some_and(|all| all.hashes.contains(hash.as_slice()))
    }

    /// Ids of the keys all of whose sandboxes are to end.
    pub(crate) fn ended(&self) -> Vec<String> {
        let Some(all) = self.standings() else {
            return Vec::new();
        };
        let ended = all.keys.iter().filter(|(_, k)| k.end);
        ended.map(|(id, _)| id.clone()).collect()
    }

    /// Waits until the key with this id is not in force any more: noticed within two seconds.
    pub async fn over(&self, id: Option<&str>) {
        if id.is_none() {
            std::future::pending::<()>().await;
        }
        while self.standing(id) == KeyStatus::InForce {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Has the file read again at the next look.
    pub(super) fn forget_standing(&self) {
        *self.standing.lock() = None;
    }

    /// The state of all keys; none: they could never be read.
    fn standings(&self) -> Option<Arc<KeyStatuses>> {
        let mut known = self.standing.lock();
        if let Some(all) = known.as_ref()
            && all.read.elapsed() < MAX_CACHE_AGE
        {
            return Some(all.clone());
        }
        match self.read_standings() {
            Ok(all) => *known = Some(Arc::new(all)),
            Err(e) => tracing::error!("{e}"),
        }
        known.clone()
    }

    fn read_standings(&self) -> Result<KeyStatuses, KeyError> {
        let read = Instant::now();
        let now = now_ms();
        let reader = self.reader.lock();
        let query = || -> rusqlite::Result<KeyStatuses> {
            let mut statement = reader.prepare_cached(
                "SELECT id, revoked_ms, end_ms, expires_ms, hash, previous_hash, previous_until_ms
                    FROM keys",
            )?;
            let mut rows = statement.query([])?;
            let (mut keys, mut hashes) = (HashMap::new(), HashSet::new());
            while let Some(row) = rows.next()? {
                let moment = |i| moment(row, i);
                let entry = KeyEntry {
                    revoked: moment(1)?.is_some(),
                    end: moment(2)?.is_some(),
                    expires_ms: moment(3)?,
                };
                if entry.standing(now) == KeyStatus::InForce {
                    hashes.insert(row.get(4)?);
                    if moment(6)?.is_some_and(|until| until > now)
                        && let Some(previous) = row.get(5)?
                    {
                        hashes.insert(previous);
                    }
                }
                keys.insert(row.get(0)?, entry);
            }
            Ok(KeyStatuses { read, keys, hashes })
        };
        query().map_err(|e| self.failed(e))
    }
}

fn moment(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<u64>> {
    let ms: Option<i64> = row.get(column)?;
    Ok(ms.and_then(|ms| u64::try_from(ms).ok()))
}
