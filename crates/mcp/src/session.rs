//! State of one client: its sandboxes, background commands and contexts of the code interpreter.
//!
//! A *lease* is a connection to the daemon that removes a sandbox when it ends. An *agent* is a
//! client of the program in a guest that starts processes and accesses files.

use crate::command::Background;
use crate::error::{ToolError, ToolResult};
use crate::host_paths::AllowedDirectories;
use crate::images::Templates;
use crate::options::McpOptions;
use jiffy_agent_client::AgentClient;
use jiffy_api_types::SandboxState;
use jiffy_client::{Client, NewSandbox, Sandbox, SandboxLease};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// Key of the metadata with the name of the session that created a sandbox.
pub const SESSION_METADATA: &str = "mcp-session";
/// Maximum length of the client's name in the name of a session.
const MAX_CLIENT_NAME: usize = 40;
/// Maximum number of clients of agents that are retained for sandboxes that the session has used.
const MAX_AGENTS: usize = 1000;
/// Time for the requests that are in flight at the end of a session.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Key of a context of the code interpreter: sandbox, language and name.
pub type ContextKey = (String, String, String);

/// State of one client.
pub struct Session {
    /// Client of the daemon.
    pub client: Client,
    /// Options of the server.
    pub options: McpOptions,
    /// Directories of the host whose files may be copied.
    pub allowed: AllowedDirectories,
    /// Preparation of templates.
    pub templates: Arc<dyn Templates>,
    /// Commands in the background, by sandbox and process id.
    pub background: Mutex<HashMap<(String, u32), Arc<Background>>>,
    /// Agents of sandboxes that the session has used, by sandbox id.
    agents: Mutex<HashMap<String, AgentClient>>,
    /// Ids of contexts of the code interpreter.
    pub contexts: Mutex<HashMap<ContextKey, String>>,
    name: OnceLock<String>,
    /// Leases of the sandboxes that are removed at the end of the session.
    leases: Mutex<HashMap<String, SandboxLease>>,
    /// Requests that must complete even if their caller is cancelled.
    tasks: Mutex<JoinSet<()>>,
}

/// Returns a random word of 8 hexadecimal digits.
pub fn random_word() -> String {
    // Without random numbers, the process id distinguishes the words of simultaneous servers.
    let number = getrandom::u32().unwrap_or_else(|_| std::process::id());
    format!("{number:08x}")
}

