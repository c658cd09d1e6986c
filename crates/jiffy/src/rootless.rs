//! Commands of an ordinary user: moved into namespaces of his own before they have threads.

use crate::cli::{Command, DaemonCommand, RunArgs, TemplateCommand};
use crate::daemon::socket;
use crate::serve::engine::Wish;
use crate::serve::network::Wanted;
use jiffy_image::Home;
use jiffy_rootless::{EnterOptions, RootlessSupport, current};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;

/// File that tells that a user was told.
const NOTE: &str = "rootless-note";
/// The page of all this.
const PAGE: &str = "docs/rootless.md";

static FACTS: OnceLock<RootlessSupport> = OnceLock::new();

/// Facts about an ordinary user's rights on this host; none: this is root, or a command that makes
/// no sandbox.
pub fn facts() -> Option<&'static RootlessSupport> {
    FACTS.get()
}

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
    let facts = FACTS.get_or_init(RootlessSupport::find);
    // In there nobody would know whose it is.
    // SAFETY: there is no other thread yet that could read the environment.
    unsafe { std::env::set_var("JIFFY_HOME", home.path()) };
    let plan = EnterOptions {
        home: home.path().to_owned(),
        persistent: lasting,
        network,
    };
    let entered = match &facts.namespaces {
        Ok(()) => jiffy_rootless::enter(&plan).map_err(|e| e.to_string()),
        Err(missing) => Err(missing.what.clone()),
    };
    let note = note(&entered, facts);
    match command {
        // It says more by itself.
        Command::Doctor(_) | Command::Daemon(_) => {}
        Command::Serve(args) if args.stop => {}
        // The command that starts it in the background tells its user.
        Command::Serve(_) => eprintln!("jiffy: {note}"),
        _ => tell_once(&home.run(), &note),
    }
}

/// Needs of a command: namespaces that outlive it, and an uplink; none: neither.
fn needs(command: &Command, home: &Home) -> Option<(bool, bool)> {
    match command {
        Command::Run(args) if is_for_daemon(args, home) => None,
        Command::Run(args) => Some((false, args.network != Wanted::Off)),
        Command::Bench(_) => Some((false, false)),
        Command::Doctor(_) => Some((false, true)),
        Command::Template(TemplateCommand::Build(_) | TemplateCommand::Import { .. }) => {
            Some((false, false))
        }
        Command::Serve(args) if !args.stop || args.kill_sandboxes => {
            Some((true, args.network.network != Wanted::Off))
        }
        // The daemon that ends them may be gone.
        Command::Daemon(DaemonCommand::Stop {
            kill_sandboxes: true,
        }) => Some((true, true)),
        _ => None,
    }
}

/// Says on standard error, once, what a daemon that was just started in the background lacks.
pub fn tell_of_daemon(home: &Home) {
    if nix::unistd::Uid::effective().is_root() {
        return;
    }
    let facts = FACTS.get_or_init(RootlessSupport::find);
    let entered = facts.namespaces.clone().map_err(|missing| missing.what);
    tell_once(&home.run(), &note(&entered, facts));
}

/// Tells if a run's guest is a daemon's sandbox. One that wants an engine may have none there.
fn is_for_daemon(args: &RunArgs, home: &Home) -> bool {
    let elsewhere = || !matches!(crate::client::is_elsewhere(&args.host), Ok(false));
    let here = || args.engine.engine == Wish::Auto && UnixStream::connect(socket(home)).is_ok();
    !args.no_daemon && (elsewhere() || here())
}

/// Protections that an ordinary user lacks, on one line.
fn note(entered: &Result<(), String>, facts: &RootlessSupport) -> String {
    let what = match (entered, &facts.ranges) {
        (Ok(()), Ok(())) => {
            "sandboxes run without the jail and the limits that root's have".to_owned()
        }
        (Ok(()), Err(_)) => {
            "sandboxes run as you, without the jail and the limits that root's have".to_owned()
        }
        (Err(why), _) => format!(
            "there are no namespaces of your own ({why}), so sandboxes have no network, and no gVisor"
        ),
    };
    format!("without root: {what}; `jiffy doctor` and {PAGE} have more")
}

/// Protections that the daemon's sandboxes lack, on one line; none: it is root's.
pub fn status() -> Option<String> {
    let users = match current() {
        Some(own) if own.has_ranges() => "users of their own on gVisor",
        Some(_) => "no users of their own",
        None if nix::unistd::Uid::effective().is_root() => return None,
        None => "no namespaces, no network",
    };
    let out = current().and_then(|own| own.uplink().ok());
    let out = out.map_or(String::new(), |name| format!(", network through {name}"));
    Some(format!("without root: no jail, {users}{out}"))
}

/// Says it on standard error, unless this user was told the same before.
fn tell_once(run: &Path, note: &str) {
    let path = run.join(NOTE);
    if fs::read_to_string(&path).is_ok_and(|before| before == note) {
        return;
    }
    eprintln!("jiffy: {note}");
    // Otherwise it is said again.
    let _ = fs::write(&path, note);
}
