//! The `jiffy-vmm` process. It is started by Jiffy with its control socket on descriptor 3, not by
//! hand.

fn main() -> std::process::ExitCode {
    jiffy_vmm::process::run()
}
