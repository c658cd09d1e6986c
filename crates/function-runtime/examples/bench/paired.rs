//! Difference between direct requests and requests to plain hyper within each round. Both are
//! subject to the same other load, which changes from round to round.

use serde_json::{Value, json};
use std::time::Duration;

/// Differences of medians in microseconds per round, by series and number of clients.
#[derive(Default)]
pub struct PairedDifferences(Vec<(String, usize, Vec<f64>)>);

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn median_us(times: &[Duration]) -> f64 {
    let mut times: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
    median(&mut times)
}

impl PairedDifferences {
    /// Adds a round.
    pub fn add(&mut self, name: &str, clients: usize, plain: &[Duration], direct: &[Duration]) {
        let difference = median_us(direct) - median_us(plain);
        let same = |one: &&mut (String, usize, _)| one.0 == name && one.1 == clients;
        match self.0.iter_mut().find(same) {
            Some(one) => one.2.push(difference),
            None => self.0.push((name.to_owned(), clients, vec![difference])),
        }
    }

    /// Prints the median over the rounds of each series to standard error, and returns all values.
    pub fn report(self) -> Vec<Value> {
        eprintln!("direct over plain hyper, median of the rounds' differences (minimum, maximum)");
        let all = self.0.into_iter();
        all.map(|(name, clients, rounds)| {
            let mut sorted = rounds.clone();
            let median = median(&mut sorted);
            let (least, most) = (sorted[0], sorted[sorted.len() - 1]);
            eprintln!("{name}, c={clients}: {median:.1} us ({least:.1}, {most:.1})");
            json!({ "name": name, "clients": clients, "median": median, "rounds": rounds })
        })
        .collect()
    }
}
