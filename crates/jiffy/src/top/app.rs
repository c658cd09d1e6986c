//! Event loop of `jiffy top`: connects the model with the terminal and with the API.

use super::command_text::CommandText;
use super::control::{Effect, press};
use super::header::ResourceSource;
use super::input::Input;
use super::keys::Key;
use super::model::{Mode, Model, SnapshotLine, Target};
use super::requests::{self, Update};
use super::schedule::Schedule;
use super::screen::{LEAVE, Screen};
use super::shell::{self, ShellEnd};
use super::text_view::{TextSource, TextView};
use super::view;
use crate::cli::HostArgs;
use crate::run::{Signals, terminal_size};
use crate::sandbox::table::now_ms;
use anyhow::Context;
use data_encoding::BASE64;
use jiffy_client::Client;
use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::{Terminal, TerminalOptions, Viewport};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::MissedTickBehavior;

/// Maximum number of results in the queue.
const MAX_UPDATES: usize = 64;
/// Interval of reads of the resources of the host.
const RESOURCE_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of reads of the usage of sandboxes that are not on the screen, if the order depends on
/// it. The daemon samples them at this interval.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of sandboxes whose usage is measured at each refresh.
const MAX_MEASURED: usize = 200;
/// Maximum number of sandboxes whose samples are read.
const MAX_SAMPLED: usize = 10_000;
/// Minimum interval of drawings that no key has caused.
const DRAW_INTERVAL: Duration = Duration::from_millis(250);
/// Exit code of a process that a signal ended, minus the number of the signal.
const SIGNAL_EXIT_CODE: u8 = 128;

/// Terminal of this process.
type Display = Terminal<CrosstermBackend<BufWriter<File>>>;

/// Reads that are in flight, of each kind at most one, and the times of the next ones.
#[derive(Debug)]
struct Reads {
    sandboxes: Schedule,
    /// True while usage is being read.
    usage: bool,
    /// True while the resources of the host are read.
    resources: bool,
    /// True while the text of the open view is read.
    text: bool,
    /// Time of the next read of the resources.
    next_resources: Instant,
    /// Time of the next read of the usage of all sandboxes.
    next_samples: Instant,
    /// Source of the resources that were read last.
    source: Option<ResourceSource>,
    /// True if the feed of events fails: the list is read periodically instead.
    has_no_events: bool,
    /// True if the last read of the list has failed.
    has_no_list: bool,
}

/// Running program.
pub struct App {
    // The display is dropped before the guard restores the terminal.
    display: Display,
    /// Guard of full-screen mode. `None` while a shell uses the terminal.
    screen: Option<Screen>,
    input: Input,
    /// Handles of standard input and output, which are the same terminal.
    terminal: [File; 2],
    model: Model,
    client: Client,
    host: HostArgs,
    commands: CommandText,
    reads: Reads,
    updates: Sender<Update>,
    received: Receiver<Update>,
    interval: Duration,
}

/// Returns a handle of a standard stream.
fn handle(stream: impl AsFd) -> io::Result<File> {
    Ok(File::from(stream.as_fd().try_clone_to_owned()?))
}

fn area() -> Rect {
    let size = terminal_size();
    Rect::new(0, 0, size.cols, size.rows)
}

impl App {
    /// Switches the terminal to full-screen mode.
    pub fn start(
        client: Client,
        model: Model,
        host: &HostArgs,
        interval: Duration,
    ) -> anyhow::Result<Self> {
        let terminal = [handle(io::stdin())?, handle(io::stdout())?];
        let input = Input::new(terminal[0].try_clone()?).context("cannot read the terminal")?;
        let output = BufWriter::new(terminal[1].try_clone()?);
        let viewport = Viewport::Fixed(area());
        let display =
            Terminal::with_options(CrosstermBackend::new(output), TerminalOptions { viewport })?;
        let screen = Screen::enter(&terminal[0], &terminal[1]);
        let screen = screen.context("cannot switch the terminal to full-screen mode")?;
        let (updates, received) = mpsc::channel(MAX_UPDATES);
        let now = Instant::now();
        Ok(Self {
            display,
            screen: Some(screen),
            input,
            terminal,
            model,
            client,
            host: host.clone(),
            commands: CommandText::new(host),
            reads: Reads {
                sandboxes: Schedule::new(now),
                usage: false,
                resources: false,
                text: false,
                next_resources: now,
                next_samples: now,
                source: None,
                has_no_events: false,
                has_no_list: false,
            },
            updates,
            received,
            interval,
        })
    }

