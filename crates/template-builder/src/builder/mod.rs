//! The builder: builds that were asked for, and their carrying out.

mod copy;
mod ended;
mod job;
mod key;
mod known;
mod log;
mod migrate;
mod names;
mod queue;
mod records;
mod setting;
mod steps;
mod transfer;
mod uploads;
mod usage;
mod user;
mod waiting;

pub use names::{Look, Meaning, Rank, is_visible, resolve};
pub use records::{
    BuildRecord, Level, Line, Lines, Reason, RecordError, Records, Status, TemplateRecord,
    WantedSize, now_ms,
};
pub use uploads::{MAX_UPLOAD, Upload, UploadError, Uploads};
pub use usage::{BuildUsage, WeakBuilder};
pub use waiting::{MAX_WAITING_BUILDS, WAITING_BUILD_LIFE};

use crate::spec::{BuildSpec, ImageSource};
use ended::End;
use jiffy_engine::Engine;
use jiffy_host::{
    IdentityError, OwnerQuota, QuotaAmount, QuotaRefusal, QuotaRequest, Sandboxes, SnapshotRecord,
    new_id, new_token,
};
pub use jiffy_image::DEFAULT_TAG;
use jiffy_image::{
    Access, BuildError, DiskBudget, Home, Import, ImportError, Limits, Manifest, Progress,
    Reference, Source, Start, Template, TemplateError, Templates, Visibility, imported_image,
    is_id, is_reserved,
};
use jiffy_pull::{Cancel, Queue, Registries};
use job::{Failure, Job, Outcome};
use log::Log;
pub use log::Progressing;
use queue::BuildQueue;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use usage::TemplateUsage;

/// By which word of its metadata a sandbox is known as one that a build made.
const LABEL: &str = "jiffy.build";
/// Most steps of one build.
const MAX_STEPS: usize = 1000;
/// Most tags of one build.
const MAX_TAGS: usize = 100;
/// Images by these names are the templates of this host that serve in their place.
const STAND_INS: [(&str, &str); 4] = [
    ("e2bdev/base", "base"),
    ("e2bdev/base:latest", "base"),
    ("e2bdev/code-interpreter", "code-interpreter-v1"),
    ("e2bdev/code-interpreter:latest", "code-interpreter-v1"),
];

/// How builds are carried out.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Builds at once; others wait.
    pub at_once: usize,
    /// How long a step may take.
    pub step_limit: Duration,
    /// Rules about registries, and the network they are asked from.
    pub registries: Registries,
    /// Bounds for what a build changes.
    pub limits: Limits,
    /// How long steps and uploads are kept that no build uses; none: until somebody removes them.
    pub cache_for: Option<Duration>,
    /// API keys that act for the host's owner. Templates that are recorded as theirs become the
    /// host's when a data directory of before templates had owners is taken over.
    pub host_keys: HashSet<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            at_once: 2,
            step_limit: Duration::from_secs(3600),
            registries: Registries::default(),
            limits: Limits::default(),
            cache_for: Some(Duration::from_secs(14 * 24 * 3600)),
            host_keys: HashSet::new(),
        }
    }
}

/// Why the builder does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum BuilderError {
    /// Not a name.
    #[error(
        "`{0}` cannot name a template: use a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit, at most 63, and `name:tag` for a tag"
    )]
    Name(String),
    /// Too many.
    #[error("a build has at most {MAX_TAGS} tags")]
    Tags,
    /// Of a stock template.
    #[error("the name `{0}` is taken: choose another")]
    Taken(String),
    /// Ids, and names of templates that builds make for themselves.
    #[error(
        "`{0}` cannot be chosen as a name: ids and templates that builds make for themselves look so"
    )]
    Reserved(String),
    /// Too many that were not started.
    #[error(
        "{MAX_WAITING_BUILDS} builds of this key wait to be started: start or cancel one; each is given up {} minutes after it was asked for",
        WAITING_BUILD_LIFE.as_secs() / 60
    )]
    Waiting,
    /// No such template.
    #[error("there is no template `{0}`")]
    UnknownTemplate(String),
    /// No such build.
    #[error("template `{template}` has no build `{build}`")]
    UnknownBuild {
        /// Template.
        template: String,
        /// Build.
        build: String,
    },
    /// It has begun already.
    #[error("build {0} was started already: ask for another")]
    Started(String),
    /// What is to be built makes no sense.
    #[error("{0}")]
    Spec(String),
    /// The owner's budget has no room.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// The records.
    #[error(transparent)]
    Records(#[from] RecordError),
    /// Uploads.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// Templates.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// Their tags.
    #[error(transparent)]
    Tag(#[from] BuildError),
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] IdentityError),
    /// The data directory.
    #[error("cannot use the directory of uploads: {0}")]
    Directory(io::Error),
}

