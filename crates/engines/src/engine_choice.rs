//! Selection of the default engine: microVMs or gVisor.

use crate::gvisor_engine;
use crate::host::Host;
use crate::restore_policy::{HostFile, HostFingerprint};
use jiffy_engine_api::EngineName;
use jiffy_microvm_engine::host_kvm::{self, KvmKind};

/// Selected engine with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineChoice {
    /// Selected engine.
    pub engine: EngineName,
    /// Reason, as text for the operator.
    pub why: String,
}

/// Facts about the host that determine the selection.
#[derive(Debug, Clone)]
pub struct EngineFacts {
    /// Kind of KVM on this host. The error explains why KVM cannot be used.
    pub kvm: Result<KvmKind, String>,
    /// Success if gVisor can be used. The error explains why not.
    pub gvisor: Result<(), String>,
    /// Median times of create and exec with microVMs and with gVisor, in milliseconds. `None`
    /// unless both were measured on this host.
    pub measured_ms: Option<(f64, f64)>,
}

impl EngineFacts {
    /// Collects the facts of `host`. This takes little time: no sandbox is started.
    pub fn of(host: &Host) -> Self {
        let measured = HostFile::of_host(host.home().path(), &HostFingerprint::here());
        Self {
            kvm: host_kvm::open()
                .map(|_| host_kvm::kind())
                .map_err(|e| e.to_string()),
            gvisor: gvisor_engine::program(host)
                .map(drop)
                .map_err(|e| e.to_string()),
            measured_ms: measured.and_then(|file| file.engines_ms()),
        }
    }

    /// Selects an engine. If only one engine is usable, it is selected. If both are, microVMs are
    /// selected, unless KVM runs without hardware virtualization and gVisor was measured to be
    /// faster.
    pub fn choose(&self) -> EngineChoice {
        let choice = |engine, why: &str| EngineChoice {
            engine,
            why: why.to_owned(),
        };
        match (&self.kvm, &self.gvisor, self.measured_ms) {
            // Page faults are cheap with hardware virtualization, so microVMs are faster.
            (Ok(KvmKind::Hardware), ..) => choice(
                EngineName::MicroVm,
                "this host has KVM with hardware virtualization",
            ),
            (Ok(KvmKind::Software), Ok(()), Some((microvm, gvisor))) => {
                let (engine, than) = if gvisor < microvm {
                    (EngineName::Gvisor, "faster")
                } else {
                    (EngineName::MicroVm, "not faster")
                };
                choice(
                    engine,
                    &format!(
                        "this host has KVM without hardware virtualization, and gVisor was measured to be {than} on it: \
                         create and exec {gvisor:.1} ms in the median, microVMs {microvm:.1} ms"
                    ),
                )
            }
            // Without a measurement, microVMs: they isolate more strongly and support all features.
            (Ok(KvmKind::Software), Ok(()), None) => choice(
                EngineName::MicroVm,
                "this host has KVM without hardware virtualization; `jiffy doctor --measure` measures whether gVisor is faster",
            ),
            (Ok(KvmKind::Software), Err(_), _) => choice(
                EngineName::MicroVm,
                "this host has KVM without hardware virtualization, and no gVisor",
            ),
            (Err(_), Ok(()), _) => choice(
                EngineName::Gvisor,
                "KVM cannot be used on this host, and gVisor does not need it",
            ),
            (Err(_), Err(_), _) => {
                let why = self.check(EngineName::MicroVm).err();
                choice(EngineName::MicroVm, &why.unwrap_or_default())
            }
        }
    }

    /// Checks that `engine` can run sandboxes. If not, returns the reason and all possible
    /// remedies.
    pub fn check(&self, engine: EngineName) -> Result<(), String> {
        match (engine, &self.kvm, &self.gvisor) {
            (EngineName::MicroVm, Ok(_), _) | (EngineName::Gvisor, _, Ok(())) => Ok(()),
            (EngineName::MicroVm, Err(kvm), Ok(())) => Err(format!(
                "{kvm}; or run sandboxes on gVisor, which needs no KVM: `--engine gvisor`"
            )),
            (EngineName::MicroVm, Err(kvm), Err(gvisor)) => Err(format!(
                "{kvm}; or run sandboxes on gVisor, which needs no KVM but cannot be used yet: {gvisor}"
            )),
            (EngineName::Gvisor, kvm, Err(gvisor)) => Err(match kvm {
                Ok(_) => format!("{gvisor}; or use microVMs: `--engine microvm`"),
                Err(kvm) => format!("{gvisor}; or run sandboxes as microVMs: {kvm}"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the facts of a host. `gvisor` is true if gVisor can be used.
    fn facts(kvm: Option<KvmKind>, gvisor: bool, measured_ms: Option<(f64, f64)>) -> EngineFacts {
        EngineFacts {
            kvm: kvm.ok_or_else(|| "no KVM".to_owned()),
            gvisor: gvisor.then_some(()).ok_or_else(|| "no gVisor".to_owned()),
            measured_ms,
        }
    }

    #[test]
    fn new_sandboxes_use_the_usable_or_the_faster_engine() {
        use EngineName::{Gvisor, MicroVm};
        let (hardware, software) = (Some(KvmKind::Hardware), Some(KvmKind::Software));
        // gVisor is slower or faster than microVMs. The first time is the time of microVMs, the
        // second is the time of gVisor, in ms.
        let (slower, faster) = (Some((20.0, 30.0)), Some((30.0, 20.0)));
        for (kvm, gvisor, measured, engine) in [
            (hardware.clone(), true, faster, MicroVm),
            (hardware, false, None, MicroVm),
            (software.clone(), true, None, MicroVm),
            (software.clone(), true, slower, MicroVm),
            (software.clone(), true, Some((20.0, 20.0)), MicroVm),
            (software.clone(), true, faster, Gvisor),
            (software, false, faster, MicroVm),
            (None, true, None, Gvisor),
            (None, true, slower, Gvisor),
            (None, false, None, MicroVm),
        ] {
            let facts = facts(kvm, gvisor, measured);
            assert_eq!(facts.choose().engine, engine, "{facts:?}");
        }
    }

    #[test]
    fn without_a_usable_engine_the_remedy_for_each_is_named() {
        let facts = facts(None, false, None);
        let why = facts.choose().why;
        assert!(why.contains("no KVM") && why.contains("no gVisor"), "{why}");
        for engine in [EngineName::MicroVm, EngineName::Gvisor] {
            let why = facts.check(engine).unwrap_err();
            assert!(why.contains("no KVM") && why.contains("no gVisor"), "{why}");
        }
    }

    #[test]
    fn an_engine_that_cannot_be_used_names_the_one_that_can() {
        let why = facts(None, true, None).check(EngineName::MicroVm);
        assert!(why.unwrap_err().ends_with("`--engine gvisor`"));
        let why = facts(Some(KvmKind::Software), false, None).check(EngineName::Gvisor);
        assert!(why.unwrap_err().ends_with("`--engine microvm`"));
        assert_eq!(facts(None, true, None).check(EngineName::Gvisor), Ok(()));
    }
}
