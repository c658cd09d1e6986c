//! State that all requests share. The agent is single-threaded: plain `Rc` and `RefCell`, never
//! held across an await.

use crate::boot::site::InstalledSite;
use crate::cpu_sample::CpuSample;
use crate::filesystem::watcher::Watchers;
use crate::process::table::ProcessTable;
use crate::settings::AgentSettings;
use crate::users::{UnknownUser, User, Users};
use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The agent's state.
pub struct Agent {
    /// Told by the host.
    pub settings: RefCell<AgentSettings>,
    /// Authorities and proxy, as they were put into the sandbox.
    pub site: RefCell<InstalledSite>,
    /// Processes that were started through us.
    pub processes: ProcessTable,
    /// Watchers that clients poll.
    pub watchers: Watchers,
    /// Processor time at the last `/metrics`.
    pub cpu: RefCell<Option<CpuSample>>,
    /// Room for archives under way: each takes a thread, and threads are for other work, too.
    pub archives: Arc<Semaphore>,
}

/// Archives that are sent or received at the same time; further ones wait.
pub const MAX_ARCHIVES: usize = 4;

impl Agent {
    /// An agent with nothing running.
    pub fn new(settings: AgentSettings) -> io::Result<Rc<Self>> {
        Ok(Rc::new(Self {
            settings: RefCell::new(settings),
            site: RefCell::default(),
            processes: ProcessTable::new()?,
            watchers: Watchers::default(),
            cpu: RefCell::new(None),
            archives: Arc::new(Semaphore::new(MAX_ARCHIVES)),
        }))
    }

    /// Takes certificate authorities and proxy out of the sandbox. They come back with the next
    /// identity.
    pub fn withdraw_site(&self) {
        // Nothing is there unless we are process 1.
        self.site.borrow_mut().withdraw(Path::new("/"));
    }

    /// The named user, or the default one: as configured, else `user` when it exists, else root.
    pub fn user(&self, name: Option<&str>) -> Result<User, UnknownUser> {
        let users = Users::load();
        let configured = self.settings.borrow().default_user.clone();
        match name.or(configured.as_deref()) {
            Some(name) => users.find(name).ok_or_else(|| UnknownUser(name.to_owned())),
            None => Ok(users
                .find("user")
                .or_else(|| users.find("root"))
                .unwrap_or_else(User::root)),
        }
    }
}
