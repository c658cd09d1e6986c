//! Templates built of Dockerfiles, with real guests. Nothing is fetched from anywhere.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::bench::{Bench, cached};
use support::{Done, finish, jiffy, wait_for};

#[test]
fn a_dockerfile_becomes_a_template_and_builds_again_at_once() {
    let Some(bench) =
        Bench::new("builds::a_dockerfile_becomes_a_template_and_builds_again_at_once")
    else {
        return;
    };
    bench.file(
        "app/main.sh",
        "#!/bin/sh\necho \"$GREETING from $(pwd) as $(id -un)\"\n",
    );
    bench.file("secret.txt", "do not copy");
    bench.file(".dockerignore", "secret.txt\n");
    bench.file(
        "Dockerfile",
        "FROM base AS tools\n\
         USER root\n\
         RUN mkdir /out && echo built > /out/tool && sync\n\
         FROM base\n\
         ARG WHO=world\n\
         ENV GREETING=\"hello $WHO\" \\\n    OTHER=$HOME\n\
         USER root\n\
         WORKDIR /srv/app\n\
         COPY . .\n\
         COPY --from=tools --chown=1000:1000 /out/tool /usr/local/share/\n\
         RUN chmod +x app/main.sh && rm -r /usr/share/doc && touch made-here\n\
         USER user\n",
    );
    let first = bench.built("hello", &["--build-arg", "WHO=you"]);
    assert_eq!(cached(&first), 0, "{first:?}");
    let said = bench.run(
        "hello",
        "./app/main.sh; ls -A; cat /usr/local/share/tool; stat -c %u:%g /usr/local/share/tool; ls -d /usr/share/doc 2>&1 | tail -c 10",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "hello you from /srv/app as user");
    assert!(
        said.contains("made-here") && !said.contains("secret.txt"),
        "{said}"
    );
    assert!(said.contains("built\n1000:1000"), "{said}");
    assert!(
        said.contains("directory"),
        "what was removed is not there: {said}"
    );

    let began = Instant::now();
    let second = bench.built("hello", &["--build-arg", "WHO=you"]);
    let took = began.elapsed();
    assert_eq!(cached(&second), 5, "{second:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");

    // From the step that changed on.
    bench.file("app/main.sh", "#!/bin/sh\necho changed\n");
    let third = bench.built("hello", &["--build-arg", "WHO=you"]);
    assert_eq!(cached(&third), 2, "{third:?}");
    assert_eq!(bench.run("hello", "app/main.sh"), "changed");
    let history = bench.place.ok(&["template", "history", "hello"]);
    assert!(history.contains("COPY . ."), "{history}");
    assert!(bench.alive().is_empty());
}

#[test]
fn a_step_that_fails_is_named_with_its_line_and_nothing_is_left() {
    let Some(bench) =
        Bench::new("builds::a_step_that_fails_is_named_with_its_line_and_nothing_is_left")
    else {
        return;
    };
    bench.file("Dockerfile", "FROM base\nUSER root\nRUN echo one > /one\n");
    bench.built("steps", &[]);
    bench.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo two > /two\n\nRUN echo before it went; exit 7\nRUN echo never\n",
    );
    let done = bench.build("steps", &[]);
    assert_eq!(done.code, Some(1), "{done:?}");
    for word in ["line 5", "exit 7", "before it went", "exit status 7"] {
        assert!(done.stderr.contains(word), "{word}: {done:?}");
    }
    assert!(!done.stderr.contains("echo never"), "{done:?}");
    assert!(bench.alive().is_empty());
    // The template is what it was, and the step that went well is not done again.
    assert_eq!(
        bench.run("steps", "cat /one; ls /two 2>/dev/null || true"),
        "one"
    );
    bench.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo two > /two\n\nRUN echo mended\n",
    );
    assert_eq!(cached(&bench.built("steps", &[])), 1);
}

#[test]
fn files_are_copied_as_docker_copies_them() {
    let Some(bench) = Bench::new("builds::files_are_copied_as_docker_copies_them") else {
        return;
    };
    bench.file("tree/a.txt", "a");
    bench.file("tree/deep/b.txt", "b");
    bench.file("x.conf", "x");
    bench.file("y.conf", "y");
    bench.file("run.sh", "run");
    fs::set_permissions(
        bench.context.join("run.sh"),
        fs::Permissions::from_mode(0o751),
    )
    .unwrap();
    symlink("a.txt", bench.context.join("tree/link")).unwrap();
    let packed = std::process::Command::new("tar")
        .args(["-czf", "packed.tgz", "-C", "tree", "."])
        .current_dir(&bench.context)
        .status();
    assert!(packed.unwrap().success());
    bench.file(
        "Dockerfile",
        "FROM base\n\
         USER root\n\
         RUN mkdir -p /there/deep && echo old > /there/deep/b.txt && echo stays > /there/deep/c.txt\n\
         COPY tree /there\n\
         COPY *.conf /etc/mine/\n\
         COPY --chmod=600 --chown=user x.conf /etc/renamed\n\
         COPY run.sh /\n\
         ADD packed.tgz /unpacked/\n\
         COPY <<EOF /etc/written\n\
         first\n\
         second\n\
         EOF\n",
    );
    bench.built("files", &[]);
    let script = "cd /there; cat a.txt deep/b.txt deep/c.txt; readlink link; cd /etc; cat mine/x.conf mine/y.conf; \
        stat -c '%a %U' renamed; stat -c '%a %U' /run.sh; cat /unpacked/deep/b.txt; cat written";
    assert_eq!(
        bench.run("files", script),
        "abstays\na.txt\nxy600 user\n751 root\nbfirst\nsecond"
    );
    for (line, word) in [
        ("COPY nothing /", "nothing"),
        ("COPY ../outside /", "outside"),
        ("COPY x.conf y.conf /etc/renamed", "directory"),
    ] {
        bench.file("Dockerfile", &format!("FROM base\n{line}\n"));
        let refused = bench.build("refused", &[]);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.stderr.contains(word), "{refused:?}");
    }
}

