//! The `jiffy-vmm` process. Jiffy starts the process with a control socket as standard input. Users
//! do not start the process themselves.

fn main() -> std::process::ExitCode {
    jiffy_proto::panic::abort_at_panics();
    jiffy_vmm::process::run()
}
