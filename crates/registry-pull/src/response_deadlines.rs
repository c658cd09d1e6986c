//! Deadlines of a response from a registry, so that a slow or silent registry cannot block an
//! import.

use std::time::{Duration, Instant};

/// Maximum time between bytes of a response.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a document.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which the minimum rate of a layer applies.
const RATE_GRACE: Duration = Duration::from_secs(60);
/// Minimum average rate of a layer in bytes per second.
const MIN_RATE: u64 = 64 << 10;
/// Timeout of all layers of an image.
const LAYERS_TIMEOUT: Duration = Duration::from_secs(7200);

/// Deadlines of a response: idle, total, and a minimum rate.
#[derive(Debug, Clone)]
pub(crate) struct ResponseDeadlines {
    began: Instant,
    /// Deadline of the document, or of all layers of the image together.
    end: Instant,
    /// Timeout from which `end` was computed.
    total: Duration,
    /// True if the minimum rate applies.
    rate: bool,
    /// Bytes received so far.
    received: u64,
}

impl ResponseDeadlines {
    /// Starts the deadlines of a document or another short response.
    pub fn document() -> Self {
        let began = Instant::now();
        Self {
            began,
            end: began + DOCUMENT_TIMEOUT,
            total: DOCUMENT_TIMEOUT,
            rate: false,
            received: 0,
        }
    }

    /// Starts the deadlines of a layer with its retries. All layers of an image share one total
    /// deadline, which counts from `first`, the start of the first layer.
    pub fn layer(first: Instant) -> Self {
        Self {
            end: first + LAYERS_TIMEOUT,
            total: LAYERS_TIMEOUT,
            rate: true,
            ..Self::document()
        }
    }

    /// Counts received bytes.
    pub fn count(&mut self, bytes: usize) {
        self.received = self.received.saturating_add(bytes as u64);
    }

    /// Returns the next deadline and the message of its timeout error.
    pub fn next(&self) -> (Instant, String) {
        // The caller calls `next` again after each piece of data, which extends this deadline.
        let idle = Instant::now() + IDLE_TIMEOUT;
        let idle = (idle, format!("no data for {} s", IDLE_TIMEOUT.as_secs()));
        let end = (
            self.end,
            format!("incomplete after {} s", self.total.as_secs()),
        );
        // `first` is the earliest of these deadlines. Its message explains the failure.
        let mut first = if end.0 < idle.0 { end } else { idle };
        if self.rate {
            // Until this time, the bytes received so far satisfy the minimum rate.
            let due = RATE_GRACE + Duration::from_secs(self.received / MIN_RATE);
            let due = self.began + due;
            if due < first.0 {
                let text = format!("slower than {} KiB/s on average", MIN_RATE >> 10);
                first = (due, text);
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minimum_rate_of_a_layer_applies_after_the_grace_period() {
        let mut deadlines = ResponseDeadlines::layer(Instant::now());
        deadlines.began = Instant::now() - Duration::from_secs(50);
        let (due, text) = deadlines.next();
        assert!(due <= Instant::now() + Duration::from_secs(10), "{text}");
        assert!(text.contains("64 KiB/s"), "{text}");
        // 90 s are permitted at the minimum rate (30 s for the bytes after the grace of 60 s), and
        // 50 s have passed. The idle timeout of 30 s comes before the remaining 40 s.
        deadlines.count(30 * 64 * 1024);
        assert!(deadlines.next().1.contains("no data for 30 s"));
    }

    #[test]
    fn all_layers_of_an_image_share_one_deadline() {
        let first = Instant::now() - Duration::from_secs(7195);
        let mut deadlines = ResponseDeadlines::layer(first);
        deadlines.count(1 << 30);
        let (due, text) = deadlines.next();
        assert!(due <= Instant::now() + Duration::from_secs(5), "{text}");
        assert!(text.contains("incomplete after 7200 s"), "{text}");
    }

    #[test]
    fn a_slow_document_times_out_after_a_minute() {
        let mut deadlines = ResponseDeadlines::document();
        deadlines.end -= Duration::from_secs(59);
        deadlines.count(4 << 20);
        let (due, text) = deadlines.next();
        assert!(due <= Instant::now() + Duration::from_secs(1), "{text}");
        assert!(text.contains("incomplete after 60 s"), "{text}");
    }
}
