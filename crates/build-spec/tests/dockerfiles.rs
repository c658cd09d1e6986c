//! Tests of the parser of Dockerfiles.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use jiffy_build_spec::dockerfile::{DockerfileOptions, ParsedDockerfile, parse};
use jiffy_build_spec::spec::{BuildStage, CopySource, StageBase, StepAction, StepCommand};
use std::collections::BTreeMap;

/// Parses a valid Dockerfile.
pub(crate) fn read(text: &str) -> ParsedDockerfile {
    parse(text, &DockerfileOptions::default()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Parses a Dockerfile with build arguments and a target.
fn with(
    text: &str,
    arguments: &[(&str, &str)],
    target: Option<&str>,
) -> Result<ParsedDockerfile, String> {
    let build_args: BTreeMap<_, _> = (arguments.iter())
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let target = target.map(str::to_owned);
    parse(text, &DockerfileOptions { build_args, target }).map_err(|e| e.to_string())
}

/// Returns the error for an invalid Dockerfile.
pub(crate) fn refused(text: &str) -> String {
    match parse(text, &DockerfileOptions::default()) {
        Ok(parsed) => panic!("{text}: {parsed:?}"),
        Err(e) => e.to_string(),
    }
}

/// Describes a stage with one line per step.
fn shown(stage: &BuildStage) -> Vec<String> {
    let name = stage.name.as_deref().unwrap_or("-");
    let from = match &stage.from {
        StageBase::Name(name) => name.clone(),
        StageBase::Image(image) => format!("image {}", image.reference),
        StageBase::Stage(number) => format!("stage {number}"),
        other => format!("{other:?}"),
    };
    let mut lines = vec![format!("{name} from {from}")];
    lines.extend(stage.steps.iter().map(|step| match &step.action {
        StepAction::AddUser(user) => format!("add user {user}"),
        StepAction::Run {
            command, mounts, ..
        } => {
            let mounts: Vec<String> = mounts.iter().map(|m| format!("{m:?} ")).collect();
            match command {
                StepCommand::Line(line) => format!("{}run {line}", mounts.concat()),
                StepCommand::Exec(words) => format!("{}exec {words:?}", mounts.concat()),
            }
        }
        StepAction::Copy(copy) => {
            let from = match &copy.from {
                CopySource::Files(_) => "context".to_owned(),
                CopySource::Stage(number) => format!("stage {number}"),
                CopySource::Inline(files) => format!("{files:?}"),
                CopySource::Url(source) => format!("{} {:?}", source.url, source.sha256),
                CopySource::Git(source) => format!("git {} {:?}", source.url, source.commit),
            };
            let extra = [copy.owner.as_ref(), copy.mode.as_ref()];
            let extra: String = extra
                .into_iter()
                .flatten()
                .map(|e| format!(" {e}"))
                .collect();
            let unpack = if copy.unpack { " unpack" } else { "" };
            format!(
                "copy {from} {:?} -> {}{extra}{unpack}",
                copy.sources, copy.to
            )
        }
        StepAction::Env(pairs) => format!("env {pairs:?}"),
        StepAction::Arg(name, value) => format!("arg {name}={value}"),
        StepAction::Workdir(path) => format!("workdir {path}"),
        StepAction::User(user) => format!("user {user}"),
        StepAction::Shell(words) => format!("shell {words:?}"),
        StepAction::Entrypoint(words) => format!("entrypoint {words:?}"),
        StepAction::Cmd(words) => format!("cmd {words:?}"),
        StepAction::Expose(ports) => format!("expose {ports:?}"),
        StepAction::OnBuild(trigger) => format!("on build {trigger}"),
        StepAction::Label(pairs) => format!("label {pairs:?}"),
    }));
    lines
}

/// Describes all stages and their steps.
pub(crate) fn all(parsed: &ParsedDockerfile) -> String {
    let stages = parsed.spec.stages.iter().flat_map(shown);
    stages.collect::<Vec<_>>().join("\n")
}

/// Checks a file that consists of a Dockerfile, a line `---`, and the expected description.
fn check(file: &str) {
    let (text, expected) = file.split_once("\n---\n").unwrap();
    let parsed = read(text);
    let warnings = parsed.warnings.iter().map(|w| format!("\nwarning: {w}"));
    let seen = format!("{}{}", all(&parsed), warnings.collect::<String>());
    assert_eq!(seen.trim(), expected.trim(), "of\n{text}");
}

macro_rules! golden {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            check(include_str!(concat!("dockerfiles/", stringify!($name))));
        })*
    };
}

