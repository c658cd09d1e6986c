//! State that all requests use. The agent is single-threaded: the state is in `Rc` and `RefCell`,
//! which must not be borrowed across an await.
//!
//! The *site* is the network in which the sandboxes run. Its settings are certificate authorities
//! and a proxy.

use crate::boot::site::InstalledSite;
use crate::cpu_sample::CpuSample;
use crate::filesystem::watcher::Watchers;
use crate::hook_directory::HookDirectory;
use crate::process::table::ProcessTable;
use crate::rest::error::RestError;
use crate::settings::AgentSettings;
use crate::users::{User, UserLookup};
use crate::workers::{CallClass, CallError, Workers, lock};
use jiffy_proto::agent::SiteSettings;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The agent's state.
pub struct Agent {
    /// Settings from the host.
    pub settings: RefCell<AgentSettings>,
    /// Authorities and proxy that are installed in the sandbox. Only worker threads lock it.
    pub site: Arc<Mutex<InstalledSite>>,
    /// Variables of [`Self::site`] for processes. A variable that a process already has takes
    /// precedence.
    pub site_variables: RefCell<BTreeMap<String, String>>,
    /// Processes that clients started.
    pub processes: ProcessTable,
    /// Watchers that clients poll.
    pub watchers: Watchers,
    /// CPU time at the last request to `/metrics`.
    pub cpu: Cell<Option<CpuSample>>,
    /// Threads for calls that may wait for a file system.
    pub workers: Workers,
    /// Directory with hooks, which few guests have.
    pub hooks: HookDirectory,
}

impl Agent {
    /// Creates an agent without processes. See [`Workers::new`] for `patience`.
    pub fn new(settings: AgentSettings, patience: Option<Duration>) -> io::Result<Rc<Self>> {
        Ok(Rc::new(Self {
            settings: RefCell::new(settings),
            site: Arc::default(),
            site_variables: RefCell::default(),
            processes: ProcessTable::new()?,
            watchers: Watchers::default(),
            cpu: Cell::new(None),
            workers: Workers::new(patience)?,
            hooks: HookDirectory::default(),
        }))
    }

    /// Removes certificate authorities and proxy from the sandbox. The next identity installs them
    /// again.
    ///
    /// # Errors
    /// The file system does not answer.
    pub async fn withdraw_site(&self) -> Result<(), CallError> {
        let site = Arc::clone(&self.site);
        // An agent that is not process 1 has installed no settings, so it removes no files of its
        // host.
        let withdraw = move |_: &_| lock(&site).withdraw(Path::new("/"));
        let what = "cannot remove certificate authorities";
        self.workers.run(CallClass::Files, what, withdraw).await?;
        self.site_variables.borrow_mut().clear();
        Ok(())
    }

    /// Installs certificate authorities and the proxy in place of the present ones.
    ///
    /// # Errors
    /// The file system does not answer, or a file cannot be written.
    pub async fn install_site(&self, settings: SiteSettings) -> Result<(), RestError> {
        let site = Arc::clone(&self.site);
        let env = self.settings.borrow().env.clone();
        let what = "cannot install certificate authorities and proxy";
        let install = move |_: &_| {
            let mut site = lock(&site);
            site.replace(Path::new("/"), settings, &env)
                .map(|()| site.variables().clone())
                .map_err(|e| RestError::io(what, &e))
        };
        let variables = self.workers.attempt(CallClass::Files, what, install);
        *self.site_variables.borrow_mut() = variables.await?;
        Ok(())
    }

    /// Returns the environment of every process: the ids of the sandbox and the variables of its
    /// creator. The creator's variables take precedence.
    pub fn sandbox_variables(&self) -> BTreeMap<String, String> {
        let settings = self.settings.borrow();
        let labels = settings.labels.iter().flat_map(|l| l.variables());
        let mut variables: BTreeMap<_, _> = labels
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        // The later value replaces the earlier one.
        variables.extend(settings.env.clone());
        variables
    }

    /// Returns the user in a request, or the configured default. A worker must look it up.
    pub fn lookup(&self, name: Option<&str>) -> UserLookup {
        // The file system is not accessed here, because it may not respond.
        let configured = self.settings.borrow().default_user.clone();
        UserLookup {
            name: name.map(str::to_owned).or(configured),
        }
    }

    /// Looks up the user in a request, or the default user.
    pub async fn find_user<E>(&self, name: Option<&str>) -> Result<User, E>
    where
        E: From<CallError> + From<crate::users::UnknownUser> + Send + 'static,
    {
        let lookup = self.lookup(name);
        let find = move |_: &_| lookup.find().map_err(E::from);
        let what = "cannot look up a user";
        self.workers.attempt(CallClass::Files, what, find).await
    }
}
