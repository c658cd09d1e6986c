//! One build, from its beginning to the template.

use super::copy::{self, ROOT, STAGING, Wanted};
use super::log::{LineCutter, Log};
use super::records::{BuildRecord, Reason, TemplateRecord};
use super::setting::Setting;
use super::user::add_user;
use super::{Inner, LABEL, key};
use crate::spec::{
    Action, Beginning, BuildSpec, Command, Copy, CopyFrom, ImageSource, Stage, Step,
};
use jiffy_agent_client::{AgentClient, ClientError, ProcessEvent, ProcessSpec};
use jiffy_engine::{Engine, SandboxSize, StartCommand, Startup};
use jiffy_host::{
    Bytes, CreateSpec, OnTimeout, QuotaAmount, QuotaRequest, Source, Terms, usual_size,
};
use jiffy_image::{
    Defaults, Derived, Manifest, Progress, Step as HistoryStep, TemplateError, Visibility,
    unfinished_build,
};
use jiffy_pull::Cancel;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Refusal to start the command of an image that has none.
const NO_IMAGE_COMMAND: &str = "there is no command to start: neither the Dockerfile nor what it \
     begins with has a CMD or an ENTRYPOINT; name one with --start";

const BASH: &str = "/bin/bash";
/// Shown of a step in messages.
const SHOWN: usize = 120;
/// After this time a sandbox of a build ends by itself.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// Why a build failed.
#[derive(Debug)]
pub struct Failure {
    pub message: String,
    /// Where; filled in by whoever knows.
    pub step: Option<String>,
}

impl Failure {
    pub fn of(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            step: None,
        }
    }

    /// An error with what it comes from.
    fn because(error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self::of(message)
    }

    /// The agent did not do what it was asked.
    pub fn agent(what: &str, error: ClientError) -> Self {
        Self::of(format!("cannot {what}: {error}"))
    }

    fn at(self, step: &str) -> Self {
        let step = self.step.or_else(|| Some(step.to_owned()));
        Self { step, ..self }
    }
}

impl From<Failure> for Reason {
    fn from(failure: Failure) -> Self {
        Self {
            message: failure.message,
            step: failure.step,
        }
    }
}

/// What a stage has come to.
struct Progressed {
    key: String,
    setting: Setting,
    base: Arc<Manifest>,
    /// Template or snapshot that a sandbox of it is made from.
    source: Source,
    /// A sandbox that is there, if one is.
    sandbox: Option<String>,
    size: SandboxSize,
    history: Vec<HistoryStep>,
    /// Keys of the steps with snapshots.
    steps: Vec<String>,
}

/// A build that goes on.
pub struct Job<E: Engine> {
    inner: Arc<Inner<E>>,
    template: TemplateRecord,
    build: BuildRecord,
    spec: BuildSpec,
    log: Arc<Log>,
    /// Sandboxes that there are because of it.
    sandboxes: Mutex<Vec<String>>,
    /// Held while the template is written, which goes on when the build is cancelled.
    writing: Arc<tokio::sync::Mutex<()>>,
}

/// What a build became.
pub struct Outcome {
    pub version: String,
    pub steps: Vec<String>,
}

impl<E: Engine> Job<E> {
    pub fn new(
        inner: Arc<Inner<E>>,
        template: TemplateRecord,
        build: BuildRecord,
        spec: BuildSpec,
        log: Arc<Log>,
    ) -> Self {
        Self {
            inner,
            template,
            build,
            spec,
            log,
            sandboxes: Mutex::default(),
            writing: Arc::default(),
        }
    }

    /// Builds. Its sandboxes are to be removed afterwards, however it ends ([`Self::clear`]).
    pub async fn run(&self) -> Result<Outcome, Failure> {
        let count = self.spec.stages.len();
        let needed = needed(&self.spec)?;
        let total = needed.iter().zip(&self.spec.stages);
        let said = |s: &Stage| s.steps.iter().filter(|step| !is_silent(step)).count();
        let total = total.map(|(n, s)| if *n { said(s) } else { 0 }).sum();
        let mut counter = Counter { done: 0, total };
        let mut stages: Vec<Option<Progressed>> = Vec::with_capacity(count);
        for (stage, needed) in self.spec.stages.iter().zip(needed) {
            let progressed = match needed {
                true => Some(self.stage(stage, &mut stages, &mut counter).await?),
                false => None,
            };
            stages.push(progressed);
        }
        let last = stages.pop().flatten();
        let last = last.ok_or_else(|| Failure::of("there is nothing to build"))?;
        self.finish(last).await.map_err(|e| e.at("finalize"))
    }