    /// Runs until the user quits, a signal arrives or the terminal is closed. Returns the exit
    /// code.
    pub async fn run(mut self, mut signals: Signals) -> anyhow::Result<ExitCode> {
        let mut resized = signal(SignalKind::window_change())?;
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let events = requests::follow_events(self.client.clone(), self.updates.clone());
        tokio::spawn(events);
        let mut next_drawing = Some(Instant::now());
        let mut drawn = Instant::now();
        loop {
            self.start_reads();
            let now = Instant::now();
            if next_drawing.is_some_and(|time| time <= now) {
                self.draw()?;
                next_drawing = None;
                drawn = now;
            }
            // Changes that follow each other are drawn together.
            let soon = Some(next_drawing.unwrap_or(drawn + DRAW_INTERVAL));
            let next_read = self.reads.sandboxes.next_time();
            tokio::select! {
                keys = self.input.next() => {
                    let keys = keys.context("the terminal was closed")?;
                    if let Some(code) = self.press_all(keys, &mut signals).await? {
                        return Ok(code);
                    }
                    next_drawing = Some(Instant::now());
                }
                number = signals.next() => return Ok(signal_code(number)),
                _ = resized.recv() => {
                    self.resize()?;
                    next_drawing = Some(Instant::now());
                }
                Some(update) = self.received.recv() => {
                    self.apply(update);
                    while let Ok(update) = self.received.try_recv() {
                        self.apply(update);
                    }
                    next_drawing = soon;
                }
                _ = ticks.tick() => {
                    self.tick();
                    next_drawing = soon;
                }
                () = sleep_until(next_read) => {}
                () = sleep_until(next_drawing) => {}
            }
        }
    }

    fn draw(&mut self) -> io::Result<()> {
        let (model, now) = (&mut self.model, now_ms());
        self.display.draw(|frame| {
            if let Some(cursor) = view::draw(model, frame.buffer_mut(), now) {
                frame.set_cursor_position(cursor);
            }
        })?;
        Ok(())
    }

    /// Draws the whole screen again, in its current size.
    fn resize(&mut self) -> io::Result<()> {
        self.display.resize(area())
    }

