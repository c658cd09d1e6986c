//! Samples and their order statistics.
//!
//! The report shows minimum, average, percentiles and maximum of each quantity.

use serde::Serialize;

/// Samples of one measured quantity.
#[derive(Debug, Serialize)]
pub struct Series {
    /// Name of the quantity.
    pub name: String,
    /// Unit: `ms`, `us`, `MiB`, `MB/s`, `per second`, `count` ...
    pub unit: &'static str,
    /// Maximum that the median should not exceed, if there is a goal.
    pub goal: Option<f64>,
    /// Minimum that the median should reach, if there is a goal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// Value that CubeSandbox publishes for the same operation on its own host (see
    /// docs/figures.md). `None` if no value is published.
    pub reference: Option<f64>,
    /// Ratio of the average to the reference, which is an average as well.
    pub ratio: Option<f64>,
    /// Minimum.
    pub min: f64,
    /// Mean.
    pub avg: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
    /// All samples, in the order of measurement.
    pub samples: Vec<f64>,
}

impl Series {
    /// Computes the statistics of `samples`, which must not be empty.
    pub fn new(
        name: impl Into<String>,
        unit: &'static str,
        goal: Option<f64>,
        samples: Vec<f64>,
    ) -> Self {
        let mut sorted = samples.clone();
        // The samples themselves remain in the order of measurement, which shows trends.
        sorted.sort_by(f64::total_cmp);
        let at = |q: f64| {
            let last = sorted.len().saturating_sub(1);
            // Nearest rank: always an actual sample.
            let rank = (q * sorted.len() as f64).ceil() as usize;
            sorted
                .get(rank.saturating_sub(1).min(last))
                .copied()
                .unwrap_or(f64::NAN)
        };
        Self {
            name: name.into(),
            unit,
            goal,
            least: None,
            reference: None,
            ratio: None,
            min: at(0.0),
            avg: samples.iter().sum::<f64>() / samples.len() as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: at(1.0),
            samples,
        }
    }
}

impl Series {
    /// Sets the reference value.
    pub fn against(mut self, reference: Option<f64>) -> Self {
        self.reference = reference;
        self.ratio = reference.map(|reference| self.avg / reference);
        self
    }
}

impl Series {
    /// Sets the minimum to reach.
    pub fn at_least(mut self, least: Option<f64>) -> Self {
        self.least = least;
        self
    }

    /// Returns whether the median meets the goal, as text. Empty without a goal.
    fn goal_text(&self) -> String {
        match (self.goal, self.least) {
            (Some(goal), _) if self.p50 < goal => format!("< {goal}: met"),
            (Some(goal), _) => format!("< {goal}: missed by {:.1}x", self.p50 / goal),
            (None, Some(least)) if self.p50 >= least => format!(">= {least}: met"),
            (None, Some(least)) => format!(">= {least}: missed by {:.1}x", least / self.p50),
            (None, None) => String::new(),
        }
    }
}

/// Prints a table of all series.
pub fn print(series: &[Series]) {
    println!(
        "  {:<46} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  goal, average relative to the reference",
        "", "min", "avg", "p50", "p90", "p99", "max"
    );
    for s in series {
        let goal = s.goal_text();
        let reference = match s.reference.zip(s.ratio) {
            Some((reference, ratio)) => format!("  {ratio:.2}x of {reference}"),
            None => "  no reference".to_owned(),
        };
        println!(
            "  {:<46} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2}  {goal}{reference}",
            format!("{} ({}, n={})", s.name, s.unit, s.samples.len()),
            s.min,
            s.avg,
            s.p50,
            s.p90,
            s.p99,
            s.max
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_that_were_taken() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let s = Series::new("x", "ms", None, samples);
        assert_eq!(
            (s.min, s.p50, s.p90, s.p99, s.max),
            (1.0, 50.0, 90.0, 99.0, 100.0)
        );
        assert_eq!(s.avg, 50.5);
        assert_eq!(s.samples[0], 100.0);
        assert_eq!(s.goal_text(), "");
        assert_eq!(s.at_least(Some(51.0)).goal_text(), ">= 51: missed by 1.0x");
        let one = Series::new("x", "ms", None, vec![7.0]);
        assert_eq!((one.min, one.p50, one.p99, one.max), (7.0, 7.0, 7.0, 7.0));
    }
}
