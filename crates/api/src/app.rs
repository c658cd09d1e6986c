//! [`App`]: the state that all request handlers of the API share. The daemon creates it at its
//! start.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway. The *warm pool* has guests that were started in advance and
//! wait for a create. An *identity token* is a JSON Web Token by which other services recognise the
//! sandbox.

use crate::authentication_limit::AuthenticationLimit;
use crate::comparisons::StoredComparisons;
use crate::console_times::ConsoleTimes;
use crate::displayed_usage::Recent;
use crate::event_streams::EventStreams;
use crate::fleet::Fleet;

use crate::hooks::{FunctionInvoker, Ports, PreviewLinks, TemplateSource};
use crate::idempotency::ReplayCaches;
use crate::ignored_fields::IgnoredFieldCounts;
use crate::key_events::ReportedKeys;
use crate::keys::Keys;
use crate::quota::{ExchangePermit, Quota};
use crate::recipe_builds::RecipeBuilds;
use crate::usage_counts::UsageCounts;
use jiffy_api_types::{DaemonStatus, SnapshotAck, StopHost};
use jiffy_event_log::AuditLog;
use jiffy_function_manager::Functions;
use jiffy_identity::TokenIssuer;
use jiffy_sandbox_manager::{FigureFamily, Sandboxes};
use jiffy_secrets::Secrets;
use jiffy_template_builder::Builder;
use jiffy_volumes::{HostVolumes, StoredVolumes};
use jiffy_webhooks::Webhooks;
use std::sync::Arc;

/// Configuration of the control plane.
#[derive(Debug, Clone)]
pub struct Config {
    /// Domain of the sandboxes, as in `<port>-<id>.<domain>`; may include a port. `None` if
    /// sandboxes are reached by a header only.
    pub domain: Option<String>,
    /// Scheme of the URLs that this host returns to clients: `http` or `https`.
    pub scheme: &'static str,
    /// Port on which functions receive direct requests, without the gateway. `None` if there is no
    /// such port.
    pub direct_port: Option<u16>,
    /// Timeout in seconds of sandboxes whose creator specifies none.
    pub default_timeout_s: u64,
    /// Maximum timeout in seconds.
    pub max_timeout_s: u64,
    /// Maximum number of sandboxes per fork.
    pub max_fork: usize,
    /// Maximum number of sandboxes in one warm pool.
    pub max_pool: usize,
    /// Disk budget in MiB of keys with the scope `create` that have no limit of their own. `None`
    /// if these keys are unlimited.
    pub default_key_disk_mib: Option<u64>,
    /// Time at which snapshots are acknowledged if neither the request nor its key states it.
    pub snapshot_ack: SnapshotAck,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            domain: None,
            scheme: "http",
            direct_port: None,
            default_timeout_s: 300,
            // 30 days.
            max_timeout_s: 30 * 24 * 3600,
            max_fork: 100,
            max_pool: 1000,
            default_key_disk_mib: None,
            snapshot_ack: SnapshotAck::Stored,
        }
    }
}

/// Functions of the host and their invoker.
#[derive(Clone)]
pub(crate) struct FunctionHooks {
    pub functions: Functions,
    pub invoker: Arc<dyn FunctionInvoker>,
}

/// Shared state of the request handlers. Clones share the state. Optional parts are added by the
/// `with_...` methods; calls that need a missing part are rejected.
pub struct App {
    pub(crate) sandboxes: Sandboxes,
    pub(crate) keys: Arc<Keys>,
    pub(crate) templates: Arc<dyn TemplateSource>,
    pub(crate) builder: Option<Builder>,
    /// Builds of stock templates that clients have started.
    pub(crate) recipe_builds: Arc<RecipeBuilds>,
    pub(crate) config: Arc<Config>,
    /// Creates signed links to ports.
    pub(crate) preview: Option<Arc<dyn PreviewLinks>>,
    /// Opens streams to ports.
    pub(crate) ports: Option<Arc<dyn Ports>>,
    pub(crate) functions: Option<FunctionHooks>,
    /// Stops the daemon.
    pub(crate) stop: Option<Arc<dyn Fn(StopHost) + Send + Sync>>,
    /// Returns the daemon's status.
    pub(crate) about: Option<Arc<dyn Fn() -> DaemonStatus + Send + Sync>>,
    pub(crate) quota: Arc<Quota>,
    /// Stored responses for repeated requests with an `Idempotency-Key`.
    pub(crate) replays: Arc<ReplayCaches>,
    pub(crate) authentication_limit: Arc<AuthenticationLimit>,
    pub(crate) console_times: Arc<ConsoleTimes>,
    pub(crate) event_streams: Arc<EventStreams>,
    pub(crate) displayed_usage: Arc<Recent<Arc<str>>>,
    /// API keys whose events were recorded.
    pub(crate) reported_keys: Arc<ReportedKeys>,
    pub(crate) ignored_fields: Arc<IgnoredFieldCounts>,
    /// Results of comparisons, for their further pages.
    pub(crate) comparisons: Arc<StoredComparisons>,
    /// Record of calls. `None` if calls are not recorded.
    pub(crate) audit: Option<AuditLog>,
    /// True if the log also contains commands and file paths of calls on guests.
    pub(crate) audits_commands: bool,
    /// State of the last count of usage, from which the next one computes differences.
    pub(crate) usage_counts: Arc<UsageCounts>,
    /// Secrets of API keys. `None` if this host stores none.
    pub(crate) secrets: Option<Arc<Secrets>>,
    /// Issuer of identity tokens. `None` if this host issues none.
    pub(crate) issuer: Option<Arc<TokenIssuer>>,
    /// Volumes of API keys whose files are on this host. `None` if it stores none.
    pub(crate) volumes: Option<Arc<HostVolumes>>,
    /// Snapshots of volumes. `None` without a store.
    pub(crate) stored_volumes: Option<Arc<StoredVolumes>>,
    /// Webhooks of API keys. `None` if this host stores none.
    pub(crate) webhooks: Option<Webhooks>,
    /// Other hosts. `None` if this host is in no fleet.
    pub(crate) fleet: Option<Fleet>,
}