#[test]
fn what_a_template_starts_listens_when_its_sandboxes_are_made() {
    let Some(bench) =
        Bench::new("builds::what_a_template_starts_listens_when_its_sandboxes_are_made")
    else {
        return;
    };
    bench.file(
        "Dockerfile",
        "FROM base\nWORKDIR /home/user/www\nRUN echo page > index.html\n",
    );
    let start = [
        "--start",
        "exec python3 -m http.server 8000",
        "--ready-port",
        "8000",
    ];
    bench.built("server", &start);
    let page = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').read().decode(), end='')\"";
    assert_eq!(bench.run("server", page), "page");

    let never = [
        "--start",
        "echo this is why; exec sleep 1000",
        "--ready-port",
        "8000",
        "--ready-timeout",
        "2s",
    ];
    let refused = bench.build("server", &never);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("this is why"), "{refused:?}");
    assert!(
        refused.stderr.contains("not ready after 2 s"),
        "{refused:?}"
    );
    assert_eq!(
        bench.run("server", page),
        "page",
        "the template is what it was"
    );

    // A port that nothing will listen on is told before anything is done.
    let ready = ["--ready-port", "8000"];
    let refused = bench.build("idle", &ready);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    let why = "nothing would listen on port 8000";
    assert!(refused.stderr.contains(why), "{refused:?}");
    assert!(!refused.stderr.contains("RUN echo page"), "{refused:?}");
    let no_command = bench.build("idle", &["--start-image-command"]);
    let why = "there is no command to start";
    assert!(no_command.stderr.contains(why), "{no_command:?}");
    // The Dockerfile's own command, which is only recorded otherwise.
    let file = "FROM base\nWORKDIR /home/user/www\nRUN echo page > index.html\n\
                ENTRYPOINT [\"python3\", \"-m\"]\nCMD [\"http.server\", \"8000\"]\n";
    bench.file("Dockerfile", file);
    bench.built(
        "image-command",
        &[&["--start-image-command"], &ready[..]].concat(),
    );
    assert_eq!(bench.run("image-command", page), "page");
    // A build on a template that starts something may await it anew.
    bench.file(
        "Dockerfile",
        "FROM image-command\nRUN echo other > index.html\n",
    );
    bench.built("upon-it", &ready);
    assert_eq!(bench.run("upon-it", page), "other");
    assert!(bench.alive().is_empty());
}

/// A Dockerfile whose second step takes for ever.
fn endless(bench: &Bench) {
    bench.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo done > /done\nRUN echo it waits; sleep 1000\n",
    );
}

/// Waits until the build is in its endless step.
fn waits(bench: &Bench) {
    wait_for("the step", || {
        let id = bench.alive().into_iter().next()?;
        let ps = bench
            .place
            .call(&["exec", &id, "--", "pgrep", "-x", "sleep"]);
        (ps.code == Some(0)).then_some(())
    });
}

fn mended(bench: &Bench) -> Done {
    bench.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo done > /done\nRUN echo it ends\n",
    );
    bench.built("long", &[])
}

#[test]
fn a_build_that_is_interrupted_leaves_nothing_but_its_finished_steps() {
    let Some(bench) =
        Bench::new("builds::a_build_that_is_interrupted_leaves_nothing_but_its_finished_steps")
    else {
        return;
    };
    endless(&bench);
    let build = bench.begin("long");
    waits(&bench);
    kill(
        Pid::from_raw(build.id().try_into().unwrap()),
        Signal::SIGINT,
    )
    .unwrap();
    let done = finish(build);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.contains("cancelled"), "{done:?}");
    assert!(bench.alive().is_empty(), "it goes on: {done:?}");
    assert_eq!(cached(&mended(&bench)), 1);
}

