#![no_main]
//! Any Dockerfile is parsed or rejected with a message, deterministically, in bounded time, and
//! with an existing line number. A parsed Dockerfile expands within the limits, and escaped text
//! expands to itself.
//!
//! Half of the inputs are assembled from fragments of Dockerfiles: random bytes are rarely a valid
//! instruction.

use jiffy_build_spec::context::DockerIgnore;
use jiffy_build_spec::dockerfile::{DockerfileOptions, parse, parse_triggers};
use jiffy_build_spec::expand::{MAX_EXPANDED_BYTES, escape, expand};
use jiffy_build_spec::spec::{BuildSpec, CopySource, RunMount, StepAction};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;

/// Fragments of Dockerfiles.
const PIECES: [&str; 68] = [
    "FROM ",
    "base",
    " AS ",
    "one",
    "\n",
    "RUN ",
    "echo $A",
    "COPY ",
    "--from=",
    "--chown=",
    "--chmod=",
    "--link ",
    "1000:1000 ",
    "755 ",
    "a b ",
    "/to",
    "ADD ",
    "<<EOF",
    "\nEOF\n",
    "<<-\"E\" ",
    "ENV ",
    "A=",
    "\"",
    "'",
    "\\",
    "\\\n",
    "$",
    "${A",
    ":-",
    ":+",
    ":?",
    "}",
    "ARG ",
    "A",
    "=1",
    "USER ",
    "root",
    "WORKDIR ",
    "..",
    "CMD ",
    "[\"a\", \"b\"]",
    "ENTRYPOINT ",
    "SHELL ",
    "LABEL ",
    "EXPOSE ",
    "80/tcp",
    "VOLUME ",
    "HEALTHCHECK ",
    "ONBUILD ",
    "STOPSIGNAL ",
    "MAINTAINER ",
    "# escape=`\n",
    "# syntax=x\n",
    "# comment\n",
    "`",
    "`\n",
    "--mount=type=cache,target=/x ",
    "--platform=$BUILDPLATFORM ",
    "scratch",
    "0",
    "\t",
    "\u{feff}",
    "{",
    "https://x/y.git#z",
    "--mount=",
    "type=secret,id=a,target=$A,",
    "--checksum=sha256:$A ",
    "--keep-git-dir ",
];
/// Fragments of ignore files.
const IGNORED: [&str; 16] = [
    "*", "**", "/", "!", "?", "[a-", "]", "\\", "a", "b", ".", "..", "\n", "#", " ", "**/",
];

/// Concatenates one fragment for each byte of `orders`.
fn assemble(orders: &[u8], pieces: &[&str]) -> String {
    let piece = |order: &u8| pieces[usize::from(*order) % pieces.len()];
    orders.iter().map(piece).collect()
}

/// All words of a specification that may have variables in them.
fn words(spec: &BuildSpec) -> Vec<&String> {
    let mut found = Vec::new();
    for step in spec.stages.iter().flat_map(|stage| &stage.steps) {
        match &step.action {
            StepAction::Copy(copy) => {
                found.extend(&copy.sources);
                found.push(&copy.to);
                found.extend(&copy.owner);
                match &copy.from {
                    CopySource::Inline(files) => {
                        found.extend(files.iter().map(|(_, content)| content));
                    }
                    CopySource::Url(source) => {
                        found.push(&source.url);
                        found.extend(&source.sha256);
                    }
                    CopySource::Git(source) => {
                        found.push(&source.url);
                        found.extend(&source.commit);
                    }
                    CopySource::Files(_) | CopySource::Stage(_) => {}
                }
            }
            StepAction::Run { mounts, .. } => {
                for mount in mounts {
                    match mount {
                        RunMount::Bind { source, target, .. } => found.extend([source, target]),
                        RunMount::Cache { id, target, .. } => found.extend([id, target]),
                        RunMount::Tmpfs { target, .. } => found.push(target),
                        RunMount::Secret { target, .. } => found.extend(target),
                        RunMount::Ssh { id, target, .. } => found.extend([id, target]),
                    }
                }
            }
            StepAction::Env(pairs) | StepAction::Label(pairs) => {
                found.extend(pairs.iter().flat_map(|(name, value)| [name, value]));
            }
            StepAction::Arg(_, word) | StepAction::Workdir(word) | StepAction::User(word) => {
                found.push(word)
            }
            StepAction::Expose(words) => found.extend(words),
            _ => {}
        }
    }
    found
}

fuzz_target!(|data: &[u8]| {
    // The first byte selects the kind of the input, and the second one the border between the
    // argument and the text.
    let [kind, at, rest @ ..] = data else {
        return;
    };
    let (first, second) = rest.split_at(usize::from(*at).min(rest.len()));
    let by_pieces = kind % 2 == 0;
    let text = if by_pieces {
        assemble(second, &PIECES)
    } else {
        String::from_utf8_lossy(second).into_owned()
    };
    let argument = String::from_utf8_lossy(first).into_owned();
    let options = DockerfileOptions {
        build_args: BTreeMap::from([("A".to_owned(), argument.clone())]),
        target: (kind & 2 == 2).then(|| argument.clone()),
    };
    let parsed = parse(&text, &options);
    assert_eq!(
        format!("{parsed:?}"),
        format!("{:?}", parse(&text, &options))
    );
    match parsed {
        Ok(parsed) => {
            for word in words(&parsed.spec) {
                match expand(word, |name| (name == "A").then(|| argument.clone())) {
                    Ok(expanded) => assert!(expanded.len() <= MAX_EXPANDED_BYTES),
                    Err(e) => assert!(!e.to_string().is_empty()),
                }
            }
            for warning in &parsed.warnings {
                let _ = warning.to_string();
            }
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
    // The triggers of an image are as hostile as the image.
    match parse_triggers(&[argument.clone(), text.clone()]) {
        Ok(steps) => assert!(steps.iter().all(|step| step.line.is_none())),
        Err(e) => assert!(!e.is_empty()),
    }
    assert_eq!(expand(&escape(&argument), |_| None).as_ref(), Ok(&argument));

    let rules = if by_pieces {
        assemble(second, &IGNORED)
    } else {
        text
    };
    if let Ok(ignore) = DockerIgnore::parse(&rules) {
        let path = if by_pieces {
            assemble(first, &["a", "b", "/", ".", "c"])
        } else {
            argument
        };
        let ignored = ignore.ignores(&path);
        // Files are excluded only by a rule.
        assert!(!ignored || !rules.trim().is_empty());
    }
});