impl Session {
    /// Creates the state of a client.
    pub fn new(
        client: Client,
        options: McpOptions,
        templates: Arc<dyn Templates>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            client,
            allowed: AllowedDirectories::new(&options.allowed_directories)?,
            options,
            templates,
            background: Mutex::default(),
            agents: Mutex::default(),
            contexts: Mutex::default(),
            name: OnceLock::new(),
            leases: Mutex::default(),
            tasks: Mutex::default(),
        })
    }

    /// Returns the name of the session, which starts with the name of the client. `client` is used
    /// by the first call only.
    pub fn name(&self, client: Option<&str>) -> &str {
        self.name.get_or_init(|| {
            let valid = |c: &char| c.is_ascii_alphanumeric() || "._-".contains(*c);
            let client: String = client
                .unwrap_or("mcp")
                .chars()
                .filter(valid)
                .take(MAX_CLIENT_NAME)
                .collect();
            format!("{client}-{}", random_word())
        })
    }

    /// Starts a task that completes even if the caller is cancelled.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        // Remove the results of finished tasks.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Runs `work` to its end even if the caller is cancelled. In this case, `undo` receives the
    /// result.
    pub async fn uncancelled<T, W, U>(
        &self,
        work: W,
        undo: impl FnOnce(T) -> U + Send + 'static,
    ) -> ToolResult<T>
    where
        T: Send + 'static,
        W: Future<Output = ToolResult<T>> + Send + 'static,
        U: Future<Output = ()> + Send,
    {
        let (sender, receiver) = oneshot::channel();
        self.spawn(async move {
            // The receiver no longer exists if the call was cancelled.
            if let Err(Ok(abandoned)) = sender.send(work.await) {
                undo(abandoned).await;
            }
        });
        let result = receiver.await;
        result.unwrap_or_else(|_| Err(ToolError::new("the session has ended")))
    }

    /// Creates a sandbox. Unless `keep` is set, the sandbox is removed at the end of the session.
    pub async fn create(self: &Arc<Self>, request: NewSandbox, keep: bool) -> ToolResult<Sandbox> {
        let (session, undoing) = (Arc::clone(self), Arc::clone(self));
        let create = async move {
            let sandbox = session.client.create(&request).await?;
            if !keep {
                session.lease(&sandbox.record.id).await?;
            }
            Ok(sandbox)
        };
        let undo = |sandbox: Sandbox| async move { undoing.remove(&sandbox.record.id).await };
        self.uncancelled(create, undo).await
    }

    /// Removes a sandbox at the end of the session. If this cannot be guaranteed, removes the
    /// sandbox now and fails.
    pub async fn lease(&self, id: &str) -> ToolResult<()> {
        if self.options.without_session {
            return Ok(());
        }
        match self.client.lease(id).await {
            Ok(lease) => {
                self.leases.lock().insert(id.to_owned(), lease);
                Ok(())
            }
            Err(e) => {
                self.remove(id).await;
                Err(e.into())
            }
        }
    }

    /// Removes a sandbox with its record.
    pub async fn remove(&self, id: &str) {
        let forget_record = true;
        // Ignore the error: the sandbox may have ended. Otherwise its lease or timeout removes it.
        let _ = self.client.delete(id, forget_record).await;
        self.forget(id);
    }

    /// Removes the state of a sandbox that has ended.
    pub fn forget(&self, id: &str) {
        self.leases.lock().remove(id);
        self.agents.lock().remove(id);
        self.background
            .lock()
            .retain(|(sandbox, _), _| sandbox != id);
        self.contexts
            .lock()
            .retain(|(sandbox, ..), _| sandbox != id);
    }

    /// Returns a sandbox that runs, and its agent. Resumes a paused sandbox, unless the server is
    /// read-only.
    pub async fn running(&self, id: &str) -> ToolResult<(Sandbox, AgentClient)> {
        let of_sandbox = |e: anyhow::Error| ToolError::of_sandbox(id, &e);
        let mut sandbox = self.client.sandbox(id).await.map_err(of_sandbox)?;
        if sandbox.record.state == SandboxState::Paused && !self.options.read_only {
            self.client.resume(id).await.map_err(of_sandbox)?;
            sandbox = self.client.sandbox(id).await.map_err(of_sandbox)?;
        }
        match &sandbox.record.state {
            SandboxState::Running => {
                let agent = self.use_agent(&sandbox)?;
                Ok((sandbox, agent))
            }
            SandboxState::Broken { cause, .. } => Err(ToolError::new(format!(
                "sandbox `{id}` was lost ({cause}): restore one of its snapshots with rollback, or \
                 create a sandbox with sandbox_create"
            ))),
            state => Err(ToolError::new(format!(
                "sandbox `{id}` is not running, its state is {}: create a sandbox with \
                 sandbox_create",
                state.name()
            ))),
        }
    }

    /// Returns the agent of a sandbox, and stores it for [`Self::used_agent`].
    pub fn use_agent(&self, sandbox: &Sandbox) -> ToolResult<AgentClient> {
        let agent = self.client.agent(sandbox)?;
        let mut agents = self.agents.lock();
        if agents.len() >= MAX_AGENTS {
            agents.clear();
        }
        agents.insert(sandbox.record.id.clone(), agent.clone());
        Ok(agent)
    }

    /// Returns the agent of a sandbox that ran at an earlier call. `id` must be its id: a name may
    /// refer to another sandbox later.
    pub fn used_agent(&self, id: &str) -> Option<AgentClient> {
        self.agents.lock().get(id).cloned()
    }

    /// Returns the agent of a sandbox that runs.
    pub async fn agent(&self, id: &str) -> ToolResult<AgentClient> {
        Ok(self.running(id).await?.1)
    }

    /// Ends the session: waits for requests in flight and removes its sandboxes.
    pub async fn end(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        let ids: Vec<String> = self.leases.lock().keys().cloned().collect();
        let end = async {
            while tasks.join_next().await.is_some() {}
            for id in ids {
                self.remove(&id).await;
            }
        };
        // Ignore an expired timeout: the leases, which end with this process, remove the sandboxes.
        let _ = tokio::time::timeout(END_TIMEOUT, end).await;
        self.leases.lock().clear();
    }
}

/// Removes a sandbox when it is dropped.
pub struct RemoveOnDrop {
    session: Arc<Session>,
    id: String,
}

impl RemoveOnDrop {
    /// Removes `sandbox` when the value is dropped.
    pub fn new(session: &Arc<Session>, sandbox: &Sandbox) -> Self {
        Self {
            session: Arc::clone(session),
            id: sandbox.record.id.clone(),
        }
    }
}

impl RemoveOnDrop {
    /// Removes the sandbox, and waits until it is removed.
    pub async fn finish(self) {
        self.session.remove(&self.id).await;
    }
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let (session, id) = (Arc::clone(&self.session), self.id.clone());
        // After `finish`, the sandbox does not exist and the request has no effect.
        self.session.spawn(async move { session.remove(&id).await });
    }
}
