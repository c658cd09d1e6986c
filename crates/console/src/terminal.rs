//! [`Terminal`]: a terminal of a guest with its last output, independent of the browsers that show
//! it. A *viewer* is a browser tab that shows the terminal.

use crate::files::Guest;
use bytes::Bytes;
use jiffy_agent_client::{AgentClient, ClientError, Process, ProcessEvent, ProcessSpec, PtySize};
use jiffy_api::ExchangePermit;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, watch};

/// Maximum number of bytes of output that are retained for viewers that attach later.
const RETAINED_BYTES: usize = 1024 * 1024;
/// Number of unacknowledged bytes of a viewer above which the terminal is no longer read. A browser
/// acknowledges each 32 KiB. The output that is in transit delays the response to input: this
/// output, and about 400 KiB in the buffers between the terminal of the guest and the daemon.
const MAX_UNACKNOWLEDGED: u64 = 128 * 1024;
/// Maximum number of bytes that a viewer receives at a time.
const MAX_PIECE_BYTES: usize = 64 * 1024;
/// Minimum size of a piece of output after which more output is likely to follow at once.
const FLOOD_BYTES: usize = 4096;
/// Time in which output is collected during a flood, so that a browser receives few large messages.
const COLLECT_TIME: Duration = Duration::from_millis(4);
/// Time without an acknowledgement after which a viewer no longer delays the other viewers.
const ACKNOWLEDGE_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of queued inputs. If the queue is full, the viewer waits.
const MAX_QUEUED_INPUTS: usize = 64;
/// Runs the shell of the user if it exists, otherwise bash or sh.
const SHELL_SCRIPT: &str = "if [ -n \"$SHELL\" ] && command -v \"$SHELL\" >/dev/null 2>&1; then \
     exec \"$SHELL\" -l; fi; command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";
/// Interval at which a terminal with a slow viewer is checked.
const SLOW_VIEWER_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum length of the reason of an exit in characters. The guest determines the text.
const MAX_REASON_CHARS: usize = 200;

/// State of a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub(crate) enum Status {
    /// The shell runs.
    Running,
    /// The shell has exited.
    Exited {
        /// Description of the exit.
        reason: String,
    },
    /// The connection to the guest was lost, for example by a pause or a rollback.
    Lost {
        /// Message for the user.
        reason: String,
    },
}

/// Progress of a viewer that shows the terminal.
struct Viewer {
    /// Number of output bytes that the viewer has drawn. Acknowledgements are cumulative.
    acknowledged: u64,
    /// Time of the last acknowledgement.
    since: Instant,
}

/// Output of a terminal, and its viewers.
struct Output {
    /// Last bytes of the output.
    retained: VecDeque<u8>,
    /// Number of bytes since the start.
    total: u64,
    status: Status,
    /// Connected viewers by number.
    viewers: HashMap<u64, Viewer>,
    /// Time since which no viewer is attached.
    unwatched_since: Instant,
}

/// A terminal of a guest.
pub(crate) struct Terminal {
    pub id: String,
    pub sandbox: String,
    pub pid: u32,
    /// Name of the user. `None` for the default user.
    pub user: Option<String>,
    pub started_ms: u64,
    client: AgentClient,
    input: mpsc::Sender<Bytes>,
    output: Mutex<Output>,
    /// Changes with each output and each state.
    changed: watch::Sender<()>,
    acknowledged: Notify,
}

/// Viewer of a terminal. Dropping it detaches the viewer.
pub(crate) struct View {
    terminal: Arc<Terminal>,
    /// Number of the viewer.
    id: u64,
    /// Position of the next byte to send.
    position: u64,
    /// True if the last piece was large.
    is_flooded: bool,
    changes: watch::Receiver<()>,
}

/// Settings of a new terminal.
pub(crate) struct NewTerminal {
    pub id: String,
    pub size: PtySize,
    pub user: Option<String>,
    /// Shell. `None` for the default of the user.
    pub shell: Option<String>,
}