golden!(
    node_in_stages,
    python_with_venv,
    go_static,
    rust_with_caches,
    heredocs,
    powershell_escape,
    java_and_user,
    static_site,
    arguments_everywhere,
    old_style,
    shells_and_quotes,
    images_as_sources,
);

#[test]
fn from_takes_values_of_arguments_before_it() {
    let text = "ARG TAG=3.12\nARG BASE=python:${TAG}-slim\nFROM --platform=$BUILDPLATFORM ${BASE} AS one\nARG TAG\nFROM one";
    assert_eq!(
        all(&read(text)),
        "one from python:3.12-slim\narg TAG=3.12\n- from stage 0"
    );
    let given = with(text, &[("TAG", "3.13")], None).unwrap();
    assert_eq!(
        all(&given),
        "one from python:3.13-slim\narg TAG=3.13\n- from stage 0"
    );
    assert!(refused("FROM $NONE").contains("line 1: FROM: '$NONE' expands to ''"));
}

#[test]
fn build_arguments_reach_their_stage_and_nothing_else() {
    let text = "FROM a\nARG X\nARG Y=y\nARG Z=$Y-z W='a b'\nFROM b\nRUN echo $X";
    let given = with(
        text,
        &[
            ("X", "$1"),
            ("Y", "given"),
            ("HTTP_PROXY", "http://p"),
            ("TYPO", ""),
        ],
        None,
    );
    let given = given.unwrap();
    assert_eq!(
        all(&given),
        "- from a\narg HTTP_PROXY=http://p\narg X=\\$1\narg Y=given\narg Z=$Y-z\narg W=a b\n- from b\narg HTTP_PROXY=http://p\nrun echo $X"
    );
    // `HTTP_PROXY` needs no `ARG`, as in Docker. `TYPO` does, so it causes a warning.
    assert_eq!(given.warnings.len(), 1);
    assert!(given.warnings[0].to_string().contains("'TYPO'"));
}

#[test]
fn stages_after_the_target_are_dropped() {
    let text = "FROM a AS One\nFROM b AS two\nCOPY --from=busybox /bin/sh /\nFROM c";
    // The image of `COPY --from` is an additional stage.
    assert_eq!(with(text, &[], Some("one")).unwrap().spec.stages.len(), 1);
    assert_eq!(with(text, &[], Some("1")).unwrap().spec.stages.len(), 3);
    assert_eq!(with(text, &[], None).unwrap().spec.stages.len(), 4);
    assert!(
        with(text, &[], Some("three"))
            .unwrap_err()
            .contains("stage 'three' does not exist")
    );
}

