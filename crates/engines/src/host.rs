//! [`Host`]: a data directory and the programs of Jiffy. [`PreparedTemplate`]: the open files of a
//! template, from which sandboxes are booted and restored.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *first use* is the request or command with which most uses
//! of a template's sandboxes start, as the template describes it. It runs once in a temporary
//! guest, to record which pages it touches and writes.

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

/// Error of opening a host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// A program is missing.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// Error of creating a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The size is out of bounds.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The template does not exist or is damaged.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The stock template could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The recipe of the stock template is invalid.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The guest kernel cannot be used.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The guest agent cannot be read.
    #[error("cannot read the guest agent {path}: {source}")]
    Agent {
        /// Path of the agent.
        path: String,
        /// Cause.
        source: io::Error,
    },
    /// The initial RAM file system cannot be created.
    #[error(transparent)]
    Initrd(#[from] InitrdError),
    /// A disk cannot be created.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The clock or the entropy source failed.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The guest did not boot.
    #[error(transparent)]
    Boot(#[from] BootError),
}

/// Specification of a new sandbox.
#[derive(Debug, Clone, Default)]
pub struct SandboxSpec {
    /// Resources.
    pub size: SandboxSize,
    /// Environment variables of all processes in the sandbox.
    pub env: BTreeMap<String, String>,
    /// Parameters appended to the guest's kernel command line.
    pub extra_cmdline: String,
    /// Certificate authorities and proxy of the network in which the sandbox runs.
    pub site: SiteSettings,
}

/// Data directory and programs of one host.
#[derive(Debug, Clone)]
pub struct Host {
    home: Home,
    programs: Programs,
}

/// Open and verified files of one template, from which any number of sandboxes can be created.
#[derive(Debug)]
pub struct PreparedTemplate {
    home: Home,
    programs: Programs,
    kernel: File,
    initrd: File,
    /// Image of the kernel modules and its checksum.
    modules: Option<(File, String)>,
    /// Image with the agent. Created when first requested.
    agent_root: OnceLock<PathBuf>,
    template: Template,
    template_version: String,
    version: String,
    image_name: String,
}

impl Host {
    /// Opens the host on which this program runs.
    pub fn open() -> Result<Self, HostError> {
        Ok(Self {
            home: Home::locate()?,
            programs: Programs::find()?,
        })
    }

    /// Creates a host with another data directory or other programs.
    pub fn new(home: Home, programs: Programs) -> Self {
        Self { home, programs }
    }

    /// Limits the resources of VMMs started from now on.
    pub fn limit_vmms(&mut self, cgroups: Option<Cgroups>) {
        self.programs.vmm = self.programs.vmm.clone().with_cgroups(cgroups);
    }

    /// Limits the disk rates of guests that boot or are restored from now on.
    pub fn limit_disks(&mut self, limits: DiskLimits) {
        self.programs.vmm = self.programs.vmm.clone().with_disk_limits(limits);
    }

    /// Limits the processor features of guests that boot from now on to `level`. Fails if the
    /// processor of this host is below `level`.
    pub fn set_cpu_level(&mut self, level: CpuLevel) -> Result<(), String> {
        crate::cpu_level::check(level)?;
        self.programs.vmm = self.programs.vmm.clone().with_cpu_level(level);
        Ok(())
    }

    /// Starts `count` spare VMM processes for future guests and replaces used ones. Must be called
    /// after [`Self::limit_vmms`], inside a tokio runtime.
    pub fn keep_spare_vmms(&mut self, count: usize) {
        self.programs.vmm = self.programs.vmm.clone().with_spares(count);
        self.programs.vmm.refill_spares();
    }

    /// Returns the data directory.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Returns the programs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Returns the templates.
    pub fn templates(&self) -> Templates {
        Templates::new(&self.home)
    }

    /// Checks that template `name` exists or can be built. The check is fast, for callers that
    /// start a long operation.
    pub fn check_template(&self, name: &str) -> Result<(), CreateError> {
        match Recipe::built_in(&plain(name)?) {
            Ok(_) => Ok(()),
            // Only stock templates have a built-in recipe. Others must have been built or pulled.
            Err(RecipeError::Unknown { .. }) => Ok(self.templates().get(name).map(drop)?),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns the default size of a sandbox of template `name`.
    pub fn default_size(&self, name: &str) -> Result<SandboxSize, CreateError> {
        let defaults = match Recipe::built_in(&plain(name)?) {
            Ok(recipe) => recipe.defaults().clone(),
            Err(RecipeError::Unknown { .. }) => self.templates().manifest(name)?.defaults,
            Err(e) => return Err(e.into()),
        };
        Ok(defaults.size())
    }

    /// Opens template `name` with kernel and agent. If it is a stock template that is missing or
    /// outdated, it is built first.
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

    /// Opens a particular version of a template: `image` is a name that
    /// [`PreparedTemplate::image_name`] returned earlier.
    pub(crate) fn prepare_version(&self, image: &str) -> Result<PreparedTemplate, CreateError> {
        self.with_template(self.templates().version(image)?)
    }

    /// Opens the files that a guest needs in addition to its template: kernel, modules and initial
    /// ramdisk with the agent.
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
            // Part of the fingerprint of snapshots: a snapshot is not reused with another kernel or
            // agent.
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
    /// Returns the template.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Returns the version of the template. It depends on the template's content only, not on its
    /// name.
    pub(crate) fn template_version(&self) -> &str {
        &self.template_version
    }

    /// Returns the checksums of kernel, modules and initial ramdisk.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Returns the name that snapshots record for their template. They can be restored only with
    /// exactly this version of the template.
    pub(crate) fn image_name(&self) -> &str {
        &self.image_name
    }

    /// Returns the path of the image with the guest agent, for engines without an initial ramdisk.
    pub(crate) fn agent_root(&self) -> Result<PathBuf, CreateError> {
        if let Some(path) = self.agent_root.get() {
            return Ok(path.clone());
        }
        let agent = read_agent(&self.programs)?;
        let path = AgentRoot::new(&agent)?.file(&self.home)?.path;
        // Concurrent calls create the same file, so either result is correct.
        Ok(self.agent_root.get_or_init(|| path).clone())
    }

    fn images(&self) -> Result<Vec<File>, BootError> {
        let images = self.template.images.iter();
        images.map(|image| duplicate(&image.file)).collect()
    }

    /// Returns the kernel modules with this checksum: the current modules, or an earlier version
    /// that is still in the data directory.
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

    /// Checks that this host has the modules with which a snapshot was taken.
    pub(crate) fn has_modules(&self, sha256: &str) -> Result<(), CreateError> {
        self.modules_named(sha256).map(drop)
    }

    /// Returns the specification for booting this template.
    pub(crate) fn boot_spec(
        &self,
        size: SandboxSize,
        overlay: File,
        identity: Identity,
    ) -> Result<BootSpec, CreateError> {
        size.check()?;
        Ok(BootSpec {
            vmm: self.programs.vmm.clone(),
            // Each VMM receives descriptors of its own.
            kernel: duplicate(&self.kernel)?,
            initrd: duplicate(&self.initrd)?,
            modules: self.modules.as_ref().map(image_of).transpose()?,
            rootfs: self.images()?,
            // The blank disk is shared by all guests of this size. A guest's writes go to its
            // overlay.
            blank_disk: BlankDisk::new(size.disk_mib)?.blank_ext4(&self.home)?.file,
            overlay,
            disk: None,
            size,
            net: None,
            identity,
            extra_cmdline: String::new(),
        })
    }

    /// Opens the recorded indexes of the pages that a guest of `lineage` writes first. The first
    /// index covers the time until its first command ends (any command, such as `true`). The second
    /// index covers the time until its first use ends. `None` if an index is not recorded: a
    /// restore works without it.
    pub(crate) fn first_writes(&self, lineage: &Lineage) -> (Option<File>, Option<FirstUsePages>) {
        match lineage.written_pages() {
            Ok(Some(pages)) => {
                let first_use = pages.first_use;
                let later = first_use.map(|index| self.first_use_pages(lineage, index));
                (Some(pages.first_command), later)
            }
            Ok(None) => (None, None),
            Err(e) => {
                // The records only speed up a restore, so damage is no error.
                tracing::warn!(error = %e, "restoring without the record of first writes");
                (None, None)
            }
        }
    }

    /// Returns the pages that a guest writes until the end of its first use, and the event that
    /// marks the start of the first use. The restore makes private copies of these pages in
    /// advance. `index` is the index of the pages.
    fn first_use_pages(&self, lineage: &Lineage, index: File) -> FirstUsePages {
        let first_use = self.template.manifest.startup.first_use.as_ref();
        // An invalid action counts as none: the template was checked when it was built.
        let action = first_use.and_then(|first_use| first_use.action().ok());
        let has_interface = lineage.newest().is_some_and(|newest| newest.manifest().net);
        let used_by = match action {
            // The first use is a request, which reaches a guest with a network interface as a
            // frame. All other first uses start with a vsock connection.
            Some(FirstUseAction::Request { .. }) if has_interface => PopulateMoment::Frame,
            _ => PopulateMoment::Connection,
        };
        FirstUsePages { index, used_by }
    }

    /// Returns the specification for restoring a snapshot with a disk of `disk_mib` MiB. The
    /// identity is the default one; the caller replaces it.
    pub(crate) fn restore_spec(
        &self,
        lineage: Lineage,
        disk_mib: u64,
        overlay: File,
        memory: MemoryPolicy,
    ) -> Result<RestoreSpec, CreateError> {
        // A guest has mounted the modules of its boot, which may be older than the current ones.
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

    /// Boots a new sandbox without a network and returns when the agent has answered.
    pub async fn boot(&self, spec: &SandboxSpec) -> Result<MicroVm, CreateError> {
        self.boot_with(spec, None).await
    }

    /// Same as [`Self::boot`], with a network interface. The guest takes its address from the
    /// `jiffy.net=` parameter in `extra_cmdline`.
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

    /// Creates a sandbox from a snapshot of this template and returns when the agent has taken a
    /// new identity. The size in `spec` must be the size of the snapshot: memory and vCPUs are
    /// taken from the snapshot.
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

    /// Same as [`Self::restore`], with the given identity and network interface.
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

/// Returns a reference without its default tag, as recipes and templates are named.
fn plain(name: &str) -> Result<String, TemplateError> {
    Ok(Reference::parse(name)?.to_string())
}

/// Returns a new random identity for a sandbox of `spec`.
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
