//! Keys of build steps. Steps with equal keys have equal results, so that a cached result can
//! replace their execution.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps.

use data_encoding::HEXLOWER;
use jiffy_build_spec::spec::{BuildStep, CopySource, RunMount, StepAction};
use sha2::{Digest, Sha256};

/// Returns the key of a base, from its owner and a fingerprint: the hash of all inputs of its
/// template's sandboxes. Owners share no steps: the owner of a build's sandbox can also change the
/// sandbox outside of the build's steps.
pub fn base_key(owner: Option<&str>, fingerprint: &str) -> String {
    // The first part distinguishes the kinds of keys, and contains the version of their
    // computation.
    hash(&["beginning 1", owner.unwrap_or(""), fingerprint])
}

/// Returns the key of a step after the step `before`. `files` identifies the copied and mounted
/// files in the order of the step: the hash of an upload or of a download, the key of a stage, or a
/// commit.
pub fn step_key(before: &str, step: &BuildStep, files: &[String]) -> String {
    // The key covers the content of the copied files, and not the upload's name or the stage's
    // number.
    let mut action = step.action.clone();
    let origins: Vec<&mut CopySource> = match &mut action {
        StepAction::Copy(copy) => vec![&mut copy.from],
        StepAction::Run { mounts, .. } => mounts
            .iter_mut()
            .filter_map(|mount| match mount {
                RunMount::Bind { from, .. } => Some(from),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    for (from, files) in origins.into_iter().zip(files) {
        if !matches!(from, CopySource::Inline(_)) {
            // The client chooses the names of uploads, and stage numbers do not identify content.
            *from = CopySource::Files(files.clone());
        }
    }
    let action = serde_json::to_string(&action).unwrap_or_default();
    hash(&["step 1", before, &action])
}

/// Returns the key of a template, from the key of its last step and its serialised settings.
pub fn template_key(last: &str, settings: &str) -> String {
    hash(&["template 1", last, settings])
}

/// Returns the SHA-256 of the parts. Each part is preceded by its length, so that different lists
/// never have the same input.
fn hash(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hash.update(part.as_bytes());
    }
    HEXLOWER.encode(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_build_spec::spec::{CopyAction, StepCommand};

    /// Returns a step that runs a command.
    fn run(line: &str) -> BuildStep {
        BuildStep {
            text: format!("RUN {line}"),
            line: Some(3),
            force: false,
            action: StepAction::Run {
                command: StepCommand::Line(line.to_owned()),
                user: None,
                mounts: Vec::new(),
            },
        }
    }

    /// Returns a step that copies the file `a`.
    fn copy(from: CopySource) -> BuildStep {
        BuildStep {
            action: StepAction::Copy(CopyAction {
                from,
                sources: vec!["a".into()],
                to: "/a".into(),
                owner: None,
                mode: None,
                unpack: false,
            }),
            ..run("")
        }
    }

    #[test]
    fn a_step_key_covers_the_step_and_all_before_it() {
        let first = base_key(None, "base");
        let a = step_key(&first, &run("a"), &[]);
        assert_eq!(a, step_key(&first, &run("a"), &[]));
        assert_ne!(a, step_key(&first, &run("b"), &[]));
        assert_ne!(a, step_key(&a, &run("a"), &[]));
        assert_ne!(first, base_key(Some("k1"), "base"), "owners share nothing");
        let elsewhere = BuildStep {
            line: Some(9),
            text: "RUN  a".to_owned(),
            ..run("a")
        };
        assert_eq!(
            a,
            step_key(&first, &elsewhere, &[]),
            "line and spelling are ignored"
        );
    }

    #[test]
    fn a_step_key_covers_mounted_files_and_not_the_values_of_secrets() {
        let with = |mount: RunMount| BuildStep {
            action: StepAction::Run {
                command: StepCommand::Line("x".into()),
                user: None,
                mounts: vec![mount],
            },
            ..run("x")
        };
        let bind = with(RunMount::Bind {
            from: CopySource::Stage(1),
            source: "a".into(),
            target: "/a".into(),
            writable: false,
        });
        let key = |files: &str| step_key("x", &bind, &[files.to_owned()]);
        assert_ne!(key("one"), key("two"));
        assert_eq!(key("one"), key("one"));
        assert_ne!(key("one"), step_key("x", &run("x"), &[]));
    }

    #[test]
    fn a_step_key_covers_the_content_of_files_and_not_their_name() {
        let named = |name: &str| copy(CopySource::Files(name.to_owned()));
        assert_eq!(
            step_key("x", &named("n1"), &["sum".to_owned()]),
            step_key("x", &named("n2"), &["sum".to_owned()])
        );
        assert_ne!(
            step_key("x", &named("n1"), &["sum".to_owned()]),
            step_key("x", &named("n1"), &["other".to_owned()])
        );
        let inline = |content: &str| copy(CopySource::Inline(vec![("a".into(), content.into())]));
        assert_ne!(
            step_key("x", &inline("1"), &[]),
            step_key("x", &inline("2"), &[])
        );
    }
}
