//! State that the calls work on.

use crate::authentication_limit::AuthenticationLimit;
use crate::console_times::ConsoleTimes;

use crate::hooks::{FunctionInvoker, Ports, PreviewLinks, TemplateSource};
use crate::idempotency::ReplayCaches;
use crate::keys::Keys;
use crate::quota::{ExchangePermit, Quota};
use jiffy_api_types::{DaemonStatus, StopHost};
use jiffy_function_manager::Functions;
use jiffy_sandbox_manager::{FigureFamily, Sandboxes};
use jiffy_template_builder::Builder;
use std::sync::Arc;

/// Configuration of the control plane.
#[derive(Debug, Clone)]
pub struct Config {
    /// Domain of the sandboxes: `<port>-<id>.<domain>`; may carry a port. None: only by header.
    pub domain: Option<String>,
    /// Scheme by which clients speak to this host: `http` or `https`.
    pub scheme: &'static str,
    /// Port of direct requests to functions.
    pub direct_port: Option<u16>,
    /// Seconds a sandbox gets when nobody says.
    pub default_timeout_s: u64,
    /// Most seconds that can be asked for.
    pub max_timeout_s: u64,
    /// Most sandboxes of one fork.
    pub max_fork: usize,
    /// Most sandboxes that wait in one pool.
    pub max_pool: usize,
    /// Disk budget of keys of scope `create` that were given none, in MiB; none: they have no
    /// limit.
    pub default_key_disk_mib: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            domain: None,
            scheme: "http",
            direct_port: None,
            default_timeout_s: 300,
            max_timeout_s: 30 * 24 * 3600,
            max_fork: 100,
            max_pool: 1000,
            default_key_disk_mib: None,
        }
    }
}

/// Functions of the host, and the way to them.
#[derive(Clone)]
pub(crate) struct FunctionHooks {
    pub functions: Functions,
    pub invoker: Arc<dyn FunctionInvoker>,
}

/// State that the calls work on. Clones are the same.
pub struct App {
    pub(crate) sandboxes: Sandboxes,
    pub(crate) keys: Arc<Keys>,
    pub(crate) templates: Arc<dyn TemplateSource>,
    pub(crate) builder: Option<Builder>,
    pub(crate) config: Arc<Config>,
    pub(crate) preview: Option<Arc<dyn PreviewLinks>>,
    pub(crate) ports: Option<Arc<dyn Ports>>,
    pub(crate) functions: Option<FunctionHooks>,
    pub(crate) stop: Option<Arc<dyn Fn(StopHost) + Send + Sync>>,
    pub(crate) about: Option<Arc<dyn Fn() -> DaemonStatus + Send + Sync>>,
    pub(crate) quota: Arc<Quota>,
    pub(crate) replays: Arc<ReplayCaches>,
    pub(crate) authentication_limit: Arc<AuthenticationLimit>,
    pub(crate) console_times: Arc<ConsoleTimes>,
}

impl Clone for App {
    fn clone(&self) -> Self {
        Self {
            sandboxes: self.sandboxes.clone(),
            keys: self.keys.clone(),
            templates: self.templates.clone(),
            builder: self.builder.clone(),
            config: self.config.clone(),
            preview: self.preview.clone(),
            ports: self.ports.clone(),
            functions: self.functions.clone(),
            stop: self.stop.clone(),
            about: self.about.clone(),
            quota: self.quota.clone(),
            replays: self.replays.clone(),
            authentication_limit: self.authentication_limit.clone(),
            console_times: self.console_times.clone(),
        }
    }
}

impl App {
    /// Calls on `sandboxes`, for the holders of `keys`.
    pub fn new(
        sandboxes: Sandboxes,
        keys: Arc<Keys>,
        templates: Arc<dyn TemplateSource>,
        config: Config,
    ) -> Self {
        let quota = Quota::new(&sandboxes, keys.clone(), config.default_key_disk_mib);
        Self {
            sandboxes,
            keys,
            templates,
            builder: None,
            config: Arc::new(config),
            preview: None,
            ports: None,
            functions: None,
            stop: None,
            about: None,
            quota,
            replays: Arc::default(),
            authentication_limit: Arc::default(),
            console_times: Arc::default(),
        }
    }

    /// The same with a builder of templates; without, asking for one is refused.
    pub fn with_builder(mut self, builder: Builder) -> Self {
        self.quota.count_builder(&builder);
        self.builder = Some(builder);
        self
    }

    /// The same where no key has more than `most` exchanges with its sandboxes at once, unless it
    /// was given a limit of its own.
    pub fn with_exchange_share(self, most: u64) -> Self {
        self.quota.share_exchanges(most);
        self
    }

    /// Counts one more request or stream to a sandbox of `owner`; the refusal is for clients.
    pub fn exchange(&self, owner: &str) -> Result<ExchangePermit, String> {
        self.quota.exchange(owner).map_err(|e| e.message)
    }

    /// Returns what each key in force uses, and its limits, for a scrape.
    pub fn figures(&self) -> Vec<FigureFamily> {
        self.quota.figures()
    }

    /// The same with signed links to ports; without, asking for one is refused.
    pub fn with_preview(mut self, preview: Arc<dyn PreviewLinks>) -> Self {
        self.preview = Some(preview);
        self
    }

    /// The same with streams to ports; without, asking for one is refused.
    pub fn with_ports(mut self, ports: Arc<dyn Ports>) -> Self {
        self.ports = Some(ports);
        self
    }

    /// The same with functions, to which `invoker` passes requests; without, calls on them are
    /// refused.
    pub fn with_functions(
        mut self,
        functions: Functions,
        invoker: Arc<dyn FunctionInvoker>,
    ) -> Self {
        self.quota.count_functions(&functions);
        self.functions = Some(FunctionHooks { functions, invoker });
        self
    }

    /// The same with a way to end the daemon; without, it ends by a signal only.
    pub fn with_stop(mut self, stop: impl Fn(StopHost) + Send + Sync + 'static) -> Self {
        self.stop = Some(Arc::new(stop));
        self
    }

    /// The same with what the daemon tells its owner about itself.
    pub fn with_about(mut self, about: impl Fn() -> DaemonStatus + Send + Sync + 'static) -> Self {
        self.about = Some(Arc::new(about));
        self
    }
}
