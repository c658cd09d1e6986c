//! Notice to unprivileged users about protections that their sandboxes lack.

use jiffy_image::Home;
use jiffy_rootless::RootlessSupport;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// File with the notice that was shown last.
const SHOWN_NOTICE_FILE: &str = "rootless-note";
/// Document about running without root.
const DOCUMENT: &str = "docs/rootless.md";

static SUPPORT: OnceLock<RootlessSupport> = OnceLock::new();

/// Returns the rootless support of this host if this process has determined it already.
pub fn known_support() -> Option<&'static RootlessSupport> {
    SUPPORT.get()
}

/// Returns the rootless support of this host.
pub fn support() -> &'static RootlessSupport {
    SUPPORT.get_or_init(RootlessSupport::find)
}

/// Shows the missing protections of a background daemon once.
pub fn show_daemon_notice(home: &Home) {
    if nix::unistd::Uid::effective().is_root() {
        return;
    }
    let support = support();
    let result = support
        .namespaces
        .clone()
        .map_err(|missing| missing.description);
    show_once(&home.run(), &notice(&result, support));
}

/// Describes the missing protections in one line. `result` is the result of entering namespaces.
pub fn notice(result: &Result<(), String>, support: &RootlessSupport) -> String {
    let description = match (result, &support.ranges) {
        (Ok(()), Ok(())) => "sandboxes run without a jail and resource limits".to_owned(),
        (Ok(()), Err(_)) => {
            "sandboxes run as the current user, without a jail and resource limits".to_owned()
        }
        (Err(reason), _) => format!(
            "user namespaces are not available ({reason}): no network and no gVisor for sandboxes"
        ),
    };
    format!("running without root: {description}; see `jiffy doctor` and {DOCUMENT}")
}

/// Prints a notice on standard error, unless the same notice was shown before. `run` is the
/// directory with the file of the last notice.
pub fn show_once(run: &Path, notice: &str) {
    let path = run.join(SHOWN_NOTICE_FILE);
    if fs::read_to_string(&path).is_ok_and(|shown| shown == notice) {
        return;
    }
    jiffy_client::errln!("jiffy: {notice}");
    // If the file cannot be written, the notice is shown again.
    let _ = fs::write(&path, notice);
}