impl Terminal {
    /// Starts a shell in a guest.
    pub async fn start(guest: Guest, new: NewTerminal) -> Result<Arc<Self>, ClientError> {
        let mut spec = match &new.shell {
            Some(shell) => ProcessSpec::new(shell.as_str(), ["-l"]),
            None => ProcessSpec::new("sh", ["-c", SHELL_SCRIPT]),
        };
        spec.user.clone_from(&new.user);
        spec.pty = Some(new.size);
        spec.tag = Some(format!("jiffy-console-{}", new.id));
        let term = ("TERM".to_owned(), "xterm-256color".to_owned());
        spec.envs
            .extend([term, ("COLORTERM".to_owned(), "truecolor".to_owned())]);
        let process = guest.client.start(&spec).await?;
        let (input, inputs) = mpsc::channel(MAX_QUEUED_INPUTS);
        let terminal = Arc::new(Self {
            id: new.id,
            sandbox: guest.id,
            pid: process.pid(),
            user: new.user,
            started_ms: jiffy_engine_api::now_ms(),
            client: guest.client,
            input,
            output: Mutex::new(Output {
                retained: VecDeque::new(),
                total: 0,
                status: Status::Running,
                viewers: HashMap::new(),
                unwatched_since: Instant::now(),
            }),
            changed: watch::channel(()).0,
            acknowledged: Notify::new(),
        });
        tokio::spawn(terminal.clone().send_inputs(inputs));
        tokio::spawn(terminal.clone().read_output(process, guest.permit));
        Ok(terminal)
    }

    /// Sends the inputs of viewers to the shell, in their order.
    async fn send_inputs(self: Arc<Self>, mut inputs: mpsc::Receiver<Bytes>) {
        let mut changes = self.changed.subscribe();
        loop {
            let input = tokio::select! {
                input = inputs.recv() => input,
                // Each output is a change, too. The loop ends when the shell has exited.
                _ = changes.changed() => match self.status() {
                    Status::Running => continue,
                    _ => None,
                },
            };
            let Some(input) = input else { return };
            // The reader reports a lost connection.
            if self.client.send_pty(self.pid, &input).await.is_err() {
                tracing::debug!(sandbox = %self.sandbox, "cannot send input to a terminal");
            }
        }
    }

    /// Reads the output of the terminal until its shell exits or the connection to the guest is
    /// lost. Pauses while a viewer is too slow. `permit` counts the connection toward the owner's
    /// limit of exchanges (concurrent requests and streams to sandboxes). It is released before the
    /// viewers see the end, so that they can start a new terminal.
    async fn read_output(self: Arc<Self>, mut process: Process, permit: Option<ExchangePermit>) {
        let status = loop {
            while self.has_slow_viewer() {
                // The timeout is needed because no message reports that `ACKNOWLEDGE_LIMIT` has
                // passed.
                let acknowledged = self.acknowledged.notified();
                let _ = tokio::time::timeout(SLOW_VIEWER_INTERVAL, acknowledged).await;
            }
            match process.next_event().await {
                Ok(Some(ProcessEvent::Pty(bytes) | ProcessEvent::Stdout(bytes))) => {
                    self.append(&bytes);
                }
                Ok(Some(ProcessEvent::End(end))) => {
                    let reason = end.error.unwrap_or(end.status);
                    let reason = reason.chars().take(MAX_REASON_CHARS).collect();
                    break Status::Exited { reason };
                }
                Ok(Some(_)) => {}
                Ok(None) => {
                    let reason = "the connection to the guest ended".to_owned();
                    break Status::Lost { reason };
                }
                Err(e) => {
                    let reason = e.to_string();
                    break Status::Lost { reason };
                }
            }
        };
        drop(permit);
        self.output.lock().status = status;
        self.changed.send_replace(());
    }

    /// Appends output of the guest to the retained bytes, and wakes the tabs that show the
    /// terminal.
    fn append(&self, bytes: &[u8]) {
        let mut output = self.output.lock();
        output.total += bytes.len() as u64;
        let kept = bytes.get(bytes.len().saturating_sub(RETAINED_BYTES)..);
        output.retained.extend(kept.unwrap_or_default());
        let surplus = output.retained.len().saturating_sub(RETAINED_BYTES);
        output.retained.drain(..surplus);
        drop(output);
        self.changed.send_replace(());
    }

    /// Returns whether a viewer must acknowledge output before more is read.
    fn has_slow_viewer(&self) -> bool {
        let output = self.output.lock();
        let mut viewers = output.viewers.values();
        viewers.any(|viewer| {
            output.total - viewer.acknowledged > MAX_UNACKNOWLEDGED
                && viewer.since.elapsed() < ACKNOWLEDGE_LIMIT
        })
    }