    /// Removes the sandboxes of the build.
    pub async fn clear(&self) {
        let sandboxes = std::mem::take(&mut *lock(&self.sandboxes));
        for id in sandboxes {
            if let Err(e) = self.inner.sandboxes.remove(&id).await {
                tracing::warn!("sandbox {id} of build {} stays: {e}", self.build.id);
            }
        }
    }

    /// Removes the template under the build's own name, which one that was cancelled left. Needs
    /// that its sandboxes are gone: what is written of them then ends.
    pub async fn remove_hidden(&self) {
        let _writing = self.writing.lock().await;
        let (templates, name) = (self.inner.templates.clone(), self.hidden());
        let remove = move || match templates.manifest(&name) {
            Err(TemplateError::Unknown { .. }) => Ok(()),
            _ => templates.remove(&name),
        };
        match tokio::task::spawn_blocking(remove).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::warn!("template {} stays: {e}", self.hidden()),
            Err(e) => tracing::warn!("template {} stays: {e}", self.hidden()),
        }
    }

    async fn stage(
        &self,
        stage: &Stage,
        before: &mut [Option<Progressed>],
        counter: &mut Counter,
    ) -> Result<Progressed, Failure> {
        let mut at = self.begin(stage, before).await.map_err(|e| e.at("base"))?;
        if before.len() + 1 == self.spec.stages.len() {
            self.check_startup(&at, stage).map_err(|e| e.at("base"))?;
        }
        let mut fresh = self.spec.force;
        for step in &stage.steps {
            if !is_silent(step) {
                counter.done += 1;
            }
            let (done, total) = (counter.done, counter.total);
            let shown = format!("[{done}/{total}] {}", short(&step.text));
            let name = done.to_string();
            let taken = self
                .step(step, &mut at, before, &mut fresh, &shown, &name)
                .await;
            taken.map_err(|e| Failure {
                message: match step.line {
                    Some(line) => format!("line {line}, {}: {}", short(&step.text), e.message),
                    None if is_silent(step) => e.message,
                    None => format!("{}: {}", short(&step.text), e.message),
                },
                step: Some(name),
            })?;
        }
        Ok(at)
    }

    /// The stage before its first step.
    async fn begin(
        &self,
        stage: &Stage,
        before: &[Option<Progressed>],
    ) -> Result<Progressed, Failure> {
        if let Beginning::Stage(n) = &stage.from {
            let from = before.get(*n).and_then(Option::as_ref);
            let from =
                from.ok_or_else(|| Failure::of("it begins with a stage that is not before it"))?;
            return Ok(Progressed {
                key: from.key.clone(),
                setting: from.setting.handed_on(),
                base: from.base.clone(),
                source: from.source.clone(),
                sandbox: None,
                size: from.size,
                history: from.history.clone(),
                steps: from.steps.clone(),
            });
        }
        let base = self.base(&stage.from).await?;
        let size = self.size(&base.defaults)?;
        let name = base.reference();
        let word = self.inner.sandboxes.fingerprint(&name, size).await;
        let word = word.map_err(|e| Failure::of(e.to_string()))?;
        let origin = base.origin.clone().unwrap_or_default();
        let mut setting = Setting::of(&base.defaults);
        (setting.entrypoint, setting.cmd) = (origin.entrypoint, origin.cmd);
        setting.exposed = origin.exposed_ports;
        Ok(Progressed {
            key: key::beginning(self.template.owner.as_deref(), &word),
            setting,
            source: Source::Template(name),
            sandbox: None,
            size,
            history: Vec::new(),
            steps: Vec::new(),
            base: Arc::new(base),
        })
    }

    /// The template that a stage begins with; an image becomes one.
    async fn base(&self, from: &Beginning) -> Result<Manifest, Failure> {
        let image = match from {
            Beginning::Template(name) => return self.local(name).await,
            Beginning::Name(name) => {
                if self.inner.is_template(name, self.template.owner.as_deref()) {
                    return self.local(name).await;
                }
                &ImageSource {
                    reference: name.clone(),
                    credentials: None,
                    plain_http: false,
                }
            }
            Beginning::Image(image) => image,
            Beginning::Scratch => {
                return Err(Failure::of(
                    "a template that begins with nothing has nothing to run: begin with an image or a template",
                ));
            }
            Beginning::Stage(_) => return Err(Failure::of("a stage is no template")),
        };
        self.log
            .info(Some("base"), &format!("image {}", image.reference));
        let (inner, log, image) = (self.inner.clone(), self.log.clone(), image.clone());
        let (owner, caller) = (self.template.owner.clone(), self.build.caller.clone());
        let place = self.inner.pulls.enter(caller.as_deref()).await;
        let disk = self.inner.image_budget(owner.as_deref()).await;
        let disk = disk.map_err(|e| Failure::because(&e))?;
        let cancel = Cancel::new().map_err(|e| Failure::because(&e))?;
        // A build that is cancelled drops this: its puller dies at once.
        let _guard = cancel.guard();
        let work = move || {
            let mut on_progress = |progress: Progress<'_>| log.on_progress("base", &progress);
            let (owner, caller) = (owner.as_deref(), caller.as_deref());
            let imported = inner.import(&image, owner, caller, &cancel, disk, &mut on_progress);
            drop(place);
            if let Err(Some(detail)) = imported.as_ref().map_err(|e| e.detail()) {
                tracing::info!("image {} for a key: {detail}", image.reference);
            }
            imported
        };
        let imported = tokio::task::spawn_blocking(work).await;
        self.log.end_progress();
        imported
            .map_err(|e| Failure::of(e.to_string()))?
            .map_err(|e| Failure::because(&e))
    }

    async fn local(&self, name: &str) -> Result<Manifest, Failure> {
        let owner = self.template.owner.as_deref();
        let found = self.inner.resolve_for(name, owner);
        let name = found.map_err(|e| Failure::of(e.to_string()))?;
        // A stock template that is not built yet is built now.
        let usual = SandboxSize::default();
        let built = self.inner.sandboxes.fingerprint(&name, usual).await;
        built.map_err(|e| Failure::of(e.to_string()))?;
        let manifest = self.inner.templates.manifest(&name);
        manifest.map_err(|e| Failure::of(e.to_string()))
    }

    /// What the sandboxes of the build get, and then those of the template.
    fn size(&self, base: &Defaults) -> Result<SandboxSize, Failure> {
        let usual = usual_size(base);
        let wanted = self.build.size;
        let size = SandboxSize {
            vcpus: wanted.vcpus.unwrap_or(usual.vcpus),
            memory_mib: wanted.memory_mib.unwrap_or(usual.memory_mib),
            disk_mib: usual.disk_mib.max(wanted.disk_mib.unwrap_or(0)),
        };
        size.check().map_err(|e| Failure::of(e.to_string()))?;
        Ok(size)
    }

    /// Takes one step, or takes up what an earlier build made of it.
    async fn step(
        &self,
        step: &Step,
        at: &mut Progressed,
        before: &mut [Option<Progressed>],
        fresh: &mut bool,
        shown: &str,
        name: &str,
    ) -> Result<(), Failure> {
        *fresh |= step.force;
        let files = self.files(step, before)?;
        at.key = key::step(&at.key, step, files.as_ref().map_or("", |f| f.key()));
        let began = Instant::now();
        let changes_files = matches!(
            step.action,
            Action::Run { .. } | Action::Copy(_) | Action::Workdir(_) | Action::AddUser(_)
        );
        let said = |message: &str| {
            if !is_silent(step) {
                self.log.info(Some(name), message);
            }
        };
        if !changes_files {
            said(shown);
            return at.setting.apply(&step.action).map_err(Failure::of);
        }
        at.steps.push(at.key.clone());
        let known = match *fresh {
            true => None,
            false => self.inner.sandboxes.step(&at.key),
        };
        if let Some(snapshot) = known {
            self.inner.use_step(&at.key);
            said(&format!("CACHED {shown}"));
            at.setting.apply(&step.action).map_err(Failure::of)?;
            at.source = Source::Snapshot(snapshot.id);
            self.let_go(at).await;
            at.remember(step, None);
            return Ok(());
        }
        // What follows was made of something else.
        *fresh = true;
        said(shown);
        let agent = self.agent(at).await?;
        match &step.action {
            Action::Run { command, user } => {
                self.run_command(&agent, at, command, user.as_deref(), name)
                    .await?;
            }
            Action::Copy(copy) => self.copy(&agent, at, copy, files, before).await?,
            Action::AddUser(user) => add_user(&agent, user).await?,
            _ => {}
        }
        at.setting.apply(&step.action).map_err(Failure::of)?;
        if let Action::Workdir(_) = step.action {
            // Whoever works there may write there, where its parents allow it.
            let (path, user) = (&at.setting.workdir, &at.setting.user);
            if copy::make_directory(&agent, path, user).await.is_err() {
                copy::make_directory(&agent, path, ROOT).await?;
            }
        }
        let sandbox = at.sandbox.as_deref().unwrap_or_default();
        let snapshot = self.inner.sandboxes.snapshot_step(sandbox, &at.key).await;
        let snapshot = snapshot.map_err(|e| Failure::of(e.to_string()))?;
        self.inner.use_step(&at.key);
        at.source = Source::Snapshot(snapshot.id);
        at.remember(step, Some(began.elapsed()));
        Ok(())
    }

    /// The sandbox that was there is not what the stage has come to any more.
    async fn let_go(&self, at: &mut Progressed) {
        if let Some(id) = at.sandbox.take() {
            lock(&self.sandboxes).retain(|other| *other != id);
            if let Err(e) = self.inner.sandboxes.remove(&id).await {
                tracing::warn!("sandbox {id} of build {} stays: {e}", self.build.id);
            }
        }
    }

    /// The agent of a sandbox that is what the stage has come to; made if there is none.
    async fn agent(&self, at: &mut Progressed) -> Result<AgentClient, Failure> {
        let sandboxes = &self.inner.sandboxes;
        if at.sandbox.is_none() {
            let spec = CreateSpec {
                size: match at.source {
                    Source::Template(_) => Some(at.size),
                    Source::Snapshot(_) => None,
                },
                source: at.source.clone(),
                name: None,
                engine: None,
                env: BTreeMap::new(),
                terms: Terms {
                    owner: self.build.caller.clone(),
                    metadata: [(LABEL.to_owned(), self.build.id.clone())].into(),
                    timeout_s: Some(LIFE.as_secs()),
                    on_timeout: OnTimeout::Kill,
                    secure: true,
                    ..Terms::default()
                },
            };
            let cannot = |e: &dyn std::fmt::Display| {
                Failure::of(format!("cannot make a sandbox to build in: {e}"))
            };
            let request = QuotaRequest {
                amount: QuotaAmount {
                    sandboxes: 1,
                    vcpus: at.size.vcpus.into(),
                    memory_mib: at.size.memory_mib.into(),
                    ..QuotaAmount::default()
                },
                disk_floor: None,
            };
            // Held until it runs.
            let room = self.inner.reserve(self.build.caller.as_deref(), request);
            let _room = room.await.map_err(|e| cannot(&e))?;
            let made = sandboxes.create(spec).await.map_err(|e| cannot(&e))?;
            lock(&self.sandboxes).push(made.id.clone());
            at.sandbox = Some(made.id);
        }
        let id = at.sandbox.as_deref().unwrap_or_default();
        sandboxes.agent(id).map_err(|e| Failure::of(e.to_string()))
    }

    async fn run_command(
        &self,
        agent: &AgentClient,
        at: &Progressed,
        command: &Command,
        user: Option<&str>,
        name: &str,
    ) -> Result<(), Failure> {
        let words = match command {
            Command::Line(line) => at.setting.shell_words(line),
            Command::Exec(words) => words.clone(),
        };
        let (program, args) = words
            .split_first()
            .ok_or_else(|| Failure::of("there is no program to run"))?;
        // Clients that know one shell only mean any.
        let bash = program.as_str() == BASH && agent.stat(BASH, Some(ROOT)).await.is_err();
        let program: &str = if bash { "/bin/sh" } else { program };
        let limit = self.inner.settings.step_limit;
        let spec = ProcessSpec {
            envs: at.setting.environment(),
            cwd: Some(at.setting.workdir.clone()),
            user: Some(user.unwrap_or(&at.setting.user).to_owned()),
            timeout: Some(limit),
            ..ProcessSpec::new(program, args)
        };
        let began = Instant::now();
        let mut process = agent
            .start(&spec)
            .await
            .map_err(|e| Failure::agent(&format!("run {program}"), e))?;
        let (mut out, mut err) = (LineCutter::default(), LineCutter::default());
        let say = |lines: Vec<String>| {
            for line in lines {
                self.log.info(Some(name), &line);
            }
        };
        let end = loop {
            let event = process.next_event().await;
            match event.map_err(|e| Failure::agent("hear from the command", e))? {
                Some(ProcessEvent::Stdout(bytes)) => say(out.push(&bytes)),
                Some(ProcessEvent::Stderr(bytes)) => say(err.push(&bytes)),
                Some(ProcessEvent::End(end)) => break end,
                Some(_) => {}
                None => return Err(Failure::of("the sandbox ended while the command ran")),
            }
        };
        say(out.rest().into_iter().chain(err.rest()).collect());
        if end.exited && end.exit_code == 0 {
            return Ok(());
        }
        Err(Failure::of(match end {
            _ if began.elapsed() >= limit => format!("it took longer than {} s", limit.as_secs()),
            end if end.oom_killed => format!(
                "there was no memory left for it ({} MiB): give the template more with --memory",
                at.size.memory_mib
            ),
            end => format!("it failed: {}", end.status),
        }))
    }

    /// What a step copies.
    fn files(&self, step: &Step, before: &[Option<Progressed>]) -> Result<Option<Files>, Failure> {
        let Action::Copy(copy) = &step.action else {
            return Ok(None);
        };
        Ok(Some(match &copy.from {
            CopyFrom::Files(name) => {
                let owner = self.template.owner.as_deref();
                let found = self.inner.uploads.find(owner, name);
                let found = found.map_err(|e| Failure::of(e.to_string()))?;
                let (path, sum) = found.ok_or_else(|| {
                    Failure::of("its files were not uploaded, or were removed since: build again")
                })?;
                Files::Upload { path, sum }
            }
            CopyFrom::Stage(n) => {
                let stage = before.get(*n).and_then(Option::as_ref);
                let stage = stage
                    .ok_or_else(|| Failure::of("it copies from a stage that is not before it"))?;
                Files::Stage {
                    number: *n,
                    key: stage.key.clone(),
                }
            }
            CopyFrom::Inline(files) => Files::Inline(files.clone()),
        }))
    }

    async fn copy(
        &self,
        agent: &AgentClient,
        at: &Progressed,
        copy: &Copy,
        files: Option<Files>,
        before: &mut [Option<Progressed>],
    ) -> Result<(), Failure> {
        let wanted = Wanted::new(copy, &at.setting).map_err(Failure::of)?;
        let nothing_left = agent.remove(STAGING, Some(ROOT)).await;
        nothing_left.map_err(|e| Failure::agent(&format!("clear {STAGING}"), e))?;
        let items = match files {
            Some(Files::Upload { path, .. }) => {
                super::transfer::upload(agent, &path, STAGING, &wanted).await?;
                copy::matches(agent, STAGING, &wanted.sources).await?
            }
            Some(Files::Stage { number, .. }) => {
                let stage = before.get_mut(number).and_then(Option::as_mut);
                let stage = stage.ok_or_else(|| Failure::of("that stage is gone"))?;
                let from = self.agent(stage).await?;
                // Authorities of the network that is built in are not for what is copied.
                let withdrawn = from.withdraw_site().await;
                withdrawn.map_err(|e| Failure::agent("take out what is the host's", e))?;
                let found = copy::matches(&from, "/", &wanted.sources).await?;
                super::transfer::between(&from, agent, &found, STAGING, &wanted).await?
            }
            Some(Files::Inline(files)) => {
                let sources: Vec<String> = files.iter().map(|(name, _)| name.clone()).collect();
                let filled = files
                    .into_iter()
                    .map(|(name, content)| Ok::<_, String>((name, at.setting.expand(&content)?)));
                let files = filled.collect::<Result<Vec<_>, _>>().map_err(Failure::of)?;
                super::transfer::inline(agent, &files, STAGING, &wanted).await?;
                copy::matches(agent, STAGING, &sources).await?
            }
            None => return Ok(()),
        };
        if wanted.unpack {
            super::transfer::unpack(agent, &items, &wanted.to).await?;
        }
        let packed = |item: &copy::Item| wanted.unpack && super::transfer::is_archive(item);
        let items: Vec<_> = items.into_iter().filter(|item| !packed(item)).collect();
        if !items.is_empty() {
            copy::place(agent, &items, &wanted.to).await?;
        }
        let cleared = agent.remove(STAGING, Some(ROOT)).await;
        cleared.map_err(|e| Failure::agent(&format!("clear {STAGING}"), e))
    }

    /// Makes the template of what the last stage has come to.
    async fn finish(&self, mut at: Progressed) -> Result<Outcome, Failure> {
        let startup = self.startup(&at)?;
        let defaults = Defaults {
            user: at.setting.user.clone(),
            workdir: at.setting.workdir.clone(),
            env: at.setting.env.clone(),
            vcpus: Some(at.size.vcpus),
            memory_mib: Some(at.size.memory_mib),
            disk_mib: at.size.disk_mib,
        };
        let about = serde_json::to_string(&(&defaults, &startup, &at.setting.labels));
        let sum = key::template(&at.key, &about.unwrap_or_default());
        let names = self.names();
        let there = self.inner.templates.manifest(&names[0]);
        // Nothing of a sandbox's disk is written twice; the rest are images that become one with it.
        let images: u64 = at.base.images.iter().map(|i| i.size).sum();
        let most = (at.size.disk_mib << 20)
            .saturating_mul(2)
            .saturating_add(images);
        let owner = self.template.owner.as_deref();
        let manifest = match there {
            Ok(there) if there.recipe_sha256 == sum && !self.spec.force => there,
            _ => {
                let room = self.inner.reserve_template(owner, &[], most).await;
                let room = room.map_err(|e| Failure::of(e.message))?;
                let manifest = self.derive(&mut at, defaults, startup, &sum).await?;
                self.measure(&manifest, &at, room.disk_bytes())?;
                manifest
            }
        };
        // Held until its names lead to it.
        let room = self.inner.reserve_template(owner, &names, 0).await;
        let _room = room.map_err(|e| self.give_up(&manifest, e.message))?;
        self.let_go(&mut at).await;
        self.make_ready(&manifest, &at, &names).await?;
        Ok(Outcome {
            version: manifest.version(),
            steps: at.steps,
        })
    }

    /// Removes a template that was just made and may not stay.
    fn give_up(&self, manifest: &Manifest, why: String) -> Failure {
        let reference = manifest.reference();
        if reference == self.hidden()
            && let Err(e) = self.inner.templates.remove(&reference)
        {
            tracing::warn!("template {reference} stays: {e}");
        }
        Failure::of(why)
    }

    /// Refuses a template whose images beside its base's have more bytes than `most`.
    fn measure(&self, made: &Manifest, at: &Progressed, most: Option<u64>) -> Result<(), Failure> {
        let new = made.images.iter().filter(|i| !at.base.images.contains(i));
        let bytes: u64 = new.map(|i| i.size).sum();
        match most.filter(|most| bytes > *most) {
            Some(most) => {
                let why = format!(
                    "the template's image has {}, and {} are left of this key's disk budget: remove snapshots, templates \
                     or paused sandboxes, or raise the limit",
                    Bytes(bytes),
                    Bytes(most)
                );
                Err(self.give_up(made, why))
            }
            None => Ok(()),
        }
    }

    /// Refuses at once what would be found out after all steps and a minute of waiting.
    fn check_startup(&self, at: &Progressed, stage: &Stage) -> Result<(), Failure> {
        let setting = &at.setting;
        let says = |step: &Step| matches!(step.action, Action::Cmd(_) | Action::Entrypoint(_));
        let inherits = !setting.entrypoint.is_empty() || !setting.cmd.is_empty();
        if self.spec.start_image_command && !inherits && !stage.steps.iter().any(says) {
            return Err(Failure::of(NO_IMAGE_COMMAND));
        }
        let startup = &self.spec.startup;
        let starts = startup.start.is_some()
            || self.spec.start_image_command
            || at.base.startup.start.is_some();
        let port = startup.ready.as_ref().and_then(|ready| ready.port);
        match port.filter(|_| !starts) {
            Some(port) => Err(Failure::of(format!(
                "nothing would listen on port {port}, which is awaited: the template starts nothing"
            ))),
            None => Ok(()),
        }
    }

    /// What the template starts and awaits: as the build says, else as what it begins with does.
    fn startup(&self, at: &Progressed) -> Result<Startup, Failure> {
        let mut startup = self.spec.startup.clone();
        if self.spec.start_image_command {
            let setting = &at.setting;
            let mut words = setting.entrypoint.iter().chain(&setting.cmd).cloned();
            let command = words.next().ok_or_else(|| Failure::of(NO_IMAGE_COMMAND))?;
            startup.start = Some(StartCommand {
                command,
                args: Some(words.collect()),
                user: None,
                workdir: None,
            });
        } else if startup.is_empty() {
            startup = at.base.startup.clone();
        } else if startup.start.is_none() {
            startup.start.clone_from(&at.base.startup.start);
        }
        Ok(startup)
    }

    /// By which names the template is to be found.
    fn names(&self) -> Vec<String> {
        let tags = self.build.tags.iter();
        let mut names: Vec<String> = tags.map(|tag| self.template.called(tag)).collect();
        if names.is_empty() {
            names.push(self.template.called(super::DEFAULT_TAG));
        }
        names
    }

    /// Internal name of the template until it is ready.
    fn hidden(&self) -> String {
        let name = unfinished_build(&self.build.id);
        match &self.template.owner {
            Some(owner) => format!("{owner}/{name}"),
            None => name,
        }
    }

    async fn derive(
        &self,
        at: &mut Progressed,
        defaults: Defaults,
        startup: Startup,
        sum: &str,
    ) -> Result<Manifest, Failure> {
        self.log.info(Some("finalize"), "writing the image");
        let agent = self.agent(at).await?;
        let layer = agent.layer().await;
        let layer = layer.map_err(|e| Failure::agent("read what the build changed", e))?;
        let mut origin = at.base.origin.clone().unwrap_or_default();
        origin.entrypoint.clone_from(&at.setting.entrypoint);
        origin.cmd.clone_from(&at.setting.cmd);
        origin.exposed_ports.clone_from(&at.setting.exposed);
        if origin.from.is_empty() {
            origin.from = at.base.reference();
        }
        let (inner, log, base, sum) = (
            self.inner.clone(),
            self.log.clone(),
            at.base.clone(),
            sum.to_owned(),
        );
        let (name, history) = (self.hidden(), at.history.clone());
        let reader = super::transfer::reader(layer);
        let writing = self.writing.clone().lock_owned().await;
        let work = move || {
            let _writing = writing;
            let derived = Derived {
                name: &name,
                visibility: Some(Visibility::Internal),
                base: &base,
                defaults,
                startup,
                origin: Some(origin),
                history,
                recipe_sha256: sum,
                limits: inner.settings.limits,
            };
            let mut on_progress = |progress: Progress<'_>| log.on_progress("finalize", &progress);
            inner.templates.derive(&derived, reader, &mut on_progress)
        };
        let template = tokio::task::spawn_blocking(work).await;
        self.log.end_progress();
        let template = template
            .map_err(|e| Failure::of(e.to_string()))?
            .map_err(|e| Failure::because(&e))?;
        Ok(template.manifest)
    }

    /// Starts what the template starts, once, and only then lets it be found.
    async fn make_ready(
        &self,
        manifest: &Manifest,
        at: &Progressed,
        names: &[String],
    ) -> Result<(), Failure> {
        let reference = manifest.reference();
        let hidden = reference == self.hidden();
        if !manifest.startup.is_empty() {
            self.log.info(Some("finalize"), "starting what it starts");
        }
        let ready = self.inner.sandboxes.make_ready(&reference, at.size).await;
        let publish = || -> Result<(), String> {
            let record = self.inner.records.template(&self.template.id);
            let public = record.ok().flatten().is_some_and(|t| t.public);
            let visibility = match public {
                true => Visibility::Public,
                false => Visibility::Private,
            };
            for name in names {
                if *name != reference {
                    let tagged = self.inner.templates.tag(&reference, name, visibility);
                    tagged.map_err(|e| e.to_string())?;
                }
            }
            Ok(())
        };
        let published = match ready {
            Ok(_) => publish(),
            Err(e) => Err(e.to_string()),
        };
        if let (true, Ok(()), Some(name)) = (hidden, &published, names.first()) {
            (self.inner.sandboxes).hand_over_template(&reference, name);
        }
        if hidden && let Err(e) = self.inner.templates.remove(&reference) {
            tracing::warn!("template {reference} stays: {e}");
        }
        published.map_err(Failure::of)
    }
}

