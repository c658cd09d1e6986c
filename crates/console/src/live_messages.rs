//! Messages of a browser at `/live`, and the terminals that its tab shows. Public for fuzzing: a
//! browser may send any bytes.
//!
//! The page of the web console opens a WebSocket at `/live`. Through it, a tab opens terminals of
//! sandboxes, follows events and requests the usage of sandboxes.

use bytes::Bytes;
use jiffy_agent_client::PtySize;
use serde::Deserialize;
use std::collections::HashMap;

/// Maximum size of a message of a browser. Pasted text is sent in several messages.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Maximum number of terminals in one tab.
pub const MAX_STREAMS: usize = 64;
/// Maximum number of sandboxes whose usage a tab shows.
pub const MAX_DISPLAYED: usize = 200;
/// Maximum number of rows and columns of a terminal.
pub const MAX_CELLS: u16 = 1000;

/// Message of a browser.
#[derive(Debug, Deserialize)]
#[serde(
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    tag = "type"
)]
enum Command {
    /// Starts a shell.
    Open {
        stream: u32,
        sandbox: String,
        cols: u16,
        rows: u16,
        user: Option<String>,
        shell: Option<String>,
    },
    /// Shows an existing terminal.
    Attach {
        stream: u32,
        sandbox: String,
        terminal: String,
        cols: u16,
        rows: u16,
    },
    /// Changes the size of a terminal.
    Resize { stream: u32, cols: u16, rows: u16 },
    /// Acknowledges output that was drawn.
    Ack { stream: u32, bytes: u64 },
    /// Stops showing a terminal, which continues to run.
    Detach { stream: u32 },
    /// Ends a terminal.
    End { stream: u32 },
    /// Follows the events that the caller sees, after the event with this id, or from now on.
    Follow { after: Option<String> },
    /// Shows the usage of these sandboxes, and of no others.
    Display { sandboxes: Vec<String> },
}

/// Terminal that a browser requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TerminalRequest {
    /// Number of the stream in this tab.
    pub stream: u32,
    /// Sandbox, as the browser names it.
    pub sandbox: String,
    /// Size, of which each side has 1 to [`MAX_CELLS`] cells.
    pub size: PtySize,
    /// Terminal to start or to attach.
    pub terminal: RequestedTerminal,
}

/// Terminal to start or to attach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestedTerminal {
    /// A new terminal. `None` for the default user and the default shell of the user.
    New {
        /// User.
        user: Option<String>,
        /// Shell.
        shell: Option<String>,
    },
    /// An existing terminal.
    Existing(String),
}

/// Effects of messages, which [`TabMessages`] requests.
pub trait TabActions {
    /// Terminal that the tab shows. Dropping it detaches the tab.
    type Shown;

    /// Starts or attaches a terminal and informs the browser. `None` if this failed.
    fn show(&mut self, request: TerminalRequest) -> impl Future<Output = Option<Self::Shown>>;

    /// Informs the browser that a message failed.
    fn fail(&mut self, stream: u32, message: &str) -> impl Future<Output = ()>;

    /// Changes the size of a terminal.
    fn resize(&mut self, shown: &Self::Shown, size: PtySize) -> impl Future<Output = ()>;

    /// Acknowledges `bytes` more bytes of the output of a terminal.
    fn acknowledge(&mut self, shown: &Self::Shown, bytes: u64);

    /// Sends input to a terminal.
    fn input(&mut self, shown: &Self::Shown, input: Bytes) -> impl Future<Output = ()>;

    /// Ends a terminal.
    fn end(&mut self, shown: Self::Shown) -> impl Future<Output = ()>;

    /// Replaces the followed events by those after the event `after`, or from now on.
    fn follow(&mut self, after: Option<String>);

    /// Replaces the sandboxes whose usage is shown by at most [`MAX_DISPLAYED`] sandboxes.
    fn display(&mut self, sandboxes: Vec<String>);
}

/// Processes the messages of a tab.
#[derive(Debug)]
pub struct TabMessages<A: TabActions> {
    actions: A,
    /// Open terminals of a browser tab, by the number that the tab has chosen.
    streams: HashMap<u32, A::Shown>,
}

impl<A: TabActions> TabMessages<A> {
    /// Creates a tab that shows no terminal.
    pub fn new(actions: A) -> Self {
        Self {
            actions,
            streams: HashMap::new(),
        }
    }

    /// Returns the effects of the messages.
    pub fn actions(&self) -> &A {
        &self.actions
    }

    /// Returns the number of terminals that the tab shows, at most [`MAX_STREAMS`].
    pub fn shown_count(&self) -> usize {
        self.streams.len()
    }

    /// Processes a control message. Invalid messages have no effect.
    pub async fn text(&mut self, text: &str) {
        match serde_json::from_str(text) {
            Ok(command) => self.run(command).await,
            Err(e) => tracing::debug!(error = %e, "ignored an invalid message of a browser tab"),
        }
    }

    /// Processes input: the number of the stream as four bytes, then the data.
    pub async fn binary(&mut self, bytes: Bytes) {
        let Some((stream, _)) = bytes.split_first_chunk::<4>() else {
            return;
        };
        if let Some(shown) = self.streams.get(&u32::from_be_bytes(*stream)) {
            self.actions.input(shown, bytes.slice(4..)).await;
        }
    }

    /// Executes a command of the browser. Unknown streams are ignored.
    async fn run(&mut self, command: Command) {
        match command {
            Command::Open {
                stream,
                sandbox,
                cols,
                rows,
                user,
                shell,
            } => {
                let terminal = RequestedTerminal::New {
                    user: user.filter(|user| !user.is_empty()),
                    shell: shell.filter(|shell| !shell.is_empty()),
                };
                self.show((stream, sandbox), terminal, size(cols, rows))
                    .await;
            }
            Command::Attach {
                stream,
                sandbox,
                terminal,
                cols,
                rows,
            } => {
                let terminal = RequestedTerminal::Existing(terminal);
                self.show((stream, sandbox), terminal, size(cols, rows))
                    .await;
            }
            Command::Resize { stream, cols, rows } => {
                if let Some(shown) = self.streams.get(&stream) {
                    self.actions.resize(shown, size(cols, rows)).await;
                }
            }
            Command::Ack { stream, bytes } => {
                if let Some(shown) = self.streams.get(&stream) {
                    self.actions.acknowledge(shown, bytes);
                }
            }
            Command::Detach { stream } => drop(self.streams.remove(&stream)),
            Command::End { stream } => {
                if let Some(shown) = self.streams.remove(&stream) {
                    self.actions.end(shown).await;
                }
            }
            Command::Follow { after } => self.actions.follow(after),
            Command::Display { mut sandboxes } => {
                sandboxes.truncate(MAX_DISPLAYED);
                self.actions.display(sandboxes);
            }
        }
    }

    /// Shows a terminal on a new stream of this connection.
    async fn show(
        &mut self,
        (stream, sandbox): (u32, String),
        terminal: RequestedTerminal,
        size: PtySize,
    ) {
        if self.streams.contains_key(&stream) || self.streams.len() >= MAX_STREAMS {
            let message = "the stream is in use, or the tab has too many";
            self.actions.fail(stream, message).await;
            return;
        }
        let request = TerminalRequest {
            stream,
            sandbox,
            size,
            terminal,
        };
        if let Some(shown) = self.actions.show(request).await {
            self.streams.insert(stream, shown);
        }
    }
}

fn size(cols: u16, rows: u16) -> PtySize {
    PtySize {
        cols: cols.clamp(1, MAX_CELLS),
        rows: rows.clamp(1, MAX_CELLS),
    }
}
