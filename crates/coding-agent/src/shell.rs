//! Execution of a shell command in the sandbox: the working directory and the exported variables
//! persist between commands, in files of the sandbox that snapshots contain.

use anyhow::{Context, ensure};
use jiffy_agent_client::AgentClient;
use std::path::Path;

/// Maximum length of a command in bytes.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;
/// Directory of the sandbox with commands, working directory and variables.
const DIRECTORY: &str = "/var/lib/jiffy-shell";
/// Starts the script with Bash, or with the shell of images without Bash.
const LAUNCH: &str = r#"shell=/bin/sh; [ -x /bin/bash ] && shell=/bin/bash
exec "$shell" /var/lib/jiffy-shell/run "$@""#;
/// Script with the arguments: name of the command, project directory, working directory (may be
/// empty), `1` if working directory and variables persist. A command may have removed the programs
/// that the script uses. In this case the variables of the previous command persist.
const SCRIPT: &str = r#"__s=/var/lib/jiffy-shell; __tag=$1; __project=$2; __dir=$3; __persist=$4
umask 022
if [ -r "$__s/env" ]; then
    if [ -n "$BASH_VERSION" ]; then
        for __v in $(compgen -e); do unset "$__v" 2>/dev/null; done
    fi
    . "$__s/env" 2>/dev/null
fi
__t=$(/bin/cat "$__s/$__tag"; printf x) || exit 125
/bin/rm -f "$__s/$__tag"
/bin/mkdir -p "$__project"
if [ -n "$__dir" ]; then
    cd -- "$__dir" || exit 1
else
    __dir=$(/bin/cat "$__s/cwd" 2>/dev/null; printf x); __dir=${__dir%x}
    [ -n "$__dir" ] && cd -- "$__dir" 2>/dev/null || cd -- "$__project" || exit 1
fi
if [ "$__persist" = 1 ]; then
    __jiffy_save() {
        __c=$?
        set +eu
        export -p >|"$__s/env.new" && /bin/mv -f "$__s/env.new" "$__s/env" 2>/dev/null
        printf %s "$PWD" >|"$__s/cwd"
        exit "$__c"
    }
    trap __jiffy_save EXIT
fi
unset __v __dir
set --
eval "${__t%x}"
"#;

/// Shell command to run in the sandbox.
#[derive(Debug, Clone, Default)]
pub struct ShellCommand {
    /// Text of the command.
    pub text: String,
    /// Working directory. `None` for the directory in which the previous command ended.
    pub workdir: Option<String>,
    /// True if the command runs at the same time as later commands. Its working directory and
    /// variables do not persist.
    pub background: bool,
}

impl ShellCommand {
    /// Checks a command. Shell commands cannot contain zero bytes.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.text.contains('\0'),
            "the command contains a zero byte"
        );
        ensure!(
            self.text.len() <= MAX_COMMAND_BYTES,
            "the command is longer than {} KiB: write it to a file of the project",
            MAX_COMMAND_BYTES >> 10
        );
        Ok(())
    }

    /// Writes the command to the sandbox, and returns the arguments of the program that runs it.
    /// `tag` is a file name.
    pub(crate) async fn upload(
        &self,
        agent: &AgentClient,
        tag: &str,
        project: &Path,
    ) -> anyhow::Result<Vec<String>> {
        let context = "cannot write the command to the sandbox";
        let root = Some("root");
        let script = format!("{DIRECTORY}/run");
        agent.write(&script, root, SCRIPT).await.context(context)?;
        let path = format!("{DIRECTORY}/{tag}");
        let text = self.text.clone();
        agent.write(&path, root, text).await.context(context)?;
        let project = project
            .to_str()
            .context("the path of the project is not UTF-8")?;
        let words = [
            "/bin/sh",
            "-c",
            LAUNCH,
            "jiffy-shell",
            tag,
            project,
            self.workdir.as_deref().unwrap_or_default(),
            if self.background { "0" } else { "1" },
        ];
        Ok(words.map(str::to_owned).to_vec())
    }
}