/// Returns the command of the only step of a Dockerfile.
fn only_command(text: &str) -> StepCommand {
    let parsed = with(text, &[], None).unwrap();
    let [step] = &parsed.spec.stages[0].steps[..] else {
        panic!("{:?}", parsed.spec.stages[0].steps);
    };
    match &step.action {
        StepAction::Run { command, .. } => command.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_here_document_with_a_command_is_its_input_and_one_without_is_the_script() {
    let line = |text: &str| StepCommand::Line(text.to_owned());
    for (text, expected) in [
        (
            "FROM a\nRUN <<'PY' python3\nprint(1)\nPY\n",
            line("<<'PY' python3\nprint(1)\nPY\n"),
        ),
        (
            "FROM a\nRUN <<X bash\n[[ 1 ]]\nX\n",
            line("<<X bash\n[[ 1 ]]\nX\n"),
        ),
        (
            "FROM a\nRUN <<A <<B cat\n1\nA\n2\nB\n",
            line("<<A <<B cat\n1\nA\n2\nB\n"),
        ),
        ("FROM a\nRUN <<X\n[ 1 ]\nX\n", line("[ 1 ]\n")),
        ("FROM a\nRUN  <<-'X Y' \n\t[ 1 ]\nX Y\n", line("[ 1 ]\n")),
    ] {
        assert_eq!(only_command(text), expected, "{text}");
    }
    let program = only_command("FROM a\nRUN <<X\n#!/usr/bin/python3\nprint(1)\nX\n");
    assert!(matches!(program, StepCommand::Exec(_)), "{program:?}");
}

#[test]
fn an_error_names_its_line_and_instruction() {
    for (text, expected) in [
        ("", "the file has no instructions"),
        ("RUN x", "line 1: RUN: is not allowed before the first FROM"),
        ("FROM a\n\nRUNN x", "line 3: RUNN: unknown instruction"),
        ("FROM --platform=linux/arm64 a", "--platform=linux/arm64"),
        ("FROM a AS b c", "must be `FROM image"),
        ("FROM a AS 1x", "not a valid name for a stage"),
        (
            "FROM a\nRUN --mount=type=ssh,env=A cat",
            "line 2: RUN: --mount=type=ssh: the option 'env' is not supported",
        ),
        ("FROM a\nRUN --mount=type=x cat", "unknown type of mount"),
        ("FROM a\nRUN --mount=type=bind cat", "needs a target"),
        (
            "FROM a\nRUN --mount=type=cache,target=/ cat",
            "needs a target",
        ),
        ("FROM a\nRUN --mount=type=secret cat", "needs an id"),
        (
            "FROM a\nRUN --mount=type=secret,id=x,mode=8 cat",
            "'8' is not a valid value of mode",
        ),
        (
            "FROM a\nRUN --mount=type=secret,id=x,required=maybe cat",
            "'maybe' is not a valid value of required",
        ),
        (
            "FROM a\nRUN --mount=type=tmpfs,target=/x,size=1x cat",
            "'1x' is not a valid value of size",
        ),
        (
            "FROM a\nRUN --mount=type=cache,target=/x,from=b cat",
            "the option 'from' is not supported",
        ),
        (
            "FROM a\nRUN --mount=target=/x,target=/y cat",
            "the option 'target' is empty or repeated",
        ),
        (
            "FROM a\nRUN --mount=target=/x,from=3 cat",
            "--from=3: no earlier stage",
        ),
        ("FROM a\nRUN --network=none x", "--network is not supported"),
        (
            "FROM a\nRUN --security=insecure x",
            "--security is not supported",
        ),
        ("FROM a\nRUN", "needs arguments"),
        (
            "FROM a\nADD ftp://x.org/a.tgz /",
            "line 2: ADD: 'ftp://x.org/a.tgz': only https URLs",
        ),
        ("FROM a\nADD git@github.com:a/b.git /", "only https URLs"),
        (
            "FROM a\nADD --checksum=sha256:12 https://x.org/a /",
            "64 hexadecimal digits",
        ),
        (
            "FROM a\nADD --checksum=v1 https://x.org/a.git /",
            "40 hexadecimal digits",
        ),
        (
            "FROM a\nADD --checksum=sha256:1 b /",
            "require a remote source",
        ),
        ("FROM a\nADD --keep-git-dir b /", "require a remote source"),
        (
            "FROM a\nADD --keep-git-dir https://x.org/a /",
            "is not a Git repository",
        ),
        ("FROM a\nADD https://x.org/a b /c", "must be a directory"),
        ("FROM a\nCOPY --checksum=sha256:1 b /", "only --from"),
        ("FROM a\nCOPY a", "must be `COPY source"),
        (
            "FROM a\nCOPY --from=$x a b",
            "variables are not supported here",
        ),
        (
            "FROM a AS b\nCOPY --from=b a b",
            "refers to the stage itself",
        ),
        (
            "FROM a\nCOPY --from=3 a b",
            "--from=3: no earlier stage has this name",
        ),
        ("FROM a\nCOPY --chmod=u+x a b", "octal digits"),
        ("FROM a\nCOPY --exclude=*.md . .", ".dockerignore"),
        ("FROM a\nCOPY 'a b", "a single quote is not closed"),
        ("FROM a\nENV X", "'X' has no value"),
        ("FROM a\nENV X=1 Y", "'Y' is not NAME=value"),
        ("FROM a\nENV X=\"1", "a double quote is not closed"),
        ("FROM a\nENV X=${Y%z}", "only ${NAME}"),
        ("FROM a\nSHELL /bin/bash", "must be a JSON array"),
        ("FROM a\nEXPOSE 80/icmp", "'80/icmp' is not a port"),
        ("FROM a\nEXPOSE 0", "'0' is not a port"),
        (
            "FROM a\nRUN <<EOF\nx",
            "line 2: RUN: the here-document is not terminated",
        ),
        (
            "FROM a\nCOPY --from=b <<EOF /x\nEOF",
            "a here-document cannot be combined with --from",
        ),
    ] {
        let message = refused(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn every_step_has_its_text_and_line() {
    let parsed = read("# c\nFROM a\n\nRUN x \\\n  y\nCOPY a b\n");
    let steps = &parsed.spec.stages[0].steps;
    assert_eq!(
        (steps[0].line, steps[0].text.as_str()),
        (Some(4), "RUN x   y")
    );
    assert_eq!(
        (steps[1].line, steps[1].text.as_str()),
        (Some(6), "COPY a b")
    );
}

/// Fragments of Dockerfiles in random order.
#[test]
fn random_input_causes_no_panic_and_no_hang() {
    const PIECES: [&str; 60] = [
        "FROM ",
        "a",
        " AS ",
        "\n",
        "\n",
        "RUN ",
        "COPY ",
        "ADD ",
        "ENV ",
        "ARG ",
        "X",
        "=",
        "$",
        "{",
        "}",
        ":-",
        ":+",
        "\"",
        "'",
        "\\",
        "\\\n",
        "`",
        "<<",
        "<<-",
        "EOF",
        "\nEOF\n",
        "--",
        "--from=",
        "--mount=",
        "--chown=",
        "type=cache",
        ",",
        "[",
        "]",
        "[\"a\", \"b\"]",
        "#",
        "# escape=`\n",
        "0",
        "1",
        "/",
        "../",
        "*",
        "?",
        " ",
        "\t",
        "\r\n",
        "\u{feff}",
        "ü",
        "\0",
        "CMD ",
        "SHELL ",
        "LABEL ",
        "EXPOSE ",
        "USER ",
        "WORKDIR ",
        "ONBUILD ",
        "scratch",
        "VOLUME ",
        "${X:-",
        "$$",
    ];
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |bound: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed % bound as u64).unwrap()
    };
    let mut good = 0;
    for round in 0..30_000 {
        let mut text = String::from(if round % 2 == 0 { "FROM a\n" } else { "" });
        for _ in 0..random(40) {
            text.push_str(PIECES[random(PIECES.len())]);
        }
        if let Ok(parsed) = parse(&text, &DockerfileOptions::default()) {
            good += 1;
            for step in parsed.spec.stages.iter().flat_map(|stage| &stage.steps) {
                if let StepAction::Env(pairs) = &step.action {
                    for (_, value) in pairs {
                        // Ignore the result: the expansion must only not panic.
                        let _ =
                            jiffy_build_spec::expand::expand(value, |name| Some(name.repeat(3)));
                    }
                }
            }
        }
    }
    assert!(
        good > 1000,
        "only {good} of the Dockerfiles are valid: the test covers too little"
    );
    let deep = format!("FROM a\nENV X={}", "${X:-".repeat(100_000));
    assert!(parse(&deep, &DockerfileOptions::default()).is_err());
    let long = format!("FROM a\nRUN {}", "\\\n x".repeat(100_000));
    assert!(parse(&long, &DockerfileOptions::default()).is_ok());
}

#[test]
fn dockerfiles_of_templates_are_parsed_without_a_warning() {
    let text = include_str!("../../../templates/code-interpreter-r-java/Dockerfile");
    assert!(read(text).warnings.is_empty());
}
