//! Progress of template builds on standard error: a bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use jiffy_client::{errln, terminal};
use jiffy_image::Progress;
use std::io::IsTerminal;
use std::time::Instant;

/// Shows how a template build is going. Silent as long as nothing has to be built.
pub struct TemplateProgress {
    name: String,
    /// True if a bar can be drawn.
    draws: bool,
    bar: Option<ProgressBar>,
    phase: String,
    told: u8,
    began: Instant,
}

impl TemplateProgress {
    /// For template `name`.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            draws: std::io::stderr().is_terminal(),
            bar: None,
            phase: String::new(),
            told: 0,
            began: Instant::now(),
        }
    }

    /// The same in lines, if it is to be `plain`, also on a terminal.
    pub fn plain(name: &str, plain: bool) -> Self {
        let mut bar = Self::new(name);
        bar.draws &= !plain;
        bar
    }

    /// True if the display shows this operation already.
    pub fn shows(&self, phase: &str) -> bool {
        self.phase == phase
    }

    /// Prints a line of a build, above the bar if there is one. A bold line needs a terminal.
    pub fn print(&self, line: &str, is_bold: bool) {
        let line = terminal::without_colours(line);
        let print = || match is_bold {
            true => terminal::print_bold_error(&line),
            false => errln!("{line}"),
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Ends the operation on display; another may follow.
    pub fn end(&mut self) {
        self.finish();
        self.bar = None;
        self.phase.clear();
    }

    /// Takes a sign of life.
    pub fn update(&mut self, progress: Progress<'_>) {
        match progress {
            Progress::Phase(phase) => self.on_phase(&phase.to_string()),
            Progress::Percent(percent) => self.on_percent(percent),
            Progress::Line(line) => {
                if let Some(bar) = &self.bar {
                    let line = terminal::without_colours(line);
                    let line: String = terminal::line(&line).chars().take(60).collect();
                    let phase = terminal::line(&self.phase);
                    bar.set_message(format!("{phase}: {line}"));
                    bar.tick();
                }
            }
        }
    }

    /// Something else goes on now.
    pub fn on_phase(&mut self, phase: &str) {
        phase.clone_into(&mut self.phase);
        let phase = terminal::line(phase);
        if !self.draws {
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

    /// Progress of the whole.
    pub fn on_percent(&mut self, percent: u8) {
        // Something else began.
        self.told = self.told.min(percent);
        match &self.bar {
            Some(bar) => bar.set_position(u64::from(percent)),
            None if percent >= self.told + 10 => {
                self.told = percent;
                let seconds = self.began.elapsed().as_secs();
                errln!(
                    "jiffy: template {}: {percent} % after {seconds} s",
                    self.name
                );
            }
            None => {}
        }
    }

    /// Takes the bar off the screen.
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
