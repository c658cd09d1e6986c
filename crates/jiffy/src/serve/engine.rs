//! The engine of the daemon's new sandboxes, as it was asked for.

use clap::{Args, ValueEnum};
use jiffy_host::{EngineChoice, EngineFacts, EngineName, Host};
use jiffy_net::NicKind;

/// Engine that isolates a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Wish {
    /// The one that suits this host: microVMs where there is KVM, gVisor where there is none or
    /// `jiffy doctor --measure` found it faster
    #[default]
    Auto,
    /// A virtual machine for each; needs KVM
    Microvm,
    /// A kernel in user space for each; needs no KVM
    Gvisor,
}

/// Option of commands that make sandboxes of their own.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct EngineArgs {
    /// Engine that isolates new sandboxes
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "JIFFY_ENGINE",
        value_name = "ENGINE"
    )]
    pub engine: Wish,
}

impl From<Option<EngineName>> for EngineArgs {
    fn from(engine: Option<EngineName>) -> Self {
        let engine = match engine {
            Some(EngineName::MicroVm) => Wish::Microvm,
            Some(EngineName::Gvisor) => Wish::Gvisor,
            None => Wish::Auto,
        };
        Self { engine }
    }
}

impl EngineArgs {
    /// The engine of `host`, which may not be usable.
    pub fn choose(self, host: &Host) -> EngineChoice {
        let asked = |engine| EngineChoice {
            engine,
            why: "as it was asked for".to_owned(),
        };
        match self.engine {
            Wish::Auto => EngineFacts::of(host).choose(),
            Wish::Microvm => asked(EngineName::MicroVm),
            Wish::Gvisor => asked(EngineName::Gvisor),
        }
    }

    /// The engine of `host`, which can be used.
    pub fn choose_usable(self, host: &Host) -> anyhow::Result<EngineName> {
        let engine = self.choose(host).engine;
        let check = EngineFacts::of(host).check(engine);
        check.map_err(anyhow::Error::msg)?;
        Ok(engine)
    }
}

/// Kind of network interface of sandboxes on `engine`.
pub fn card(engine: EngineName) -> NicKind {
    match engine {
        EngineName::MicroVm => NicKind::Tap,
        EngineName::Gvisor => NicKind::Veth,
    }
}
