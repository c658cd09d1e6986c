//! Progress of long steps on standard error: a bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use jiffy_image::Progress;
use std::io::IsTerminal;
use std::time::Instant;

/// Shows how a template build is going. Silent as long as nothing has to be built.
pub struct Bar {
    name: String,
    /// Whether a bar can be drawn.
    draws: bool,
    bar: Option<ProgressBar>,
    phase: String,
    told: u8,
    began: Instant,
}

impl Bar {
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

    /// Whether this goes on already, as far as is shown.
    pub fn shows(&self, phase: &str) -> bool {
        self.phase == phase
    }

    /// Prints a line, above the bar if there is one.
    pub fn print(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// What was shown is over; something else may follow.
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
                    let line: String = line.chars().filter(|c| !c.is_control()).take(60).collect();
                    bar.set_message(format!("{}: {line}", self.phase));
                    bar.tick();
                }
            }
        }
    }

    /// Something else goes on now.
    pub fn on_phase(&mut self, phase: &str) {
        self.phase = phase.to_owned();
        if !self.draws {
            eprintln!("jiffy: template {}: {phase}", self.name);
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
            bar.set_prefix(format!("template {name}"));
            bar
        });
        bar.set_message(self.phase.clone());
    }

    /// How far all of it is.
    pub fn on_percent(&mut self, percent: u8) {
        // Something else began.
        self.told = self.told.min(percent);
        match &self.bar {
            Some(bar) => bar.set_position(u64::from(percent)),
            None if percent >= self.told + 10 => {
                self.told = percent;
                let seconds = self.began.elapsed().as_secs();
                eprintln!(
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

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}
