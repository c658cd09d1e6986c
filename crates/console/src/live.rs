//! `/live`: one WebSocket per browser tab. It carries terminals, events and the usage of displayed
//! sandboxes, and ends with its session.
//!
//! Control messages are JSON ([`Command`], [`Notice`]). Binary messages are input and output of
//! terminals: the number of the stream as four bytes, then the data.

use crate::Console;
use crate::codes::random_hex;
use crate::files::open;
use crate::live_feeds::{Viewer, display, follow};
use crate::refusal::Refusal;
use crate::session_store::Session;
use crate::terminal::{NewTerminal, Status, Terminal, View};
use axum::Extension;
use axum::Json;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, State};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use jiffy_agent_client::PtySize;
use jiffy_api::{Caller, ClientAddress};
use jiffy_api_types::Event;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Maximum size of a message of a browser. Pasted text is sent in several messages.
const MAX_MESSAGE: usize = 64 * 1024;
/// Maximum number of terminals in one tab.
const MAX_STREAMS: usize = 64;
/// Maximum number of sandboxes whose usage a tab shows.
const MAX_DISPLAYED: usize = 200;
/// Maximum number of messages in the queue of a slow browser.
const MAX_QUEUED: usize = 16;
/// Interval of checks of the session. Time limit of the last message to a browser.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of rows and columns of a terminal.
const MAX_CELLS: u16 = 1000;
/// Close code for a session that has ended (private range of RFC 6455).
const SESSION_ENDED: u16 = 4401;

static NEXT_VIEWER: AtomicU64 = AtomicU64::new(1);

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

/// Message to a browser.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub(crate) enum Notice {
    /// The terminal is shown.
    Opened { stream: u32, terminal: String },
    /// The terminal has no further output.
    Ended {
        stream: u32,
        #[serde(flatten)]
        status: Status,
    },
    /// A command failed.
    Failed { stream: u32, message: String },
    /// New events, and the id after which the tab continues when it connects again. With `gap`,
    /// earlier events cannot be received any longer.
    Events {
        events: Vec<Event>,
        next: Option<String>,
        gap: bool,
    },
}