/// What a new build is of.
#[derive(Debug, Clone, Default)]
pub struct NewBuild {
    /// `name` or `name:tag`.
    pub name: String,
    /// More tags.
    pub tags: Vec<String>,
    /// What its sandboxes get.
    pub size: WantedSize,
}

/// The builder of a host. Clones are the same.
pub struct Builder<E: Engine>(Arc<Inner<E>>);

impl<E: Engine> Clone for Builder<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A build that goes on.
struct Running {
    cancel: CancellationToken,
    /// Cancelled when it has ended, and its sandboxes with it.
    ended: CancellationToken,
    log: Arc<Log>,
}

pub(crate) struct Inner<E: Engine> {
    sandboxes: Sandboxes<E>,
    templates: Templates,
    records: Arc<Records>,
    uploads: Uploads,
    settings: Settings,
    queue: BuildQueue,
    pulls: Queue,
    /// Budgets of owners; none: they have none.
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
    template_usage: Mutex<TemplateUsage>,
    running: Mutex<HashMap<String, Running>>,
    /// Held while names are entered or forgotten.
    naming: Mutex<()>,
    /// Builds of one template wait for each other.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl<E: Engine> Inner<E> {
    /// The template that `which` (an id or name, perhaps with a tag) means for `owner`; none: the
    /// host's owner.
    fn resolve_for(&self, which: &str, owner: Option<&str>) -> Result<String, BuilderError> {
        let look = |reference: &Reference| {
            let found = self.templates.look_up(reference);
            let stock = reference.is_stock().then_some(Visibility::Public);
            // One that is not built yet is built when it is used.
            found
                .map(|manifest| manifest.map(|m| m.visibility).or(stock))
                .map_err(BuilderError::Template)
        };
        let found = resolve(which, owner, Some(&*self.records), &look)?;
        let found = found.map(|meaning| meaning.reference.to_string());
        found.ok_or_else(|| BuilderError::UnknownTemplate(shown(which)))
    }

    /// Tells names of templates from images in a registry: `owner/name` is a template, if the owner
    /// can be a key, so that no registry is asked for what a key withdrew; a bare name is, if it
    /// means a template for `owner`.
    fn is_template(&self, name: &str, owner: Option<&str>) -> bool {
        match name.split_once('/') {
            Some((key, _)) => is_id(key),
            None => self.resolve_for(name, owner).is_ok(),
        }
    }

