//! Namespaces of commands that an unprivileged user runs: the command becomes root in a user
//! namespace, which networks and gVisor need.
//!
//! The *uplink* is a process that connects these namespaces to the network of the host.

use crate::cli::EngineSelection;
use crate::cli::FeatureSwitch;
use crate::cli::{Command, DaemonCommand, RunArgs, TemplateCommand};
use jiffy_daemon::local_daemon::socket;
use jiffy_daemon::rootless_notice;
use jiffy_image::Home;
use jiffy_rootless::EnterOptions;
use std::os::unix::net::UnixStream;

/// Enters user namespaces in which this process is root if the command needs them and the kernel
/// permits them. The process must be single-threaded.
pub fn enter_for(command: &Command) {
    if nix::unistd::Uid::effective().is_root() {
        return;
    }
    // The command itself reports an unusable data directory.
    let Ok(home) = Home::locate() else {
        return;
    };
    let Some((persistent, network)) = needs(command, &home) else {
        return;
    };
    let support = rootless_notice::support();
    // In the namespace this process is root, and would use root's default data directory.
    // SAFETY: this process has only one thread, so that no other thread reads the environment.
    unsafe { std::env::set_var("JIFFY_HOME", home.path()) };
    let options = EnterOptions {
        home: home.path().to_owned(),
        persistent,
        network,
    };
    let result = match &support.namespaces {
        Ok(()) => jiffy_rootless::enter(&options).map_err(|e| e.to_string()),
        Err(missing) => Err(missing.description.clone()),
    };
    let notice = rootless_notice::notice(&result, support);
    match command {
        // These commands report more details.
        Command::Doctor(_) | Command::Daemon(_) => {}
        Command::Serve(args) if args.stop => {}
        // A background daemon writes to its log; the command that starts it shows the notice.
        Command::Serve(_) => errln!("jiffy: {notice}"),
        _ => rootless_notice::show_once(&home.run(), &notice),
    }
}

/// Returns whether a command needs namespaces that outlive it, and whether it needs an uplink.
/// `None` if the command needs no namespaces.
fn needs(command: &Command, home: &Home) -> Option<(bool, bool)> {
    match command {
        Command::Run(args) if is_for_daemon(args, home) => None,
        Command::Run(args) => Some((false, args.network != FeatureSwitch::Off)),
        Command::Bench(_) => Some((false, false)),
        Command::Doctor(_) => Some((false, true)),
        Command::Template(TemplateCommand::Build(_) | TemplateCommand::Import { .. }) => {
            Some((false, false))
        }
        Command::Serve(args) if !args.stop || args.kill_sandboxes => {
            // A daemon and its sandboxes must outlive the command that starts them.
            Some((true, args.network.network != FeatureSwitch::Off))
        }
        // The command kills the sandboxes itself if the daemon has exited.
        Command::Daemon(DaemonCommand::Stop {
            kill_sandboxes: true,
        }) => Some((true, true)),
        _ => None,
    }
}

/// Returns whether `jiffy run` uses a remote daemon or a running local daemon, so that this process
/// needs no namespaces. With an explicit engine, returns false for the local daemon, which may not
/// have that engine.
fn is_for_daemon(args: &RunArgs, home: &Home) -> bool {
    // An error counts as remote: the command itself reports the error.
    let is_remote = || !matches!(jiffy_client::is_remote(&args.host.server()), Ok(false));
    let has_local_daemon =
        || args.engine.engine == EngineSelection::Auto && UnixStream::connect(socket(home)).is_ok();
    !args.no_daemon && (is_remote() || has_local_daemon())
}