/// `GET /guest/{id}/terminals`: lists the terminals that can be attached.
pub(crate) async fn list(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Refusal> {
    let access = console.app.guest_access(&caller, &id)?;
    let terminals = console
        .terminals
        .of(&access.id)
        .into_iter()
        .map(|terminal| {
            json!({
                "id": terminal.id, "pid": terminal.pid, "user": terminal.user,
                "startedMs": terminal.started_ms, "status": terminal.status(),
            })
        });
    Ok(Json(json!({ "terminals": terminals.collect::<Vec<_>>() })))
}

/// `GET /live`: upgrades to a WebSocket.
pub(crate) async fn upgrade(
    State(console): State<Console>,
    Extension(session): Extension<Session>,
    Extension(from): Extension<ClientAddress>,
    socket: WebSocketUpgrade,
) -> Response {
    socket
        .max_message_size(MAX_MESSAGE)
        .max_frame_size(MAX_MESSAGE)
        .on_upgrade(move |socket| serve(console, session, from, socket))
}

/// Serves a tab until it is closed or its session ends.
async fn serve(console: Console, session: Session, from: ClientAddress, socket: WebSocket) {
    let (sink, messages) = socket.split();
    let (queue, queued) = mpsc::channel(MAX_QUEUED);
    let mut sender = tokio::spawn(send(sink, queued));
    let mut tab = Tab {
        console: console.clone(),
        session: session.clone(),
        from,
        queue: queue.clone(),
        streams: HashMap::new(),
        following: None,
        displaying: None,
    };
    // The check of the session must not wait for a command, for example for input of a guest that
    // reads none.
    let has_ended = tokio::select! {
        () = tab.receive(messages) => false,
        _ = &mut sender => false,
        () = session_end(&console, &session, from) => true,
    };
    // Detaches the viewers; the terminals continue to run.
    drop(tab);
    if has_ended {
        let reason = "the session has ended".into();
        let close = Message::Close(Some(CloseFrame {
            code: SESSION_ENDED,
            reason,
        }));
        let _ = tokio::time::timeout(CHECK_INTERVAL, queue.send(close)).await;
    }
    drop(queue);
    if tokio::time::timeout(CHECK_INTERVAL, &mut sender)
        .await
        .is_err()
    {
        sender.abort();
    }
}

/// Waits until the session has ended.
async fn session_end(console: &Console, session: &Session, from: ClientAddress) {
    let mut changes = console.sessions_changed.subscribe();
    let mut checks = tokio::time::interval(CHECK_INTERVAL);
    while is_valid(console, session, from) {
        tokio::select! {
            _ = changes.changed() => {}
            _ = checks.tick() => {}
        }
    }
}

/// Returns whether the session exists and its key is in force. An error of the database does not
/// end the session.
fn is_valid(console: &Console, session: &Session, from: ClientAddress) -> bool {
    let exists = console.sessions.exists(&session.id).unwrap_or(true);
    exists
        && console
            .caller_of(session, from)
            .is_ok_and(|caller| caller.is_some())
}

async fn send(mut sink: SplitSink<WebSocket, Message>, mut queued: mpsc::Receiver<Message>) {
    while let Some(message) = queued.recv().await {
        let is_last = matches!(message, Message::Close(_));
        if sink.send(message).await.is_err() || is_last {
            return;
        }
    }
}

/// State of a tab.
struct Tab {
    console: Console,
    session: Session,
    from: ClientAddress,
    queue: mpsc::Sender<Message>,
    streams: HashMap<u32, Stream>,
    following: Option<Task>,
    displaying: Option<Task>,
}

/// Task of a tab, which ends when it is dropped.
struct Task(AbortHandle);

impl Task {
    fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(work).abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A terminal that a tab shows.
struct Stream {
    viewer: u64,
    terminal: Arc<Terminal>,
    _forwarding: Task,
}

impl Tab {
    /// Processes the messages of the browser until it disconnects.
    async fn receive(&mut self, mut messages: SplitStream<WebSocket>) {
        while let Some(Ok(message)) = messages.next().await {
            match message {
                Message::Text(text) => self.command(&text).await,
                Message::Binary(bytes) => self.input(bytes).await,
                Message::Close(_) => return,
                _ => {}
            }
        }
    }

    async fn command(&mut self, text: &str) {
        let command: Command = match serde_json::from_str(text) {
            Ok(command) => command,
            Err(e) => {
                tracing::debug!(error = %e, "invalid message of a browser");
                return;
            }
        };
        let stream = match &command {
            Command::Open { stream, .. } | Command::Attach { stream, .. } => *stream,
            _ => 0,
        };
        if let Err(refusal) = self.run(command).await {
            let message = refusal.message();
            self.notify(&Notice::Failed { stream, message }).await;
        }
    }

    async fn run(&mut self, command: Command) -> Result<(), Refusal> {
        match command {
            Command::Open {
                stream,
                sandbox,
                cols,
                rows,
                user,
                shell,
            } => {
                self.check_stream(stream)?;
                let guest = open(&self.console.app, &self.caller()?, &sandbox)?;
                let new = NewTerminal {
                    id: random_hex::<8>()?,
                    size: size(cols, rows),
                    user: user.filter(|user| !user.is_empty()),
                    shell: shell.filter(|shell| !shell.is_empty()),
                };
                let terminal = self.console.terminals.start(guest, new).await?;
                self.show(stream, terminal).await;
            }
            Command::Attach {
                stream,
                sandbox,
                terminal,
                cols,
                rows,
            } => {
                self.check_stream(stream)?;
                let access = self.console.app.guest_access(&self.caller()?, &sandbox)?;
                let found = self.console.terminals.find(&access.id, &terminal);
                let Some(terminal) = found else {
                    return Err(Refusal::invalid("the terminal has ended"));
                };
                if terminal.status() == Status::Running {
                    terminal.resize(size(cols, rows)).await;
                }
                self.show(stream, terminal).await;
            }
            Command::Resize { stream, cols, rows } => {
                if let Some(shown) = self.streams.get(&stream) {
                    shown.terminal.resize(size(cols, rows)).await;
                }
            }
            Command::Ack { stream, bytes } => {
                if let Some(shown) = self.streams.get(&stream) {
                    shown.terminal.acknowledge(shown.viewer, bytes);
                }
            }
            Command::Detach { stream } => drop(self.streams.remove(&stream)),
            Command::End { stream } => {
                if let Some(shown) = self.streams.remove(&stream) {
                    shown.terminal.hang_up().await;
                    self.console.terminals.forget(&shown.terminal);
                }
            }
            Command::Follow { after } => {
                // The former stream is closed first, because streams of a key are limited.
                self.following = None;
                let (console, viewer, queue) = self.for_feed();
                self.following = Some(Task::spawn(follow(console, viewer, after, queue)));
            }
            Command::Display { mut sandboxes } => {
                sandboxes.truncate(MAX_DISPLAYED);
                self.displaying = None;
                if !sandboxes.is_empty() {
                    let (console, viewer, queue) = self.for_feed();
                    let display = display(console, viewer, sandboxes, queue);
                    self.displaying = Some(Task::spawn(display));
                }
            }
        }
        Ok(())
    }

    fn for_feed(&self) -> (Console, Viewer, mpsc::Sender<Message>) {
        let viewer = (self.session.clone(), self.from);
        (self.console.clone(), viewer, self.queue.clone())
    }

    fn caller(&self) -> Result<Caller, Refusal> {
        let caller = self.console.caller_of(&self.session, self.from)?;
        caller.ok_or_else(Refusal::signed_out)
    }

    fn check_stream(&self, stream: u32) -> Result<(), Refusal> {
        if self.streams.contains_key(&stream) || self.streams.len() >= MAX_STREAMS {
            return Err(Refusal::invalid(
                "the stream is in use, or the tab has too many",
            ));
        }
        Ok(())
    }

    /// Shows a terminal in the tab.
    async fn show(&mut self, stream: u32, terminal: Arc<Terminal>) {
        let opened = Notice::Opened {
            stream,
            terminal: terminal.id.clone(),
        };
        self.notify(&opened).await;
        let viewer = NEXT_VIEWER.fetch_add(1, Ordering::Relaxed);
        let view = terminal.view(viewer);
        let forwarding = Task::spawn(forward(view, stream, self.queue.clone()));
        let shown = Stream {
            viewer,
            terminal,
            _forwarding: forwarding,
        };
        self.streams.insert(stream, shown);
    }

    async fn input(&self, bytes: Bytes) {
        let Some((stream, input)) = bytes.split_at_checked(4) else {
            return;
        };
        let Ok(stream) = stream.try_into().map(u32::from_be_bytes) else {
            return;
        };
        if let Some(shown) = self.streams.get(&stream) {
            shown.terminal.write(Bytes::copy_from_slice(input)).await;
        }
    }

    async fn notify(&self, notice: &Notice) {
        // An error means that the browser has disconnected.
        let _ = self.queue.send(text(notice)).await;
    }
}

pub(crate) fn text(notice: &Notice) -> Message {
    Message::Text(serde_json::to_string(notice).unwrap_or_default().into())
}

fn size(cols: u16, rows: u16) -> PtySize {
    PtySize {
        cols: cols.clamp(1, MAX_CELLS),
        rows: rows.clamp(1, MAX_CELLS),
    }
}

/// Sends the output of a terminal to a tab.
async fn forward(mut view: View, stream: u32, queue: mpsc::Sender<Message>) {
    loop {
        let message = match view.next().await {
            Ok(bytes) => {
                let mut message = BytesMut::with_capacity(bytes.len() + 4);
                message.put_u32(stream);
                message.put_slice(&bytes);
                Message::Binary(message.freeze())
            }
            Err(status) => {
                let _ = queue.send(text(&Notice::Ended { stream, status })).await;
                return;
            }
        };
        if queue.send(message).await.is_err() {
            return;
        }
    }
}
