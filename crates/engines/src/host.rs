//! A host: its data directory, its programs, and how a sandbox is made from them.

use crate::agent_identity::identity;
use crate::programs::{ProgramError, Programs};
use jiffy_engine_api::{
    FirstUseAction, IdentityError, SandboxIdentity, SandboxSize, SizeError, new_id,
};
use jiffy_image::{
    AgentRoot, BlankDisk, BuildError, DiskError, Home, HomeError, Initrd, InitrdError, Kernel,
    KernelError, Progress, Recipe, RecipeError, Reference, Template, TemplateError, Templates,
    build_if_needed,
};
use jiffy_microvm_engine::{
    BootError, BootSpec, Cgroups, FirstUsePages, MemoryPolicy, MicroVm, ModulesImage, NetSpec,
    RestoreSpec,
};
use jiffy_proto::agent::{Identity, SiteSettings};
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::snapshot::PopulateMoment;
use jiffy_proto::vm::DiskLimits;
use jiffy_snapshot::{Lineage, Store};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{fs, io};

/// Why a host cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The data directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The programs.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// Why a sandbox could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// Size out of bounds.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// No template of that name, or a broken one.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The template is a stock one and could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The recipe of a stock template is broken.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The guest kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The guest agent.
    #[error("cannot read the guest agent {path}: {source}")]
    Agent {
        /// Its path.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The initial RAM file system.
    #[error(transparent)]
    Initrd(#[from] InitrdError),
    /// The disks.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Clock or entropy.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The guest did not come up.
    #[error(transparent)]
    Boot(#[from] BootError),
}

/// Specification of a new sandbox.
#[derive(Debug, Clone, Default)]
pub struct SandboxSpec {
    /// Resources.
    pub size: SandboxSize,
    /// Environment of every process in it.
    pub env: BTreeMap<String, String>,
    /// Words added to the guest's kernel command line.
    pub extra_cmdline: String,
    /// Certificate authorities and proxy of the network it is in.
    pub site: SiteSettings,
}

/// One host.
#[derive(Debug, Clone)]
pub struct Host {
    home: Home,
    programs: Programs,
}

/// All files a sandbox of one template starts from, opened and verified. Makes any number of
/// sandboxes.
#[derive(Debug)]
pub struct PreparedTemplate {
    home: Home,
    programs: Programs,
    kernel: File,
    initrd: File,
    /// Modules of the kernel and their checksum.
    modules: Option<(File, String)>,
    /// Image with the agent, where one was asked for.
    agent_root: OnceLock<PathBuf>,
    template: Template,
    template_version: String,
    version: String,
    image_name: String,
}

impl Host {
    /// The host this program runs on.
    pub fn open() -> Result<Self, HostError> {
        Ok(Self {
            home: Home::locate()?,
            programs: Programs::find()?,
        })
    }

    /// A host with another data directory or other programs.
    pub fn new(home: Home, programs: Programs) -> Self {
        Self { home, programs }
    }

    /// From now on what its VMMs use is limited.
    pub fn limit_vmms(&mut self, cgroups: Option<Cgroups>) {
        self.programs.vmm = self.programs.vmm.clone().with_cgroups(cgroups);
    }

    /// From now on the disks of those that boot or are restored are no faster than this.
    pub fn limit_disks(&mut self, limits: DiskLimits) {
        self.programs.vmm = self.programs.vmm.clone().with_disk_limits(limits);
    }

    /// From now on guests that boot see a processor of `level`. Fails if this host is below it.
    pub fn set_cpu_level(&mut self, level: CpuLevel) -> Result<(), String> {
        crate::cpu_level::check(level)?;
        self.programs.vmm = self.programs.vmm.clone().with_cpu_level(level);
        Ok(())
    }

    /// From now on so many of its VMMs' processes are kept ready for the next guests. To be called
    /// after [`Self::limit_vmms`], inside a tokio runtime.
    pub fn keep_spare_vmms(&mut self, count: usize) {
        self.programs.vmm = self.programs.vmm.clone().with_spares(count);
        self.programs.vmm.make_spares();
    }

    /// Its data directory.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Its programs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Its templates.
    pub fn templates(&self) -> Templates {
        Templates::new(&self.home)
    }

    /// Checks that `name` is a template that is there or can be built. A quick look, before
    /// anything long is begun.
    pub fn knows(&self, name: &str) -> Result<(), CreateError> {
        match Recipe::built_in(&plain(name)?) {
            Ok(_) => Ok(()),
            Err(RecipeError::Unknown { .. }) => Ok(self.templates().get(name).map(drop)?),
            Err(e) => Err(e.into()),
        }
    }

    /// Size of a sandbox of template `name` whose creator names none.
    pub fn default_size(&self, name: &str) -> Result<SandboxSize, CreateError> {
        let defaults = match Recipe::built_in(&plain(name)?) {
            Ok(recipe) => recipe.defaults().clone(),
            Err(RecipeError::Unknown { .. }) => self.templates().manifest(name)?.defaults,
            Err(e) => return Err(e.into()),
        };
        Ok(defaults.size())
    }

    /// Opens template `name` with kernel and agent. A stock template that is missing or outdated is
    /// built first.
    pub fn prepare(
        &self,
        name: &str,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PreparedTemplate, CreateError> {
        let template = match Recipe::built_in(&plain(name)?) {
            Ok(recipe) => build_if_needed(&self.templates(), &recipe, on_progress)?,
            Err(RecipeError::Unknown { .. }) => self.templates().get(name)?,
            Err(e) => return Err(e.into()),
        };
        self.with_template(template)
    }

    /// Opens the version of a template that something was made with, as
    /// [`PreparedTemplate::image_name`] said then.
    pub(crate) fn prepare_version(&self, image: &str) -> Result<PreparedTemplate, CreateError> {
        self.with_template(self.templates().version(image)?)
    }

    fn with_template(&self, template: Template) -> Result<PreparedTemplate, CreateError> {
        let chosen = Kernel::choose()?;
        let kernel = chosen.open(&self.home)?;
        let modules = chosen.modules(&self.home)?;
        let modules_sum = modules.as_ref().map_or("none", |m| &m.sha256);
        let agent = read_agent(&self.programs)?;
        let initrd = Initrd::new(&agent)?.file(&self.home)?;
        let template_version = template.manifest.version();
        Ok(PreparedTemplate {
            home: self.home.clone(),
            programs: self.programs.clone(),
            version: format!(
                "kernel {} modules {modules_sum} agent {}",
                kernel.sha256, initrd.sha256
            ),
            image_name: format!("{}@{template_version}", template.manifest.reference()),
            template_version,
            kernel: kernel.file,
            initrd: initrd.file,
            modules: modules.map(|modules| (modules.file, modules.sha256)),
            agent_root: OnceLock::new(),
            template,
        })
    }
}

impl PreparedTemplate {
    /// The template.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Version of the template: what it is, by whichever name it is called.
    pub(crate) fn template_version(&self) -> &str {
        &self.template_version
    }

    /// Checksums of kernel and initial ramdisk.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// The name under which snapshots remember what they were taken of: they run with that very
    /// version of the template only.
    pub(crate) fn image_name(&self) -> &str {
        &self.image_name
    }

    /// The image with the guest agent, where no initial ramdisk starts it.
    pub(crate) fn agent_root(&self) -> Result<PathBuf, CreateError> {
        if let Some(path) = self.agent_root.get() {
            return Ok(path.clone());
        }
        let agent = read_agent(&self.programs)?;
        let path = AgentRoot::new(&agent)?.file(&self.home)?.path;
        Ok(self.agent_root.get_or_init(|| path).clone())
    }

    fn images(&self) -> Result<Vec<File>, BootError> {
        let images = self.template.images.iter();
        images.map(|image| duplicate(&image.file)).collect()
    }

    /// The modules that a snapshot was taken with.
    fn modules_named(&self, sha256: &str) -> Result<ModulesImage, CreateError> {
        if let Some(modules) = self.modules.as_ref().filter(|(_, sum)| sum == sha256) {
            return Ok(image_of(modules)?);
        }
        let image = Kernel::choose()?.modules_named(sha256, &self.home)?;
        Ok(ModulesImage {
            file: image.file,
            sha256: image.sha256,
        })
    }

    /// Checks that this host has the modules that a snapshot was taken with.
    pub(crate) fn has_modules(&self, sha256: &str) -> Result<(), CreateError> {
        self.modules_named(sha256).map(drop)
    }

    /// Returns what a boot of this template needs.
    pub(crate) fn boot_spec(
        &self,
        size: SandboxSize,
        overlay: File,
        identity: Identity,
    ) -> Result<BootSpec, CreateError> {
        size.check()?;
        Ok(BootSpec {
            vmm: self.programs.vmm.clone(),
            kernel: duplicate(&self.kernel)?,
            initrd: duplicate(&self.initrd)?,
            modules: self.modules.as_ref().map(image_of).transpose()?,
            rootfs: self.images()?,
            blank_disk: BlankDisk::new(size.disk_mib)?.blank_ext4(&self.home)?.file,
            overlay,
            size,
            net: None,
            identity,
            extra_cmdline: String::new(),
        })
    }

    /// Pages that a guest of `lineage` writes first, and those of its first use, as far as they are
    /// recorded: a restore can do without.
    pub(crate) fn first_writes(&self, lineage: &Lineage) -> (Option<File>, Option<FirstUsePages>) {
        match lineage.written_pages() {
            Ok(Some(pages)) => {
                let first_use = pages.first_use;
                let later = first_use.map(|index| self.first_use_pages(lineage, index));
                (Some(pages.first_command), later)
            }
            Ok(None) => (None, None),
            Err(e) => {
                tracing::warn!("restoring without the record of first writes: {e}");
                (None, None)
            }
        }
    }

    fn first_use_pages(&self, lineage: &Lineage, index: File) -> FirstUsePages {
        let first_use = self.template.manifest.startup.first_use.as_ref();
        let action = first_use.and_then(|first_use| first_use.action().ok());
        let has_interface = lineage.newest().is_some_and(|newest| newest.manifest().net);
        let used_by = match action {
            Some(FirstUseAction::Request { .. }) if has_interface => PopulateMoment::Frame,
            _ => PopulateMoment::Connection,
        };
        FirstUsePages { index, used_by }
    }

    /// Returns what a restore of a snapshot with a disk of `disk_mib` MiB needs; the caller gives
    /// the guest its identity.
    pub(crate) fn restore_spec(
        &self,
        lineage: Lineage,
        disk_mib: u64,
        overlay: File,
        memory: MemoryPolicy,
    ) -> Result<RestoreSpec, CreateError> {
        let newest = lineage.newest();
        let modules = match newest.and_then(|snapshot| snapshot.manifest().modules.as_deref()) {
            Some(sum) => Some(self.modules_named(sum)?),
            None => None,
        };
        let (populate, populate_later) = self.first_writes(&lineage);
        Ok(RestoreSpec {
            vmm: self.programs.vmm.clone(),
            populate,
            populate_later,
            modules,
            lineage,
            rootfs: self.images()?,
            blank_disk: BlankDisk::new(disk_mib)?.blank_ext4(&self.home)?.file,
            overlay,
            net: None,
            identity: Identity::default(),
            memory,
            lazy: None,
        })
    }

    /// Boots a fresh sandbox without network and returns when its agent has answered.
    pub async fn boot(&self, spec: &SandboxSpec) -> Result<MicroVm, CreateError> {
        self.boot_with(spec, None).await
    }

    /// The same with a network card. Its guest gets an address by a `jiffy.net=` word in
    /// `extra_cmdline`.
    pub async fn boot_with(
        &self,
        spec: &SandboxSpec,
        net: Option<NetSpec>,
    ) -> Result<MicroVm, CreateError> {
        let overlay = BlankDisk::overlay_file(&self.home)?;
        let identity = self.identity(&anonymous_identity(spec)?)?;
        let spec = BootSpec {
            net,
            extra_cmdline: spec.extra_cmdline.clone(),
            ..self.boot_spec(spec.size, overlay, identity)?
        };
        Ok(MicroVm::boot(spec).await?)
    }

    fn identity(&self, sandbox_identity: &SandboxIdentity) -> Result<Identity, CreateError> {
        Ok(identity(
            sandbox_identity,
            &self.template.manifest.defaults,
        )?)
    }

    /// Makes a sandbox from a snapshot of one of this template and returns when its agent has taken
    /// a new identity. Of `spec` the size must be the one it was booted with; memory and vCPUs are
    /// the snapshot's.
    pub async fn restore(
        &self,
        spec: &SandboxSpec,
        store: &Store,
        id: &str,
        memory: MemoryPolicy,
    ) -> Result<MicroVm, CreateError> {
        let anonymous_identity = anonymous_identity(spec)?;
        self.restore_as(&anonymous_identity, spec, store, id, memory, None)
            .await
    }

    /// The same as somebody in particular, and with the network card that it had.
    pub async fn restore_as(
        &self,
        sandbox_identity: &SandboxIdentity,
        spec: &SandboxSpec,
        store: &Store,
        id: &str,
        memory: MemoryPolicy,
        net: Option<NetSpec>,
    ) -> Result<MicroVm, CreateError> {
        let lineage = store.lineage(id).map_err(BootError::from)?;
        let overlay = store.overlay().map_err(BootError::from)?;
        let spec = RestoreSpec {
            identity: self.identity(sandbox_identity)?,
            net,
            ..self.restore_spec(lineage, spec.size.disk_mib, overlay, memory)?
        };
        Ok(MicroVm::restore(spec).await?)
    }
}

fn read_agent(programs: &Programs) -> Result<Vec<u8>, CreateError> {
    fs::read(&programs.agent).map_err(|source| CreateError::Agent {
        path: programs.agent.display().to_string(),
        source,
    })
}

/// Without a tag that says nothing.
fn plain(name: &str) -> Result<String, TemplateError> {
    Ok(Reference::parse(name)?.to_string())
}

/// Makes a new identity.
fn anonymous_identity(spec: &SandboxSpec) -> Result<SandboxIdentity, CreateError> {
    Ok(SandboxIdentity {
        id: new_id()?,
        env: spec.env.clone(),
        site: spec.site.clone(),
        ..SandboxIdentity::default()
    })
}

fn duplicate(file: &File) -> Result<File, BootError> {
    file.try_clone().map_err(|source| BootError::Host {
        what: "duplicating a descriptor",
        source,
    })
}

fn image_of((file, sha256): &(File, String)) -> Result<ModulesImage, BootError> {
    Ok(ModulesImage {
        file: duplicate(file)?,
        sha256: sha256.clone(),
    })
}
