//! Progress bar of operations in steps, on standard error.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress bar of an operation in steps. Shows nothing without a terminal.
#[derive(Debug)]
pub struct StepBar(ProgressBar);

impl StepBar {
    /// Creates a bar with the prefix `name`.
    pub fn new(name: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let style =
            ProgressStyle::with_template("{prefix} [{bar:30}] {percent:>3}% {elapsed} {msg}");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(crate::terminal::line(name).into_owned());
        Self(bar)
    }

    /// Shows that `done` of `total` units of `step` are done.
    pub fn update(&self, step: &'static str, done: u64, total: u64) {
        // Every change of the message redraws the bar.
        if self.0.message() != step {
            self.0.set_message(step);
        }
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Calls `print` while the bar is hidden.
    pub fn suspend(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }
}

impl Drop for StepBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