impl Clone for App {
    fn clone(&self) -> Self {
        Self {
            sandboxes: self.sandboxes.clone(),
            keys: self.keys.clone(),
            templates: self.templates.clone(),
            builder: self.builder.clone(),
            recipe_builds: self.recipe_builds.clone(),
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
            event_streams: self.event_streams.clone(),
            displayed_usage: self.displayed_usage.clone(),
            reported_keys: self.reported_keys.clone(),
            ignored_fields: self.ignored_fields.clone(),
            comparisons: self.comparisons.clone(),
            audit: self.audit.clone(),
            audits_commands: self.audits_commands,
            usage_counts: self.usage_counts.clone(),
            secrets: self.secrets.clone(),
            issuer: self.issuer.clone(),
            volumes: self.volumes.clone(),
            stored_volumes: self.stored_volumes.clone(),
            webhooks: self.webhooks.clone(),
            fleet: self.fleet.clone(),
        }
    }
}

impl App {
    /// Creates the state for requests on `sandboxes` by holders of `keys`.
    pub fn new(
        sandboxes: Sandboxes,
        keys: Arc<Keys>,
        templates: Arc<dyn TemplateSource>,
        config: Config,
    ) -> Self {
        // Also installs the quotas in `sandboxes`.
        let quota = Quota::new(&sandboxes, keys.clone(), config.default_key_disk_mib);
        Self {
            sandboxes,
            keys,
            templates,
            builder: None,
            recipe_builds: Arc::default(),
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
            event_streams: Arc::default(),
            displayed_usage: Arc::default(),
            reported_keys: Arc::default(),
            ignored_fields: Arc::default(),
            comparisons: Arc::default(),
            audit: None,
            audits_commands: false,
            usage_counts: Arc::default(),
            secrets: None,
            issuer: None,
            volumes: None,
            stored_volumes: None,
            webhooks: None,
            fleet: None,
        }
    }

    /// Adds a template builder. Without it, requests for builds are rejected.
    pub fn with_builder(mut self, builder: Builder) -> Self {
        // Builds count against the quotas of their keys.
        self.quota.count_builder(&builder);
        self.builder = Some(builder);
        self
    }

    /// Sets the maximum number of concurrent exchanges (requests and streams to sandboxes) of each
    /// key that has no limit of its own.
    pub fn with_exchange_share(self, most: u64) -> Self {
        self.quota.share_exchanges(most);
        self
    }

    /// Counts a request or stream to a sandbox of `owner` until the permit is dropped. The error
    /// message is meant for clients.
    pub fn exchange(&self, owner: &str) -> Result<ExchangePermit, String> {
        // The caller, a listener, chooses the form of the error.
        self.quota.exchange(owner).map_err(|e| e.message)
    }

    /// Returns the usage and the limits of each key in force, and the counts of ignored fields, for
    /// a metrics scrape.
    pub fn figures(&self) -> Vec<FigureFamily> {
        let mut figures = self.quota.figures();
        figures.push(self.ignored_fields.figures());
        figures
    }

    /// Adds signed links to ports. Without them, requests for such a link are rejected.
    pub fn with_preview(mut self, preview: Arc<dyn PreviewLinks>) -> Self {
        self.preview = Some(preview);
        self
    }

    /// Adds streams to ports. Without them, requests for such a stream are rejected.
    pub fn with_ports(mut self, ports: Arc<dyn Ports>) -> Self {
        self.ports = Some(ports);
        self
    }

    /// Adds functions. `invoker` forwards requests to them. Without functions, calls on them are
    /// rejected.
    pub fn with_functions(
        mut self,
        functions: Functions,
        invoker: Arc<dyn FunctionInvoker>,
    ) -> Self {
        // Modules count against the disk quotas of their keys.
        self.quota.count_functions(&functions);
        self.functions = Some(FunctionHooks { functions, invoker });
        self
    }

    /// Adds webhooks of API keys. Without them, calls on webhooks are rejected.
    pub fn with_webhooks(mut self, webhooks: Webhooks) -> Self {
        self.webhooks = Some(webhooks);
        self
    }

    /// Adds secrets of API keys. Without them, calls on secrets are rejected.
    pub fn with_secrets(mut self, secrets: Secrets) -> Self {
        self.secrets = Some(Arc::new(secrets));
        self
    }

    /// Adds volumes of API keys. Without them, calls on volumes are rejected.
    pub fn with_volumes(mut self, volumes: Arc<HostVolumes>) -> Self {
        // Volumes count against the disk quotas of their keys.
        self.quota.count_volumes(volumes.clone());
        self.volumes = Some(volumes);
        self
    }

    /// Adds snapshots of volumes in a store. Without them, calls on such snapshots are rejected.
    pub fn with_stored_volumes(mut self, stored: Option<Arc<StoredVolumes>>) -> Self {
        self.stored_volumes = stored;
        self
    }

    /// Adds a function that stops the daemon. Without it, only a signal stops the daemon.
    pub fn with_stop(mut self, stop: impl Fn(StopHost) + Send + Sync + 'static) -> Self {
        self.stop = Some(Arc::new(stop));
        self
    }

    /// Adds a source for the daemon's status, which is shown to the host's owner.
    pub fn with_about(mut self, about: impl Fn() -> DaemonStatus + Send + Sync + 'static) -> Self {
        self.about = Some(Arc::new(about));
        self
    }
}