    /// The template of an image, in the namespace of `owner`. It is kept under a name that says
    /// which image it is of, and made anew when that changed. `caller` is who asks the registry.
    fn import(
        &self,
        image: &ImageSource,
        owner: Option<&str>,
        caller: Option<&str>,
        cancel: &Cancel,
        disk: DiskBudget,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Manifest, ImportError> {
        let name = imported_image(owner, &image.reference);
        let name = Reference::in_namespace(owner, &name)?.to_string();
        let host = image.reference.split('/').next().unwrap_or_default();
        let mut pull = self.settings.registries.pull(caller.is_some(), cancel);
        let own = host.starts_with("localhost:") || host.starts_with("127.0.0.1:");
        // Only its owner may have this host ask around in its own network.
        if caller.is_none() && (image.plain_http || own) {
            pull.registries.plain_http.push(host.to_owned());
        }
        let import = Import {
            name,
            visibility: Some(Visibility::Internal),
            source: Source::Registry {
                reference: image.reference.clone(),
                pull,
                access: match &image.credentials {
                    Some((name, password)) => Access::User {
                        name: name.clone(),
                        password: password.clone(),
                    },
                    // What the host's owner may read is not for everybody.
                    None if caller.is_some() => Access::Nobody,
                    None => Access::Host,
                },
            },
            vcpus: None,
            memory_mib: None,
            disk_mib: None,
            start: Start::Nothing,
            ready: None,
            limits: self.settings.limits,
            disk,
        };
        let template: Template = self.templates.import(&import, on_progress)?;
        Ok(template.manifest)
    }
}

impl<E: Engine> Builder<E> {
    /// The builder of the host with the data directory `home`. Builds that another daemon left behind are over, and so are their
    /// sandboxes.
    pub async fn open(
        home: &Home,
        sandboxes: Sandboxes<E>,
        settings: Settings,
    ) -> Result<Self, BuilderError> {
        let records = Arc::new(Records::open(home.path())?);
        records.abandon(&Reason {
            message: "the daemon was stopped while it built: build again, and it goes on after the last step that was done".to_owned(),
            step: None,
        })?;
        let uploads = home.path().join("uploads");
        let builder = Self(Arc::new(Inner {
            templates: Templates::new(home),
            records,
            uploads: Uploads::open(uploads).map_err(BuilderError::Directory)?,
            queue: BuildQueue::new(settings.at_once),
            pulls: Queue::default(),
            settings,
            quota: Mutex::default(),
            template_usage: Mutex::default(),
            running: Mutex::default(),
            naming: Mutex::default(),
            turns: Mutex::default(),
            sandboxes,
        }));
        for left in builder.0.sandboxes.list() {
            if left.terms.metadata.contains_key(LABEL)
                && let Err(e) = builder.0.sandboxes.remove(&left.id).await
            {
                tracing::warn!("sandbox {} of an earlier build stays: {e}", left.id);
            }
        }
        builder.migrate().await?;
        builder.remove_unfinished().await?;
        builder.keep_waiting_bounded();
        if let Some(unused_for) = builder.0.settings.cache_for {
            builder.keep_pruned(unused_for);
        }
        Ok(builder)
    }

    /// What it knows.
    pub fn records(&self) -> &Records {
        &self.0.records
    }

    /// Files that clients send.
    pub fn uploads(&self) -> &Uploads {
        &self.0.uploads
    }

    /// The template with this id or name that `owner` may change; none: the host's owner, who may
    /// change all.
    pub fn own(&self, which: &str, owner: Option<&str>) -> Result<TemplateRecord, BuilderError> {
        let word = which.split(':').next().unwrap_or_default();
        let theirs = |t: &TemplateRecord| owner.is_none() || t.owner.as_deref() == owner;
        if is_id(word)
            && let Some(found) = self.known_id(word)?.filter(theirs)
        {
            return Ok(found);
        }
        let (namespace, name) = match word.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (owner, word),
        };
        let found = self.known(namespace, name)?.filter(theirs);
        found.ok_or_else(|| BuilderError::UnknownTemplate(shown(which)))
    }

    /// A build of a template that `owner` may change.
    pub fn own_build(
        &self,
        template: &str,
        build: &str,
        owner: Option<&str>,
    ) -> Result<(TemplateRecord, BuildRecord), BuilderError> {
        let template = self.own(template, owner)?;
        let found = self.0.records.build(build)?;
        match found.filter(|b| b.template == template.id) {
            Some(build) => Ok((template, build)),
            None => Err(BuilderError::UnknownBuild {
                template: template.name,
                build: shown(build),
            }),
        }
    }

