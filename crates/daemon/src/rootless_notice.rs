//! Notice to an ordinary user about protections that sandboxes lack without root.

use jiffy_image::Home;
use jiffy_rootless::RootlessSupport;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// File with the notice that its user was shown last.
const SHOWN_NOTICE_FILE: &str = "rootless-note";
/// Document about running without root.
const DOCUMENT: &str = "docs/rootless.md";

static SUPPORT: OnceLock<RootlessSupport> = OnceLock::new();

/// Facts about an ordinary user's rights on this host, if this process found them out already.
pub fn known_support() -> Option<&'static RootlessSupport> {
    SUPPORT.get()
}

/// Facts about an ordinary user's rights on this host.
pub fn support() -> &'static RootlessSupport {
    SUPPORT.get_or_init(RootlessSupport::find)
}

/// Shows, once, what a daemon that was just started in the background lacks.
pub fn show_daemon_notice(home: &Home) {
    if nix::unistd::Uid::effective().is_root() {
        return;
    }
    let support = support();
    let entered = support.namespaces.clone().map_err(|missing| missing.what);
    show_once(&home.run(), &notice(&entered, support));
}

/// Protections that an ordinary user lacks, on one line. `entered`: result of entering namespaces.
pub fn notice(entered: &Result<(), String>, support: &RootlessSupport) -> String {
    let what = match (entered, &support.ranges) {
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
    format!("without root: {what}; `jiffy doctor` and {DOCUMENT} have more")
}

/// Prints a notice on standard error, unless the same was shown in run directory `run` before.
pub fn show_once(run: &Path, notice: &str) {
    let path = run.join(SHOWN_NOTICE_FILE);
    if fs::read_to_string(&path).is_ok_and(|before| before == notice) {
        return;
    }
    jiffy_client::errln!("jiffy: {notice}");
    // A file that cannot be written means that the notice is shown again.
    let _ = fs::write(&path, notice);
}
