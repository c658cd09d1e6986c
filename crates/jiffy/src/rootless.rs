//! Commands of an ordinary user: moved into namespaces of his own before they have threads.

use crate::cli::EngineSelection;
use crate::cli::FeatureSwitch;
use crate::cli::{Command, DaemonCommand, RunArgs, TemplateCommand};
use jiffy_daemon::local_daemon::socket;
use jiffy_daemon::rootless_notice;
use jiffy_image::Home;
use jiffy_rootless::EnterOptions;
use std::os::unix::net::UnixStream;

/// Makes this process root of namespaces of its user's own, if that is of use to the command and
/// the kernel lets it. This process must have one thread only.
pub fn enter_for(command: &Command) {
    if nix::unistd::Uid::effective().is_root() {
        return;
    }
    // A data directory that cannot be used is told by the command itself.
    let Ok(home) = Home::locate() else {
        return;
    };
    let Some((lasting, network)) = needs(command, &home) else {
        return;
    };
    let support = rootless_notice::support();
    // In there nobody would know whose it is.
    // SAFETY: there is no other thread yet that could read the environment.
    unsafe { std::env::set_var("JIFFY_HOME", home.path()) };
    let plan = EnterOptions {
        home: home.path().to_owned(),
        persistent: lasting,
        network,
    };
    let entered = match &support.namespaces {
        Ok(()) => jiffy_rootless::enter(&plan).map_err(|e| e.to_string()),
        Err(missing) => Err(missing.what.clone()),
    };
    let notice = rootless_notice::notice(&entered, support);
    match command {
        // It says more by itself.
        Command::Doctor(_) | Command::Daemon(_) => {}
        Command::Serve(args) if args.stop => {}
        // The command that starts it in the background tells its user.
        Command::Serve(_) => errln!("jiffy: {notice}"),
        _ => rootless_notice::show_once(&home.run(), &notice),
    }
}

/// Needs of a command: namespaces that outlive it, and an uplink; none: neither.
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
            Some((true, args.network.network != FeatureSwitch::Off))
        }
        // The daemon that ends them may be gone.
        Command::Daemon(DaemonCommand::Stop {
            kill_sandboxes: true,
        }) => Some((true, true)),
        _ => None,
    }
}

/// Tells if a run's guest is a daemon's sandbox. One that wants an engine may have none there.
fn is_for_daemon(args: &RunArgs, home: &Home) -> bool {
    let elsewhere = || !matches!(jiffy_client::is_remote(&args.host.server()), Ok(false));
    let here =
        || args.engine.engine == EngineSelection::Auto && UnixStream::connect(socket(home)).is_ok();
    !args.no_daemon && (elsewhere() || here())
}
