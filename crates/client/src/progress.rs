//! Progress of long steps on standard error: a bar on a terminal, plain lines elsewhere.

use crate::terminal;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use jiffy_image::Progress;
use std::future::Future;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Time that work may take without a word.
const SPINNER_DELAY: Duration = Duration::from_secs(1);
/// Time between two pictures of a spinner.
const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

/// Waits for `work`. If it takes longer than a second, a terminal shows what it is and how long it
/// has taken.
pub async fn while_waiting<T>(what: &'static str, work: impl Future<Output = T>) -> T {
    show_waiting(what, work, SPINNER_DELAY, ProgressDrawTarget::stderr).await
}

async fn show_waiting<T>(
    what: &'static str,
    work: impl Future<Output = T>,
    delay: Duration,
    target: impl FnOnce() -> ProgressDrawTarget,
) -> T {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(delay, &mut work).await {
        return done;
    }
    // Nothing is drawn where there is no terminal. Dropped, it leaves no trace.
    let spinner = ProgressBar::with_draw_target(None, target())
        .with_elapsed(delay)
        .with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        spinner.set_style(style);
    }
    spinner.set_message(what);
    spinner.enable_steady_tick(SPINNER_INTERVAL);
    work.await
}

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
            false => crate::errln!("{line}"),
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
            crate::errln!("jiffy: template {}: {phase}", self.name);
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
                crate::errln!(
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

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;
    use std::sync::{Arc, Mutex};

    /// Remembers what was written.
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
        let seen = screen.clone();
        let work = async move {
            while !seen.text().contains("taking the snapshot") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let limit = Duration::from_secs(20);
        let shown = show_waiting("taking the snapshot", work, Duration::ZERO, || {
            screen.target()
        });
        tokio::time::timeout(limit, shown).await.unwrap();
        assert!(!screen.text().contains("snapshot"), "{}", screen.text());
    }
}