impl Progressed {
    fn remember(&mut self, step: &Step, took: Option<Duration>) {
        if is_silent(step) {
            return;
        }
        self.history.push(HistoryStep {
            text: step.text.clone(),
            seconds: took.unwrap_or_default().as_secs_f64(),
            bytes: None,
        });
    }
}

/// Files of a step.
enum Files {
    Upload {
        path: std::path::PathBuf,
        sum: String,
    },
    Stage {
        number: usize,
        key: String,
    },
    Inline(Vec<(String, String)>),
}

impl Files {
    /// What they are.
    fn key(&self) -> &str {
        match self {
            Self::Upload { sum, .. } => sum,
            Self::Stage { key, .. } => key,
            Self::Inline(_) => "",
        }
    }
}

struct Counter {
    done: usize,
    total: usize,
}

/// Whether nobody wrote it: it is not counted, and nothing is said about it.
fn is_silent(step: &Step) -> bool {
    step.text.is_empty()
}

/// `name` for the tag that every template has, `name:tag` for others.
pub fn tagged(name: &str, tag: &str) -> String {
    match tag {
        super::DEFAULT_TAG => name.to_owned(),
        tag => format!("{name}:{tag}"),
    }
}

/// Which stages the last one needs.
fn needed(spec: &BuildSpec) -> Result<Vec<bool>, Failure> {
    let mut needed = vec![false; spec.stages.len()];
    if let Some(last) = needed.last_mut() {
        *last = true;
    }
    for number in (0..spec.stages.len()).rev() {
        if !needed[number] {
            continue;
        }
        let stage = &spec.stages[number];
        let copied = stage.steps.iter().filter_map(|step| match &step.action {
            Action::Copy(copy) => match copy.from {
                CopyFrom::Stage(n) => Some(n),
                _ => None,
            },
            _ => None,
        });
        let begun = match stage.from {
            Beginning::Stage(n) => Some(n),
            _ => None,
        };
        for n in copied.chain(begun) {
            if n >= number {
                return Err(Failure::of(format!(
                    "stage {number} needs stage {n}, which is not before it"
                )));
            }
            needed[n] = true;
        }
    }
    Ok(needed)
}

/// As much of a step as a message can take.
fn short(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(SHOWN)
        .collect();
    match text.chars().nth(SHOWN) {
        Some(_) => format!("{clean}…"),
        None => clean,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
