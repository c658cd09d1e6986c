//! `/live`: one WebSocket per browser tab. It carries terminals, events and the usage of displayed
//! sandboxes, and ends with its session.
//!
//! Control messages are JSON (`live_messages.rs`, [`Notice`]). Binary messages are input and output
//! of terminals: the number of the stream as four bytes, then the data.

use crate::Console;
use crate::codes::random_hex;
use crate::files::open;
use crate::guest_audit::{TerminalCall, record_terminal};
use crate::live_feeds::{Viewer, display, follow};
use crate::live_messages::{
    MAX_MESSAGE, RequestedTerminal, TabActions, TabMessages, TerminalRequest,
};
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
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Maximum number of messages in the queue of a slow browser.
const MAX_QUEUED: usize = 16;
/// Interval of checks of the session, and time limit of the last message to a browser.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Close code for a session that has ended (private range of RFC 6455).
const SESSION_ENDED: u16 = 4401;

/// Number of the next viewer. A viewer is a tab that shows a terminal.
static NEXT_VIEWER: AtomicU64 = AtomicU64::new(1);

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
    let mut tab = TabMessages::new(Tab {
        console: console.clone(),
        session: session.clone(),
        from,
        queue: queue.clone(),
        following: None,
        displaying: None,
    });
    // The check of the session must not wait for a command, for example for input of a guest that
    // reads none.
    let has_ended = tokio::select! {
        () = receive(&mut tab, messages) => false,
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
        // Ignore errors and the timeout: the connection is closed in any case.
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

/// Sends the queued messages. Ends after a close message.
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
    /// Task that sends new events.
    following: Option<Task>,
    /// Task that sends the usage of the displayed sandboxes.
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
    /// Number of the tab as a viewer of the terminal.
    viewer: u64,
    terminal: Arc<Terminal>,
    _forwarding: Task,
}

/// Processes the messages of the browser until it disconnects.
async fn receive(tab: &mut TabMessages<Tab>, mut messages: SplitStream<WebSocket>) {
    while let Some(Ok(message)) = messages.next().await {
        match message {
            Message::Text(text) => tab.text(&text).await,
            Message::Binary(bytes) => tab.binary(bytes).await,
            Message::Close(_) => return,
            // Pings and pongs, which the WebSocket library handles.
            _ => {}
        }
    }
}

impl TabActions for Tab {
    type Shown = Stream;

    async fn show(&mut self, request: TerminalRequest) -> Option<Stream> {
        let stream = request.stream;
        let terminal = match request.terminal {
            RequestedTerminal::New { user, shell } => {
                self.start(&request.sandbox, request.size, user, shell)
                    .await
            }
            RequestedTerminal::Existing(id) => {
                self.attach(&request.sandbox, request.size, &id).await
            }
        };
        match terminal {
            Ok(terminal) => Some(self.view(stream, terminal).await),
            Err(refusal) => {
                self.fail(stream, &refusal.message()).await;
                None
            }
        }
    }

    async fn fail(&mut self, stream: u32, message: &str) {
        let message = message.to_owned();
        self.notify(&Notice::Failed { stream, message }).await;
    }

    async fn resize(&mut self, shown: &Stream, size: PtySize) {
        shown.terminal.resize(size).await;
    }

    fn acknowledge(&mut self, shown: &Stream, bytes: u64) {
        shown.terminal.acknowledge(shown.viewer, bytes);
    }

    async fn input(&mut self, shown: &Stream, input: Bytes) {
        shown.terminal.write(input).await;
    }

    async fn end(&mut self, shown: Stream) {
        shown.terminal.hang_up().await;
        self.console.terminals.forget(&shown.terminal);
    }

    fn follow(&mut self, after: Option<String>) {
        // The former stream is closed first, because streams of a key are limited.
        self.following = None;
        let (console, viewer, queue) = self.for_feed();
        self.following = Some(Task::spawn(follow(console, viewer, after, queue)));
    }

    fn display(&mut self, sandboxes: Vec<String>) {
        self.displaying = None;
        if !sandboxes.is_empty() {
            let (console, viewer, queue) = self.for_feed();
            let display = display(console, viewer, sandboxes, queue);
            self.displaying = Some(Task::spawn(display));
        }
    }
}

impl Tab {
    /// Starts a terminal in a sandbox.
    async fn start(
        &self,
        sandbox: &str,
        size: PtySize,
        user: Option<String>,
        shell: Option<String>,
    ) -> Result<Arc<Terminal>, Refusal> {
        let caller = self.caller()?;
        let call = TerminalCall::Open(shell.as_deref());
        let started = async {
            let guest = open(&self.console.app, &caller, sandbox)?;
            let new = NewTerminal {
                id: random_hex::<8>()?,
                size,
                user,
                shell: shell.clone(),
            };
            self.console.terminals.start(guest, new).await
        };
        let started = started.await;
        self.record(&caller, sandbox, call, &started);
        started
    }

    /// Connects a viewer to an open terminal, and changes the size of the terminal.
    async fn attach(
        &self,
        sandbox: &str,
        size: PtySize,
        id: &str,
    ) -> Result<Arc<Terminal>, Refusal> {
        let caller = self.caller()?;
        let found = self.find(&caller, sandbox, id);
        self.record(&caller, sandbox, TerminalCall::Attach(id), &found);
        let terminal = found?;
        if terminal.status() == Status::Running {
            terminal.resize(size).await;
        }
        Ok(terminal)
    }

    /// Returns the terminal of a sandbox that the caller may use.
    fn find(&self, caller: &Caller, sandbox: &str, id: &str) -> Result<Arc<Terminal>, Refusal> {
        let access = self.console.app.guest_access(caller, sandbox)?;
        let found = self.console.terminals.find(&access.id, id);
        found.ok_or_else(|| Refusal::invalid("the terminal has ended"))
    }

    /// Records in the audit log that the tab shows a terminal, or why it does not.
    fn record(
        &self,
        caller: &Caller,
        sandbox: &str,
        call: TerminalCall<'_>,
        result: &Result<Arc<Terminal>, Refusal>,
    ) {
        let by = (caller, &self.session, self.from);
        record_terminal(&self.console, by, sandbox, call, result);
    }

    /// Returns the arguments of [`follow`] and [`display`].
    fn for_feed(&self) -> (Console, Viewer, mpsc::Sender<Message>) {
        let viewer = (self.session.clone(), self.from);
        (self.console.clone(), viewer, self.queue.clone())
    }

    fn caller(&self) -> Result<Caller, Refusal> {
        let caller = self.console.caller_of(&self.session, self.from)?;
        caller.ok_or_else(Refusal::signed_out)
    }

    /// Shows a terminal in the tab.
    async fn view(&self, stream: u32, terminal: Arc<Terminal>) -> Stream {
        let opened = Notice::Opened {
            stream,
            terminal: terminal.id.clone(),
        };
        self.notify(&opened).await;
        let viewer = NEXT_VIEWER.fetch_add(1, Ordering::Relaxed);
        let view = terminal.view(viewer);
        let forwarding = Task::spawn(forward(view, stream, self.queue.clone()));
        Stream {
            viewer,
            terminal,
            _forwarding: forwarding,
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

/// Sends the output of a terminal to a tab. Each message starts with the number of the stream as
/// four bytes.
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
                // Ignore the error: the tab is closed.
                let _ = queue.send(text(&Notice::Ended { stream, status })).await;
                return;
            }
        };
        if queue.send(message).await.is_err() {
            return;
        }
    }
}
