//! Progress of template builds in this process, on standard error: a progress bar on a terminal,
//! otherwise lines.

use indicatif::{ProgressBar, ProgressStyle};
use jiffy_client::{errln, terminal};
use jiffy_image::Progress;
use std::io::IsTerminal;
use std::time::Instant;

/// Maximum number of characters of a log line next to the bar.
const MAX_LINE_CHARS: usize = 60;

/// Display of the progress of a template build. Prints nothing if the template exists.
pub struct TemplateProgress {
    name: String,
    /// True if a progress bar is drawn.
    uses_bar: bool,
    bar: Option<ProgressBar>,
    phase: String,
    /// Last percentage that was printed as a line.
    printed_percent: u8,
    start: Instant,
}

impl TemplateProgress {
    /// Creates a display for template `name`.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            uses_bar: std::io::stderr().is_terminal(),
            bar: None,
            phase: String::new(),
            printed_percent: 0,
            start: Instant::now(),
        }
    }

    /// Like [`Self::new`]. With `plain`, prints lines even on a terminal.
    pub fn plain(name: &str, plain: bool) -> Self {
        let mut bar = Self::new(name);
        bar.uses_bar &= !plain;
        bar
    }

    /// Returns whether the display already shows this phase.
    pub fn shows(&self, phase: &str) -> bool {
        self.phase == phase
    }

    /// Prints a log line of a build, above the bar if there is one. With `is_bold`, standard error
    /// must be a terminal.
    pub fn print(&self, line: &str, is_bold: bool) {
        let line = terminal::without_colours(line);
        let print = || {
            if is_bold {
                terminal::print_bold_error(&line);
            } else {
                errln!("{line}");
            }
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Ends the current operation and clears the display for the next.
    pub fn end(&mut self) {
        self.finish();
        self.bar = None;
        self.phase.clear();
    }

    /// Shows an update of a build.
    pub fn update(&mut self, progress: Progress<'_>) {
        match progress {
            Progress::Phase(phase) => self.on_phase(&phase.to_string()),
            Progress::Percent(percent) => self.on_percent(percent),
            Progress::Line(line) => {
                if let Some(bar) = &self.bar {
                    let line = terminal::without_colours(line);
                    // The bar needs one terminal line.
                    let line: String = terminal::line(&line).chars().take(MAX_LINE_CHARS).collect();
                    let phase = terminal::line(&self.phase);
                    bar.set_message(format!("{phase}: {line}"));
                    bar.tick();
                }
            }
        }
    }

    /// Shows the next phase.
    pub fn on_phase(&mut self, phase: &str) {
        phase.clone_into(&mut self.phase);
        let phase = terminal::line(phase);
        if !self.uses_bar {
            errln!("jiffy: template {}: {phase}", self.name);
            return;
        }
        let name = &self.name;
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(100);
            let style = ProgressStyle::with_template(
                "{prefix} [{bar:30}] {percent:>3}% {elapsed} {wide_msg}",
            );
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(format!("template {}", terminal::line(name)));
            bar
        });
        bar.set_message(phase.into_owned());
    }

    /// Shows the percentage of the current operation.
    pub fn on_percent(&mut self, percent: u8) {
        // A lower percentage means that another operation has started.
        self.printed_percent = self.printed_percent.min(percent);
        match &self.bar {
            Some(bar) => bar.set_position(u64::from(percent)),
            // One line per ten percent, so that a log stays short.
            None if percent >= self.printed_percent + 10 => {
                self.printed_percent = percent;
                let seconds = self.start.elapsed().as_secs();
                errln!(
                    "jiffy: template {}: {percent} % after {seconds} s",
                    self.name
                );
            }
            None => {}
        }
    }

    /// Removes the bar from the terminal.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for TemplateProgress {
    fn drop(&mut self) {
        self.finish();
    }
}