#[test]
fn a_daemon_that_dies_leaves_a_build_that_can_be_taken_up() {
    let Some(bench) = Bench::new("builds::a_daemon_that_dies_leaves_a_build_that_can_be_taken_up")
    else {
        return;
    };
    endless(&bench);
    let build = bench.begin("long");
    waits(&bench);
    bench.place.kill_daemon();
    let done = finish(build);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(
        bench.alive().is_empty(),
        "the next daemon ends what was left"
    );
    assert_eq!(cached(&mended(&bench)), 1);
    assert_eq!(bench.run("long", "cat /done"), "done");
    let unfinished = |path: &Path| {
        let names = fs::read_dir(path).unwrap().flatten();
        let mut names = names.map(|n| n.file_name().to_string_lossy().into_owned());
        names.any(|n| n.starts_with(".new-") || n.starts_with("build-"))
    };
    assert!(!unfinished(&bench.place.dir.path().join("templates")));
}

#[test]
fn what_makes_builds_faster_is_removed_when_it_is_asked_for() {
    let Some(bench) =
        Bench::new("builds::what_makes_builds_faster_is_removed_when_it_is_asked_for")
    else {
        return;
    };
    bench.file("file", "sent");
    bench.file("Dockerfile", "FROM base\nCOPY file /tmp/file\n");
    bench.built("cached", &[]);
    let recent = ["template", "prune", "--older-than", "1d"];
    assert_eq!(bench.place.json(&recent)["steps"], 0);
    assert_eq!(cached(&bench.built("cached", &[])), 1);
    let pruned = bench.place.json(&["template", "prune"]);
    assert_eq!(pruned["steps"], 1);
    assert_ne!(pruned["upload_bytes"], 0);
    assert_eq!(bench.run("cached", "cat /tmp/file"), "sent");
    let again = bench.built("cached", &[]);
    assert_eq!(cached(&again), 0, "{again:?}");
    // The daemon forgets by itself what was removed without it.
    bench.place.ok(&["template", "rm", "cached"]);
    assert_eq!(
        bench.place.call(&["create", "--template", "cached"]).code,
        Some(1)
    );
    bench.built("cached", &[]);
    assert_eq!(bench.run("cached", "cat /tmp/file"), "sent");
}

#[test]
fn of_builds_of_one_name_at_once_each_waits_and_one_is_the_template() {
    let Some(bench) =
        Bench::new("builds::of_builds_of_one_name_at_once_each_waits_and_one_is_the_template")
    else {
        return;
    };
    let dockerfile = |word: &str| {
        let path = bench.file(
            &format!("{word}/Dockerfile"),
            &format!("FROM base\nUSER root\nRUN echo {word} > /first && sleep 1\nRUN echo {word} > /second\n"),
        );
        path.parent().unwrap().to_owned()
    };
    // Another way to make a template, without the daemon.
    let root = bench.file("root/third", "imported");
    let root = root.parent().unwrap();
    bench.place.ok(&["ls"]);
    let begin = |args: &[&str]| {
        let args = [&["template", "build", "--name", "same"], args].concat();
        let mut command = jiffy(&args);
        command
            .env("JIFFY_HOME", bench.place.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let contexts = ["one", "two"].map(dockerfile);
    let builds = contexts.map(|context| begin(&[context.to_str().unwrap()]));
    let import = begin(&["--from-dir", root.to_str().unwrap()]);
    let done = builds.map(finish);
    for done in &done {
        assert_eq!(done.code, Some(0), "{done:?}");
    }
    let waited = |done: &&Done| {
        done.stderr
            .contains("the same template is being built already")
    };
    assert_eq!(done.iter().filter(waited).count(), 1, "{done:?}");
    let import = finish(import);
    assert_eq!(import.code, Some(0), "{import:?}");

    let known = bench.place.json(&["template", "inspect", "same"]);
    match known["images"].as_array().unwrap().len() {
        // The imported layer came last.
        1 => assert!(known["origin"]["from"].as_str().unwrap().ends_with("root")),
        _ => {
            let said = bench.run("same", "cat /first /second; ls /third 2>/dev/null; true");
            assert!(["one\none", "two\ntwo"].contains(&said.as_str()), "{said}");
        }
    }
    assert!(bench.alive().is_empty());
    let names = fs::read_dir(bench.place.dir.path().join("templates")).unwrap();
    let mut names: Vec<_> = names.map(|n| n.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["base", "same"]);
}

#[test]
fn what_a_step_writes_where_containers_are_kept_is_in_the_template_but_for_their_images() {
    let Some(bench) = Bench::new("builds::what_a_step_writes_where_containers_are_kept_*") else {
        return;
    };
    let step = |command: &str| {
        let text = format!("FROM base\nUSER root\nRUN {command}\n");
        bench.file("Dockerfile", &text);
    };
    step("mkdir /var/lib/containers/own && echo kept > /var/lib/containers/own/file");
    bench.built("kept", &[]);
    let look = "cat /var/lib/containers/own/file; stat -c %u /var/lib /var/lib/containers";
    assert_eq!(bench.run("kept", look), "kept\n0\n0");

    step("mkdir -p /var/lib/docker/overlay2/0a1b/diff");
    let refused = bench.build("refused", &[]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(
        refused.stderr.contains("/var/lib/docker/overlay2"),
        "{refused:?}"
    );
}
