//! The `jiffy-vmm` process. Jiffy starts it with its control socket as standard input. It is not
//! intended to be started by users.

fn main() -> std::process::ExitCode {
    jiffy_proto::panic::abort_at_panics();
    jiffy_vmm::process::run()
}