    pub fn status(&self) -> Status {
        self.output.lock().status.clone()
    }

    /// Returns for how long no viewer has been attached. `None` with viewers.
    pub fn unwatched_for(&self) -> Option<Duration> {
        let output = self.output.lock();
        output
            .viewers
            .is_empty()
            .then(|| output.unwatched_since.elapsed())
    }

    /// Queues input of a viewer.
    pub async fn write(&self, bytes: Bytes) {
        // An error means that the shell has exited.
        let _ = self.input.send(bytes).await;
    }

    pub async fn resize(&self, size: PtySize) {
        if let Err(e) = self.client.resize(self.pid, size).await {
            tracing::debug!(sandbox = %self.sandbox, error = %e, "cannot resize a terminal");
        }
    }

    /// Sends SIGHUP to the shell, as a closed terminal does.
    pub async fn hang_up(&self) {
        const SIGHUP: i32 = 1;
        if let Err(e) = self.client.signal(self.pid, SIGHUP).await {
            tracing::debug!(sandbox = %self.sandbox, error = %e, "cannot end a terminal");
        }
    }

    /// Attaches a viewer, which first receives the retained output.
    pub fn view(self: &Arc<Self>, id: u64) -> View {
        let mut output = self.output.lock();
        let position = output.total - output.retained.len() as u64;
        // The retained output counts as acknowledged, so that a new viewer does not stop the
        // terminal.
        let viewer = Viewer {
            acknowledged: output.total,
            since: Instant::now(),
        };
        output.viewers.insert(id, viewer);
        let mut changes = self.changed.subscribe();
        changes.mark_changed();
        View {
            terminal: self.clone(),
            id,
            position,
            is_flooded: false,
            changes,
        }
    }

    /// Records that a viewer has drawn `bytes` more bytes.
    pub fn acknowledge(&self, viewer: u64, bytes: u64) {
        let mut output = self.output.lock();
        let total = output.total;
        if let Some(viewer) = output.viewers.get_mut(&viewer) {
            viewer.acknowledged = viewer.acknowledged.saturating_add(bytes).min(total);
            viewer.since = Instant::now();
        }
        drop(output);
        self.acknowledged.notify_one();
    }
}

impl View {
    /// Returns the number of bytes that were not sent yet.
    fn available(&self) -> u64 {
        let output = self.terminal.output.lock();
        output.total.saturating_sub(self.position)
    }

    /// Waits for output and returns it, or the final state of the terminal after all output. Output
    /// that is no longer retained is skipped. Cancel-safe.
    pub async fn next(&mut self) -> Result<Bytes, Status> {
        if std::mem::take(&mut self.is_flooded) && self.available() < MAX_PIECE_BYTES as u64 {
            tokio::time::sleep(COLLECT_TIME).await;
        }
        loop {
            {
                let output = self.terminal.output.lock();
                let first = output.total - output.retained.len() as u64;
                self.position = self.position.max(first);
                let skip = usize::try_from(self.position - first).unwrap_or(usize::MAX);
                // Large output is sent in several messages.
                let end = output
                    .retained
                    .len()
                    .min(skip.saturating_add(MAX_PIECE_BYTES));
                if skip < end {
                    let (first, second) = output.retained.as_slices();
                    let middle = first.len();
                    let mut bytes = Vec::with_capacity(end - skip);
                    bytes.extend_from_slice(&first[skip.min(middle)..end.min(middle)]);
                    let rest = skip.max(middle) - middle..end.max(middle) - middle;
                    bytes.extend_from_slice(&second[rest]);
                    self.position += bytes.len() as u64;
                    self.is_flooded = bytes.len() >= FLOOD_BYTES;
                    return Ok(bytes.into());
                }
                if output.status != Status::Running {
                    return Err(output.status.clone());
                }
            }
            // The sender is a field of the terminal, so it exists.
            let _ = self.changes.changed().await;
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let mut output = self.terminal.output.lock();
        output.viewers.remove(&self.id);
        output.unwatched_since = Instant::now();
        drop(output);
        self.terminal.acknowledged.notify_one();
    }
}
