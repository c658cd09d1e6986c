//! Tests of `RUN --mount`, remote sources of `ADD`, and `ONBUILD`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use crate::dockerfiles::{all, read, refused};
use jiffy_build_spec::dockerfile::parse_triggers;
use jiffy_build_spec::spec::{CopySource, RunMount, StepAction};

#[test]
fn mounts_have_the_defaults_of_docker() {
    let text = "FROM a AS tools\nFROM b\n\
        RUN --mount=target=/src \\\n --mount=from=tools,source=/usr/bin,target=/t,rw \\\n \
        --mount=type=cache,target=/c,uid=1000 --mount=type=tmpfs,dst=/m,size=2m \\\n \
        --mount=type=secret,id=key,required --mount=type=secret,id=k,env=KEY \\\n \
        --mount='type=secret,id=l,target=/x y,mode=0440' --mount=type=ssh \\\n \
        --mount=type=ssh,id=key,required,uid=7 --mount=type=ssh,target=/s,mode=0666 make\n";
    let parsed = read(text);
    let StepAction::Run { mounts, .. } = &parsed.spec.stages[1].steps[0].action else {
        panic!("{parsed:?}");
    };
    let secret = |id: &str, target: Option<&str>, env: Option<&str>| RunMount::Secret {
        id: id.into(),
        target: target.map(str::to_owned),
        env: env.map(str::to_owned),
        required: id == "key",
        uid: 0,
        gid: 0,
        mode: if id == "l" { 0o440 } else { 0o400 },
    };
    let ssh = |id: &str, target: &str, uid, mode| RunMount::Ssh {
        id: id.into(),
        target: target.into(),
        required: id == "key",
        uid,
        gid: 0,
        mode,
    };
    let expected = [
        RunMount::Bind {
            from: CopySource::Files(String::new()),
            source: ".".into(),
            target: "/src".into(),
            writable: false,
        },
        RunMount::Bind {
            from: CopySource::Stage(0),
            source: "usr/bin".into(),
            target: "/t".into(),
            writable: true,
        },
        RunMount::Cache {
            id: "/c".into(),
            target: "/c".into(),
            read_only: false,
            uid: 1000,
            gid: 0,
            mode: 0o755,
        },
        RunMount::Tmpfs {
            target: "/m".into(),
            size_bytes: Some(2 << 20),
        },
        secret("key", Some("/run/secrets/key"), None),
        secret("k", None, Some("KEY")),
        secret("l", Some("/x y"), None),
        ssh("default", "/run/buildkit/ssh_agent.0", 0, 0o600),
        ssh("key", "/run/buildkit/ssh_agent.1", 7, 0o600),
        ssh("default", "/s", 0, 0o666),
    ];
    assert_eq!(mounts[..], expected);
    assert!(parsed.warnings.is_empty());
}

#[test]
fn files_of_other_hosts_are_added_by_separate_steps() {
    let sum = "ab".repeat(32);
    let text = format!(
        "FROM a\nADD --checksum=sha256:{sum} https://x.org/a.tgz /d/\n\
         ADD --chmod=755 --chown=1:2 https://x.org/b local https://x.org/r.git#v1:sub /e/\n"
    );
    assert_eq!(
        all(&read(&text)),
        format!(
            "- from a\n\
             copy https://x.org/a.tgz Some(\"{sum}\") [] -> /d/ 600\n\
             copy https://x.org/b None [] -> /e/ 1:2 755\n\
             copy git https://x.org/r.git#v1:sub None [] -> /e/ 1:2 755\n\
             copy context [\"local\"] -> /e/ 1:2 755 unpack"
        )
    );
}

#[test]
fn triggers_run_in_stages_based_on_theirs_once() {
    let text = "FROM a AS base\nONBUILD COPY . /app\nONBUILD ARG V=1\nRUN one\n\
                FROM base AS app\nRUN two\nFROM app\nRUN three";
    assert_eq!(
        all(&read(text)),
        "base from a\non build COPY . /app\non build ARG V=1\nrun one\n\
         app from stage 0\ncopy context [\".\"] -> /app\narg V=1\nrun two\n\
         - from stage 1\nrun three"
    );
    for (text, expected) in [
        ("FROM a\nONBUILD FROM b", "line 2: ONBUILD: FROM cannot be"),
        (
            "FROM a\nONBUILD ONBUILD RUN x",
            "ONBUILD cannot be a trigger",
        ),
        ("FROM a\nONBUILD FLY", "'FLY' is not an instruction"),
        ("FROM a\nONBUILD RUN <<E", "here-documents"),
        ("FROM a\nONBUILD", "needs arguments"),
        (
            "FROM a AS b\nONBUILD COPY x\nFROM b",
            "line 2: COPY: must be",
        ),
    ] {
        let message = refused(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn triggers_of_images_are_validated() {
    let parse = |trigger: &str| parse_triggers(&[trigger.to_owned()]);
    let steps = parse("RUN echo $HOME").unwrap();
    assert_eq!(steps[0].text, "ONBUILD RUN echo $HOME");
    assert!(matches!(steps[0].action, StepAction::Run { .. }));
    for (trigger, expected) in [
        ("COPY . /app", "needs files of the build context"),
        (
            "RUN --mount=target=/x make",
            "needs files of the build context",
        ),
        ("RUN --mount=type=secret,id=a cat", "cannot use secrets"),
        ("RUN --mount=type=ssh cat", "cannot use SSH agents"),
        ("COPY --from=busybox /a /b", "cannot use images or stages"),
        ("FROM b", "cannot use images or stages"),
        ("RUN a\nUSER root", "several lines"),
        ("ONBUILD RUN x", "cannot define a trigger"),
        ("FLY", "unknown instruction"),
    ] {
        let message = parse(trigger).unwrap_err();
        assert!(message.contains(expected), "{trigger}: {message}");
    }
    // The maximum is 100 triggers.
    assert!(parse_triggers(&vec!["RUN x".to_owned(); 101]).is_err());
}
