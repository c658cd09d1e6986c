//! Spinner on standard error for slow operations.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::future::Future;
use std::time::Duration;

/// Delay before the spinner is shown.
const SPINNER_DELAY: Duration = Duration::from_secs(1);
/// Interval between two updates of the spinner.
const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

/// Waits for `work`. After a delay, shows `description` and the elapsed time if standard error is a
/// terminal.
pub async fn while_waiting<T>(description: &'static str, work: impl Future<Output = T>) -> T {
    show_waiting(description, work, SPINNER_DELAY, ProgressDrawTarget::stderr).await
}

/// Awaits `work`, and shows a spinner with the description if it takes longer than `delay`.
async fn show_waiting<T>(
    description: &'static str,
    work: impl Future<Output = T>,
    delay: Duration,
    target: impl FnOnce() -> ProgressDrawTarget,
) -> T {
    let mut work = std::pin::pin!(work);
    if let Ok(result) = tokio::time::timeout(delay, &mut work).await {
        return result;
    }
    // The spinner is not drawn without a terminal, and is cleared when it is dropped.
    let spinner = ProgressBar::with_draw_target(None, target())
        .with_elapsed(delay)
        .with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        // An invalid template would only affect the appearance.
        spinner.set_style(style);
    }
    spinner.set_message(description);
    spinner.enable_steady_tick(SPINNER_INTERVAL);
    work.await
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;
    use std::sync::{Arc, Mutex};

    /// Terminal that stores its output.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn text(&self) -> String {
            self.0.lock().unwrap().clone()
        }

        fn target(&self) -> ProgressDrawTarget {
            ProgressDrawTarget::term_like(Box::new(self.clone()))
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn short_work_shows_no_spinner() {
        let screen = Screen::default();
        let work = async { 7 };
        let hour = Duration::from_secs(3600);
        assert_eq!(
            show_waiting("work", work, hour, || screen.target()).await,
            7
        );
        assert_eq!(screen.text(), "");
    }

    #[tokio::test]
    async fn long_work_shows_a_spinner_until_it_ends() {
        let screen = Screen::default();
        let output = screen.clone();
        let work = async move {
            while !output.text().contains("taking the snapshot") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let limit = Duration::from_secs(20);
        let result = show_waiting("taking the snapshot", work, Duration::ZERO, || {
            screen.target()
        });
        tokio::time::timeout(limit, result).await.unwrap();
        assert!(!screen.text().contains("snapshot"), "{}", screen.text());
    }
}
