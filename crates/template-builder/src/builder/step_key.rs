//! Names of steps: equal ones have equal results.

use crate::spec::{BuildStep, CopySource, StepAction};
use sha2::{Digest, Sha256};

/// The beginning of a stage: whose it is, and what everything made from its template depends on. Builds of different owners share
/// nothing, since whoever owns a sandbox may do in it what no step says.
pub fn base_key(owner: Option<&str>, fingerprint: &str) -> String {
    hash(&["beginning 1", owner.unwrap_or(""), fingerprint])
}

/// A step after what came before. `files` is what the files are that it copies: the hash of an upload, or the key of a stage.
pub fn step_key(before: &str, step: &BuildStep, files: &str) -> String {
    let mut action = step.action.clone();
    if let StepAction::Copy(copy) = &mut action
        && !matches!(copy.from, CopySource::Inline(_))
    {
        // Their name is the client's word, and the number of a stage says nothing about it.
        copy.from = CopySource::Files(files.to_owned());
    }
    let action = serde_json::to_string(&action).unwrap_or_default();
    hash(&["step 1", before, &action])
}

/// All of a template: its last step, and what is said about it beside.
pub fn template_key(last: &str, about: &str) -> String {
    hash(&["template 1", last, about])
}

/// Each part with its length, so that no two lists have the same bytes.
fn hash(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{CopyAction, StepCommand};

    fn run(line: &str) -> BuildStep {
        BuildStep {
            text: format!("RUN {line}"),
            line: Some(3),
            force: false,
            action: StepAction::Run {
                command: StepCommand::Line(line.to_owned()),
                user: None,
            },
        }
    }

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
    fn a_step_is_named_by_what_it_does_and_by_all_before_it() {
        let first = base_key(None, "base");
        let a = step_key(&first, &run("a"), "");
        assert_eq!(a, step_key(&first, &run("a"), ""));
        assert_ne!(a, step_key(&first, &run("b"), ""));
        assert_ne!(a, step_key(&a, &run("a"), ""));
        assert_ne!(first, base_key(Some("k1"), "base"), "owners share nothing");
        let elsewhere = BuildStep {
            line: Some(9),
            text: "RUN  a".to_owned(),
            ..run("a")
        };
        assert_eq!(
            a,
            step_key(&first, &elsewhere, ""),
            "how it is written says nothing"
        );
    }

    #[test]
    fn copied_files_count_by_what_they_are_and_not_by_their_name() {
        let named = |name: &str| copy(CopySource::Files(name.to_owned()));
        assert_eq!(
            step_key("x", &named("n1"), "sum"),
            step_key("x", &named("n2"), "sum")
        );
        assert_ne!(
            step_key("x", &named("n1"), "sum"),
            step_key("x", &named("n1"), "other")
        );
        let inline = |content: &str| copy(CopySource::Inline(vec![("a".into(), content.into())]));
        assert_ne!(
            step_key("x", &inline("1"), ""),
            step_key("x", &inline("2"), "")
        );
    }
}
