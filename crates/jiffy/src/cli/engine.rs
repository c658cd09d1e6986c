//! Option that selects the isolation engine.

use clap::{Args, ValueEnum};
use jiffy_engine_api::EngineName;
use jiffy_engines::{EngineFacts, Host};

/// Engine that isolates a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum EngineSelection {
    /// microVMs if KVM is available; gVisor otherwise, or if `jiffy doctor --measure` found it
    /// faster
    #[default]
    Auto,
    /// A virtual machine per sandbox. Needs KVM
    Microvm,
    /// A kernel in user space per sandbox. Needs no KVM
    Gvisor,
}

/// Option of commands that create sandboxes.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct EngineArgs {
    /// Isolation engine of new sandboxes
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "JIFFY_ENGINE",
        value_name = "ENGINE"
    )]
    pub engine: EngineSelection,
}

impl From<Option<EngineName>> for EngineArgs {
    fn from(engine: Option<EngineName>) -> Self {
        let engine = match engine {
            Some(EngineName::MicroVm) => EngineSelection::Microvm,
            Some(EngineName::Gvisor) => EngineSelection::Gvisor,
            None => EngineSelection::Auto,
        };
        Self { engine }
    }
}

impl EngineArgs {
    /// Returns the requested engine. `None` if the engine is selected by the features of the host.
    pub fn name(self) -> Option<EngineName> {
        match self.engine {
            EngineSelection::Auto => None,
            EngineSelection::Microvm => Some(EngineName::MicroVm),
            EngineSelection::Gvisor => Some(EngineName::Gvisor),
        }
    }

    /// Selects the engine for `host`.
    ///
    /// # Errors
    ///
    /// Returns an error if the host cannot run the engine.
    pub fn choose_usable(self, host: &Host) -> anyhow::Result<EngineName> {
        // An explicit engine is never replaced by another engine. If the host cannot run the
        // engine, the check below reports the reason.
        let engine = jiffy_daemon::choose_engine(self.name(), host).engine;
        let check = EngineFacts::of(host).check(engine);
        check.map_err(anyhow::Error::msg)?;
        Ok(engine)
    }
}
