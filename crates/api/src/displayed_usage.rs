//! Usage of the sandboxes that viewers of the web console display at the moment. Viewers of the
//! same sandbox share its samples.

use crate::app::App;
use crate::caller::Caller;
use crate::lookup::Liveness;
use crate::wire::guest::metric;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Age until which a measurement is shown to further viewers. Viewers request it once per second.
const MAX_AGE: Duration = Duration::from_millis(900);
/// Number of measurements in memory above which a new one first removes the old ones.
const MANY: usize = 1000;

/// Measurements of sandboxes by their ids, until they are too old.
#[derive(Debug)]
pub(crate) struct Recent<T>(Mutex<HashMap<String, (Instant, T)>>);

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Recent<T> {
    /// Returns a recent measurement, or the result of `measure`.
    fn get(&self, id: &str, measure: impl FnOnce() -> Option<T>) -> Option<T> {
        let is_recent = |at: &Instant| at.elapsed() < MAX_AGE;
        if let Some((at, value)) = self.0.lock().get(id)
            && is_recent(at)
        {
            return Some(value.clone());
        }
        let value = measure()?;
        let mut measured = self.0.lock();
        if measured.len() >= MANY {
            measured.retain(|_, (at, _)| is_recent(at));
        }
        measured.insert(id.to_owned(), (Instant::now(), value.clone()));
        Some(value)
    }
}

impl App {
    /// Returns the present usage of those sandboxes of this host that the caller sees and that run:
    /// the id of each, and a [`jiffy_api_types::Metric`] as JSON. Concurrent viewers share
    /// measurements.
    #[must_use]
    pub fn displayed_usage(&self, caller: &Caller, ids: &[String]) -> Vec<(String, Arc<str>)> {
        let usage = ids.iter().filter_map(|id| {
            let sandbox = self.sandbox(caller, id, Liveness::Alive).ok()?;
            let id = sandbox.id();
            let measured = self.displayed_usage.get(id, || {
                let sample = self.sandboxes.observe().now(id).ok().flatten()?;
                let text = serde_json::to_string(&metric(&sample)).ok()?;
                Some(Arc::<str>::from(text))
            });
            Some((caller.shown_id(id).to_owned(), measured?))
        });
        usage.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn viewers_share_a_measurement_for_a_second() {
        let recent = Recent::default();
        assert_eq!(recent.get("a", || Some(1)), Some(1));
        assert_eq!(recent.get("a", || Some(2)), Some(1));
        assert_eq!(recent.get("b", || Some(3)), Some(3));
        assert_eq!(recent.get("c", || None), None);
        let before = Instant::now().checked_sub(MAX_AGE).unwrap();
        recent.0.lock().insert("a".to_owned(), (before, 1));
        assert_eq!(recent.get("a", || Some(4)), Some(4));
    }
}