    /// Applies keys. Returns the exit code if the program ends.
    async fn press_all(
        &mut self,
        keys: Vec<Key>,
        signals: &mut Signals,
    ) -> anyhow::Result<Option<ExitCode>> {
        for key in keys {
            let effect = press(&mut self.model, key, &self.commands);
            match effect {
                None => {}
                Some(Effect::Quit) => return Ok(Some(ExitCode::SUCCESS)),
                Some(Effect::Redraw) => self.resize()?,
                Some(Effect::Copy(text)) => {
                    let text = jiffy_client::terminal::line(&text);
                    self.copy(&text, &text)?;
                }
                Some(Effect::CopyText(lines)) => {
                    self.copy(&lines.join("\n"), "the whole text")?;
                }
                Some(Effect::ReadText) => self.read_text(),
                Some(Effect::ReadSnapshots(target)) => self.spawn(|client| async move {
                    let snapshots = requests::snapshots(&client, &target).await;
                    Update::Snapshots(target, snapshots)
                }),
                Some(Effect::Operate(operation, target)) => self.spawn(|client| async move {
                    requests::operate(&client, &operation, target).await
                }),
                Some(Effect::Shell(target)) => {
                    // Leaves full-screen mode.
                    self.screen = None;
                    let end = shell::run(&target.id, &self.host, &mut self.input, signals).await;
                    if let Ok(ShellEnd::Signal(number)) = end {
                        // Programs in the shell had no time to reset the terminal. An error means
                        // that the terminal is closed.
                        let _ = (&self.terminal[1]).write_all(LEAVE);
                        return Ok(Some(signal_code(number)));
                    }
                    self.screen = Some(Screen::enter(&self.terminal[0], &self.terminal[1])?);
                    self.resize()?;
                    if let Err(e) = end {
                        let text = format!("cannot open a shell in {}: {e}", target.label);
                        self.model.report(&text, true);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Copies a text by the sequence OSC 52, which terminals may ignore, and shows its description.
    fn copy(&mut self, text: &str, description: &str) -> io::Result<()> {
        let output = self.display.backend_mut();
        write!(output, "\x1b]52;c;{}\x07", BASE64.encode(text.as_bytes()))?;
        Write::flush(output)?;
        self.model.report(&format!("copied: {description}"), false);
        Ok(())
    }

    /// Executes a request, whose result becomes an update.
    fn spawn<F>(&self, request: impl FnOnce(Client) -> F)
    where
        F: Future<Output = Update> + Send + 'static,
    {
        let request = request(self.client.clone());
        let updates = self.updates.clone();
        tokio::spawn(async move {
            // An error means that the program ends.
            let _ = updates.send(request.await).await;
        });
    }

    /// Starts a read of sandboxes, if its time has come.
    fn start_reads(&mut self) {
        if let Some(read) = self.reads.sandboxes.start(Instant::now()) {
            self.spawn(|client| async move { requests::read(&client, read).await });
        }
    }

    /// Starts the periodic reads.
    fn tick(&mut self) {
        let now = Instant::now();
        if self.reads.has_no_events || self.reads.has_no_list {
            self.reads.sandboxes.request_list();
        }
        self.read_usage(now);
        self.read_text();
        if !self.reads.resources && now >= self.reads.next_resources {
            self.reads.resources = true;
            self.reads.next_resources = now + RESOURCE_INTERVAL;
            let source = self.reads.source;
            self.spawn(|client| async move {
                let source = match source {
                    Some(source) => Ok(source),
                    None => requests::resource_source(&client).await,
                };
                Update::Resources(match source {
                    Ok(source) => requests::resources(&client, source).await,
                    Err(e) => Err(e),
                })
            });
        }
    }

    /// Requests the usage of the visible sandboxes, and samples of all if they are sorted by usage.
    fn read_usage(&mut self, now: Instant) {
        if self.reads.usage || !self.model.is_loaded {
            return;
        }
        let mut measured = self.model.visible_running();
        measured.truncate(MAX_MEASURED);
        let mut sampled = Vec::new();
        if self.model.is_sorted_by_usage() && now >= self.reads.next_samples {
            self.reads.next_samples = now + SAMPLE_INTERVAL;
            sampled = self.model.running();
            sampled.truncate(MAX_SAMPLED);
        }
        if measured.is_empty() && sampled.is_empty() {
            return;
        }
        self.reads.usage = true;
        self.spawn(|client| async move {
            Update::Usage(requests::usage(&client, &measured, &sampled).await)
        });
    }

    /// Reads the text of the open view.
    fn read_text(&mut self) {
        let messages = self.model.messages().map(|message| message.text.clone());
        let messages: Vec<String> = messages.collect();
        let Mode::Text(view) = &mut self.model.mode else {
            return;
        };
        match view.source.clone() {
            TextSource::Messages => view.set_text(messages),
            TextSource::Help => view.set_text(super::help()),
            source if !self.reads.text => {
                self.reads.text = true;
                self.spawn(|client| async move {
                    let text = requests::text(&client, &source).await;
                    Update::Text(source, text)
                });
            }
            _ => {}
        }
    }

    /// Applies the result of a request to the model.
    fn apply(&mut self, update: Update) {
        let now = Instant::now();
        match update {
            Update::Listed(result) => {
                self.reads.sandboxes.finish(now);
                self.reads.has_no_list = result.is_err();
                if let Some(rows) = self.connected(result) {
                    let is_first = !self.model.is_loaded;
                    self.model.replace(rows);
                    if is_first {
                        self.read_usage(now);
                    }
                }
            }
            Update::Changed(result) => {
                self.reads.sandboxes.finish(now);
                match result {
                    Ok(changes) => self.model.change(changes),
                    // For example, a broken sandbox of another key is only in the list.
                    Err(_) => self.reads.sandboxes.request_list(),
                }
            }
            Update::Usage(result) => {
                self.reads.usage = false;
                if let Some(usage) = self.connected(result) {
                    self.model.set_usage(&usage);
                }
            }
            Update::Resources(result) => {
                self.reads.resources = false;
                if let Some(resources) = self.connected(result) {
                    self.reads.source = resources.source();
                    self.model.header.resources = resources;
                }
            }
            Update::Events(result) => {
                self.reads.has_no_events = result.is_err();
                if let Ok(changes) = result {
                    if changes.is_incomplete {
                        self.reads.sandboxes.request_list();
                    }
                    self.reads.sandboxes.add(changes.ids);
                }
            }
            Update::Done {
                target,
                result,
                changes,
            } => {
                self.model.set_operation(&target.id, None);
                self.model.change(changes);
                match result {
                    Ok(text) => self.model.report(&text, false),
                    Err(e) => self.model.report(&format!("{}: {e:#}", target.label), true),
                }
            }
            Update::Text(source, result) => {
                self.reads.text = false;
                self.show_text(&source, result);
            }
            Update::Snapshots(target, result) => self.show_snapshots(&target, result),
        }
    }

    /// Returns the result of a periodic read. An error is shown until a read succeeds.
    fn connected<T>(&mut self, result: anyhow::Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.model.connection_error = None;
                Some(value)
            }
            Err(e) => {
                let text = format!("{e:#}");
                self.model.connection_error =
                    Some(jiffy_client::terminal::line(&text).into_owned());
                None
            }
        }
    }

    /// Shows a text in its view, unless the view was closed.
    fn show_text(&mut self, source: &TextSource, result: anyhow::Result<Vec<String>>) {
        let is_open = |view: &&mut TextView| view.source == *source;
        let view = match &mut self.model.mode {
            Mode::Text(view) => Some(view).filter(is_open),
            _ => None,
        };
        let Some(view) = view else { return };
        match result {
            Ok(lines) => view.set_text(lines),
            Err(e) => {
                // A text that was read before remains.
                if !view.is_loaded() {
                    self.model.mode = Mode::Table;
                }
                self.model.report(&format!("{e:#}"), true);
            }
        }
    }

    /// Shows the snapshots of a sandbox, unless the user has left the list.
    fn show_snapshots(&mut self, target: &Target, result: anyhow::Result<Vec<SnapshotLine>>) {
        let Mode::Snapshots(list) = &mut self.model.mode else {
            return;
        };
        if list.target != *target {
            return;
        }
        match result {
            Ok(snapshots) => list.snapshots = Some(snapshots),
            Err(e) => {
                self.model.mode = Mode::Table;
                self.model.report(&format!("{}: {e:#}", target.label), true);
            }
        }
    }
}

/// Returns the exit code of a process that a signal ended.
fn signal_code(number: i32) -> ExitCode {
    let number = u8::try_from(number).unwrap_or(0);
    ExitCode::from(SIGNAL_EXIT_CODE.saturating_add(number))
}

/// Waits until a time. Never returns without one.
async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}