    /// Enters a build of a template in the namespace of `owner` (none: the host's owner), which
    /// waits for its files and for its start. `caller` is the key that asks, if one does.
    pub fn request(
        &self,
        new: &NewBuild,
        owner: Option<&str>,
        caller: Option<&str>,
    ) -> Result<(TemplateRecord, BuildRecord), BuilderError> {
        let (name, tag) = match new.name.split_once(':') {
            Some((name, tag)) => (name, Some(tag.to_owned())),
            None => (new.name.as_str(), None),
        };
        let name = name.to_ascii_lowercase();
        // One's own namespace may be said.
        let bare = name.split_once('/').filter(|(key, _)| Some(*key) == owner);
        let name = bare.map_or(name.clone(), |(_, bare)| bare.to_owned());
        check_name(&name)?;
        let template = TemplateRecord {
            id: new_id()?,
            name,
            owner: owner.map(str::to_owned),
            public: false,
            created_ms: now_ms(),
        };
        let mut tags: Vec<String> = Vec::new();
        for tag in tag.into_iter().chain(new.tags.iter().cloned()) {
            check_name(&job::tagged(&template.name, &tag))?;
            if !tags.contains(&tag) {
                tags.push(tag);
            }
        }
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned());
        }
        if tags.len() > MAX_TAGS {
            return Err(BuilderError::Tags);
        }
        let reference = Reference::in_namespace(None, &template.name)?;
        if reference.is_stock() {
            return Err(BuilderError::Taken(template.name));
        }
        if is_reserved(&template.name) {
            return Err(BuilderError::Reserved(template.name));
        }
        // One more build, and one more template at its end: held until the build is entered.
        let _permit = match (caller, lock(&self.0.quota).clone()) {
            (Some(caller), Some(quota)) => Some(quota.try_reserve(caller, one_build())?),
            _ => None,
        };
        let _naming = lock(&self.0.naming);
        self.0.check_waiting(caller)?;
        self.current(self.0.records.named(owner, &template.name)?)?;
        let template = self.0.records.enter_template(&template)?;
        let now = now_ms();
        let build = BuildRecord {
            id: uuid()?,
            template: template.id.clone(),
            caller: caller.map(str::to_owned),
            tags,
            size: new.size,
            status: Status::Waiting,
            reason: None,
            steps: Vec::new(),
            version: None,
            created_ms: now,
            changed_ms: now,
        };
        self.0.records.enter_build(&build)?;
        Ok((template, build))
    }

    /// Starts a build that was entered; it goes on behind this call.
    pub fn start(
        &self,
        template: &TemplateRecord,
        build: &BuildRecord,
        spec: BuildSpec,
    ) -> Result<(), BuilderError> {
        check(&spec)?;
        if build.status != Status::Waiting {
            return Err(BuilderError::Started(build.id.clone()));
        }
        let token = CancellationToken::new();
        let ended = CancellationToken::new();
        let log = Arc::new(Log::new(self.0.records.clone(), &build.id));
        {
            let mut running = lock(&self.0.running);
            if running.contains_key(&build.id) {
                return Err(BuilderError::Started(build.id.clone()));
            }
            let this = Running {
                cancel: token.clone(),
                ended: ended.clone(),
                log: log.clone(),
            };
            running.insert(build.id.clone(), this);
        }
        let spec = self.with_stand_ins(spec);
        let job = Job::new(
            self.0.clone(),
            template.clone(),
            build.clone(),
            spec,
            log.clone(),
        );
        let (this, template, id) = (self.clone(), template.clone(), build.id.clone());
        tokio::spawn(async move {
            let built = tokio::select! {
                built = this.carry_out(&template, &id, &job, &log) => built,
                () = token.cancelled() => Err(Failure::of("the build was cancelled")),
            };
            job.clear().await;
            this.conclude(&template, &id, built, &log).await;
            ended.cancel();
            job.remove_hidden().await;
            lock(&this.0.running).remove(&id);
        });
        Ok(())
    }

    async fn carry_out(
        &self,
        template: &TemplateRecord,
        id: &str,
        job: &Job<E>,
        log: &Log,
    ) -> Result<Outcome, Failure> {
        let turn = lock(&self.0.turns)
            .entry(template.id.clone())
            .or_default()
            .clone();
        let _turn = match turn.clone().try_lock_owned() {
            Ok(turn) => turn,
            Err(_) => {
                log.info(None, "waiting: the same template is being built already");
                turn.lock_owned().await
            }
        };
        let on_wait = || log.info(None, "waiting: other templates are being built");
        let slot = self.0.queue.enter(template.owner.as_deref(), on_wait);
        let _slot = slot.await.ok_or_else(|| Failure::of("the daemon ends"))?;
        let moved = self
            .0
            .records
            .move_on(id, Status::Waiting, Status::Building);
        moved.map_err(|e| Failure::of(e.to_string()))?;
        job.run().await
    }

    /// Writes down how a build ended.
    async fn conclude(
        &self,
        template: &TemplateRecord,
        id: &str,
        built: Result<Outcome, Failure>,
        log: &Log,
    ) {
        let ready = built.is_ok();
        let end = match built {
            Ok(outcome) => {
                log.info(None, "the template is ready");
                End::Ready(outcome.steps, outcome.version)
            }
            Err(failure) => {
                let step = failure.step.clone();
                log.say(Level::Error, step.as_deref(), &failure.message);
                End::Failed(failure.into())
            }
        };
        self.0.records.end(&template.id, id, end).await;
        if ready {
            self.release_steps(&template.id);
        }
    }

    /// What a build does just now that takes a while, if it does.
    pub fn progress(&self, build: &str) -> Option<Progressing> {
        lock(&self.0.running).get(build)?.log.progress()
    }

    /// Waits until a build has ended, with its sandboxes.
    pub async fn ended(&self, build: &str) {
        let ended = lock(&self.0.running).get(build).map(|b| b.ended.clone());
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
    }

    /// Ends a build. One that is over stays as it is.
    pub fn cancel(&self, build: &BuildRecord) -> Result<(), BuilderError> {
        if let Some(running) = lock(&self.0.running).get(&build.id) {
            running.cancel.cancel();
            return Ok(());
        }
        Ok(self.0.records.fail(
            &build.id,
            &Reason {
                message: "the build was cancelled before it began".to_owned(),
                step: None,
            },
        )?)
    }

    /// Gives more tags to what `target` (a template, perhaps with a tag) is; returns the build that it is of.
    pub async fn tag(
        &self,
        template: &TemplateRecord,
        target: &str,
        tags: &[String],
    ) -> Result<String, BuilderError> {
        let tag = target.split_once(':').map_or(DEFAULT_TAG, |(_, tag)| tag);
        let unknown = || BuilderError::UnknownTemplate(shown(target));
        let builds = self.0.records.builds(&template.id)?;
        let ready = |b: &&BuildRecord| b.status == Status::Ready;
        let mut ready = builds.iter().filter(ready);
        let build = ready.find(|b| b.tags.iter().any(|t| t == tag));
        let build = build.ok_or_else(unknown)?;
        if tags.len() > MAX_TAGS {
            return Err(BuilderError::Tags);
        }
        for tag in tags {
            check_name(&job::tagged(&template.name, tag))?;
        }
        let names: Vec<String> = tags.iter().map(|tag| template.called(tag)).collect();
        // Held until the tags are there.
        let owner = template.owner.as_deref();
        let _permit = self.0.reserve_template(owner, &names, 0).await?;
        let (from, named) = (template.called(tag), template.clone());
        let (templates, wanted) = (self.0.templates.clone(), tags.to_vec());
        let work = move || {
            let mut wanted = wanted.iter().map(|tag| named.called(tag));
            let wish = Visibility::default();
            wanted.try_for_each(|to| templates.tag(&from, &to, wish).map(drop))
        };
        blocking(work).await??;
        self.0.records.retag(&template.id, Some(&build.id), tags)?;
        Ok(build.id.clone())
    }

    /// Takes tags from a template.
    pub async fn untag(
        &self,
        template: &TemplateRecord,
        tags: &[String],
    ) -> Result<(), BuilderError> {
        for tag in tags {
            check_name(&job::tagged(&template.name, tag))?;
        }
        let (templates, named, gone) = (self.0.templates.clone(), template.clone(), tags.to_vec());
        let work = move || {
            for tag in &gone {
                match templates.remove(&named.called(tag)) {
                    Ok(()) | Err(TemplateError::Unknown { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(())
        };
        blocking(work).await??;
        self.0.records.retag(&template.id, None, tags)?;
        self.sweep().await
    }

    /// Removes a template with all its tags and builds. Sandboxes that run of it go on.
    pub async fn remove(&self, template: &TemplateRecord) -> Result<(), BuilderError> {
        let builds = self.0.records.builds(&template.id)?;
        for build in &builds {
            self.cancel(build)?;
        }
        let mut tags: Vec<String> = builds.into_iter().flat_map(|b| b.tags).collect();
        tags.push(DEFAULT_TAG.to_owned());
        self.untag(template, &tags).await?;
        Ok(self.0.records.forget_template(&template.id)?)
    }

    /// Lets every key use a template, or its owner alone.
    pub async fn set_public(
        &self,
        template: &TemplateRecord,
        public: bool,
    ) -> Result<(), BuilderError> {
        self.0.records.set_public(&template.id, public)?;
        let visibility = match public {
            true => Visibility::Public,
            false => Visibility::Private,
        };
        let (templates, name) = (self.0.templates.clone(), template.called(DEFAULT_TAG));
        match blocking(move || templates.set_visibility(&name, visibility)).await? {
            // It is so when it is built.
            Err(BuildError::Template(TemplateError::Unknown { .. })) | Ok(()) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// What waits to become a sandbox of what is no template any more need not wait for the next sweep.
    async fn sweep(&self) -> Result<(), BuilderError> {
        let sandboxes = self.0.sandboxes.clone();
        if let Err(e) = blocking(move || sandboxes.sweep()).await? {
            tracing::warn!("what removed templates leave stays for now: {e}");
        }
        Ok(())
    }

    fn with_stand_ins(&self, mut spec: BuildSpec) -> BuildSpec {
        use crate::spec::Beginning;
        for stage in &mut spec.stages {
            let named = match &stage.from {
                Beginning::Name(name) => name.as_str(),
                Beginning::Image(image) => image.reference.as_str(),
                _ => continue,
            };
            let stand_in = STAND_INS.iter().find(|(image, _)| *image == named);
            if let Some((_, template)) = stand_in {
                stage.from = Beginning::Template((*template).to_owned());
            }
        }
        spec
    }
}

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pruned {
    /// Snapshots of steps.
    pub steps: usize,
    /// Bytes of uploads.
    pub upload_bytes: u64,
}

/// Things that make later builds faster and were not used for long.
#[derive(Debug, Clone, Default)]
pub struct Prunable {
    /// Snapshots of steps.
    pub steps: Vec<SnapshotRecord>,
    /// Bytes of uploads.
    pub upload_bytes: u64,
    /// Templates that images of registries became for builds.
    pub imports: Vec<String>,
}

/// Room for a build.
fn one_build() -> QuotaRequest {
    QuotaRequest {
        amount: QuotaAmount {
            builds: 1,
            ..QuotaAmount::default()
        },
        disk_floor: None,
    }
}

/// Whether a build can be begun at all.
fn check(spec: &BuildSpec) -> Result<(), BuilderError> {
    let steps: usize = spec.stages.iter().map(|s| s.steps.len()).sum();
    let refuse = |why: String| Err(BuilderError::Spec(why));
    if spec.stages.is_empty() {
        return refuse("there is no stage to build".to_owned());
    }
    if steps > MAX_STEPS || spec.stages.len() > MAX_STEPS {
        return refuse(format!(
            "a build has at most {MAX_STEPS} steps, and this one has {steps}"
        ));
    }
    if let Some(ready) = &spec.startup.ready
        && let Err(why) = ready.probe()
    {
        return refuse(why);
    }
    Ok(())
}

fn check_name(reference: &str) -> Result<(), BuilderError> {
    let parsed = Reference::parse(reference);
    parsed
        .map(drop)
        .map_err(|_| BuilderError::Name(shown(reference)))
}

/// Does what blocks elsewhere.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BuilderError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| BuilderError::Directory(io::Error::other(e)))
}

/// As much of what was asked for as a message can take.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(128).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random UUID.
fn uuid() -> Result<String, IdentityError> {
    let token = new_token()?;
    let digits: String = token.chars().filter(char::is_ascii_hexdigit).collect();
    let digits = format!("{digits:0<32}");
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default().to_owned();
    Ok(format!(
        "{}-{}-4{}-8{}-{}",
        part(0, 8),
        part(8, 12),
        part(13, 16),
        part(17, 20),
        part(20, 32)
    ))
}
