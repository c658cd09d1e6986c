//! Tests for templates built from Dockerfiles, with real guests and without external downloads.

use crate::support::build_project::{BuildProject, cached};
use crate::support::{Done, finish, jiffy, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[jiffy_test(root)]
fn a_dockerfile_becomes_a_template_and_is_rebuilt_from_the_cache() {
    let project = BuildProject::new();
    project.file(
        "app/main.sh",
        "#!/bin/sh\necho \"$GREETING from $(pwd) as $(id -un)\"\n",
    );
    project.file("secret.txt", "do not copy");
    project.file(".dockerignore", "secret.txt\n");
    project.file(
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
    let first = project.built("hello", &["--build-arg", "WHO=you"]);
    assert_eq!(cached(&first), 0, "{first:?}");
    let output = project.run(
        "hello",
        "./app/main.sh; ls -A; cat /usr/local/share/tool; stat -c %u:%g /usr/local/share/tool; ls -d /usr/share/doc 2>&1 | tail -c 10",
    );
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], "hello you from /srv/app as user");
    assert!(
        output.contains("made-here") && !output.contains("secret.txt"),
        "{output}"
    );
    assert!(output.contains("built\n1000:1000"), "{output}");
    assert!(
        output.contains("directory"),
        "removed files are missing: {output}"
    );

    let began = Instant::now();
    let second = project.built("hello", &["--build-arg", "WHO=you"]);
    let took = began.elapsed();
    // The instructions RUN, WORKDIR, COPY, COPY and RUN are steps.
    assert_eq!(cached(&second), 5, "{second:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");

    // Only the changed step and all following steps run.
    project.file("app/main.sh", "#!/bin/sh\necho changed\n");
    let third = project.built("hello", &["--build-arg", "WHO=you"]);
    assert_eq!(cached(&third), 2, "{third:?}");
    assert_eq!(project.run("hello", "app/main.sh"), "changed");
    let history = project.test_home.ok(&["template", "history", "hello"]);
    assert!(history.contains("COPY . ."), "{history}");
    assert!(project.alive().is_empty());
}

#[jiffy_test(root)]
fn a_failing_step_is_reported_with_its_line_and_leaves_no_files() {
    let project = BuildProject::new();
    project.file("Dockerfile", "FROM base\nUSER root\nRUN echo one > /one\n");
    project.built("steps", &[]);
    project.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo two > /two\n\nRUN echo before it went; exit 7\nRUN echo never\n",
    );
    let done = project.build("steps", &[]);
    assert_eq!(done.code, Some(1), "{done:?}");
    for word in ["line 5", "exit 7", "before it went", "exit status 7"] {
        assert!(done.stderr.contains(word), "{word}: {done:?}");
    }
    assert!(!done.stderr.contains("echo never"), "{done:?}");
    assert!(project.alive().is_empty());
    // The template is unchanged, and the successful step is not repeated.
    assert_eq!(
        project.run("steps", "cat /one; ls /two 2>/dev/null || true"),
        "one"
    );
    project.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo two > /two\n\nRUN echo mended\n",
    );
    assert_eq!(cached(&project.built("steps", &[])), 1);
}

#[jiffy_test(root)]
fn files_are_copied_as_docker_copies_them() {
    let project = BuildProject::new();
    project.file("tree/a.txt", "a");
    project.file("tree/deep/b.txt", "b");
    project.file("x.conf", "x");
    project.file("y.conf", "y");
    project.file("run.sh", "run");
    fs::set_permissions(
        project.context.join("run.sh"),
        fs::Permissions::from_mode(0o751),
    )
    .unwrap();
    symlink("a.txt", project.context.join("tree/link")).unwrap();
    let packed = std::process::Command::new("tar")
        .args(["-czf", "packed.tgz", "-C", "tree", "."])
        .current_dir(&project.context)
        .status();
    assert!(packed.unwrap().success());
    project.file(
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
    project.built("files", &[]);
    let script = "cd /there; cat a.txt deep/b.txt deep/c.txt; readlink link; cd /etc; cat mine/x.conf mine/y.conf; \
        stat -c '%a %U' renamed; stat -c '%a %U' /run.sh; cat /unpacked/deep/b.txt; cat written";
    assert_eq!(
        project.run("files", script),
        "abstays\na.txt\nxy600 user\n751 root\nbfirst\nsecond"
    );
    for (line, word) in [
        ("COPY nothing /", "nothing"),
        ("COPY ../outside /", "outside"),
        ("COPY x.conf y.conf /etc/renamed", "directory"),
    ] {
        project.file("Dockerfile", &format!("FROM base\n{line}\n"));
        let refused = project.build("refused", &[]);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.stderr.contains(word), "{refused:?}");
    }
}

#[jiffy_test(root)]
fn start_commands_listen_when_sandboxes_are_created() {
    let project = BuildProject::new();
    project.file(
        "Dockerfile",
        "FROM base\nWORKDIR /home/user/www\nRUN echo page > index.html\n",
    );
    let start = [
        "--start",
        "exec python3 -m http.server 8000",
        "--ready-port",
        "8000",
    ];
    project.built("server", &start);
    let page = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').read().decode(), end='')\"";
    assert_eq!(project.run("server", page), "page");

    let never = [
        "--start",
        "echo this is why; exec sleep 1000",
        "--ready-port",
        "8000",
        "--ready-timeout",
        "2s",
    ];
    let refused = project.build("server", &never);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("this is why"), "{refused:?}");
    assert!(
        refused.stderr.contains("not ready after 2 s"),
        "{refused:?}"
    );
    assert_eq!(
        project.run("server", page),
        "page",
        "the template is unchanged"
    );

    // A port on which no process will listen is reported before the build starts.
    let ready = ["--ready-port", "8000"];
    let refused = project.build("idle", &ready);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    let why = "waits for port 8000";
    assert!(refused.stderr.contains(why), "{refused:?}");
    assert!(!refused.stderr.contains("RUN echo page"), "{refused:?}");
    let no_command = project.build("idle", &["--start-image-command"]);
    let why = "no command to start";
    assert!(no_command.stderr.contains(why), "{no_command:?}");
    // The Dockerfile's own command, which is otherwise only recorded.
    let file = "FROM base\nWORKDIR /home/user/www\nRUN echo page > index.html\n\
                ENTRYPOINT [\"python3\", \"-m\"]\nCMD [\"http.server\", \"8000\"]\n";
    project.file("Dockerfile", file);
    project.built(
        "image-command",
        &[&["--start-image-command"], &ready[..]].concat(),
    );
    assert_eq!(project.run("image-command", page), "page");
    // A build on a template with a start command may wait for it again.
    project.file(
        "Dockerfile",
        "FROM image-command\nRUN echo other > index.html\n",
    );
    project.built("upon-it", &ready);
    assert_eq!(project.run("upon-it", page), "other");
    assert!(project.alive().is_empty());
}

/// Writes a Dockerfile whose second step never ends.
fn write_endless_dockerfile(project: &BuildProject) {
    project.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo done > /done\nRUN echo it waits; sleep 1000\n",
    );
}

/// Waits until the build runs its endless step.
fn wait_for_endless_step(project: &BuildProject) {
    wait_for("the step", || {
        let id = project.alive().into_iter().next()?;
        let ps = project
            .test_home
            .call(&["exec", &id, "--", "pgrep", "-x", "sleep"]);
        (ps.code == Some(0)).then_some(())
    });
}

/// Builds the template again with a last step that ends.
fn rebuild_without_endless_step(project: &BuildProject) -> Done {
    project.file(
        "Dockerfile",
        "FROM base\nUSER root\nRUN echo done > /done\nRUN echo it ends\n",
    );
    project.built("long", &[])
}

#[jiffy_test(root)]
fn an_interrupted_build_leaves_only_its_completed_steps() {
    let project = BuildProject::new();
    write_endless_dockerfile(&project);
    let build = project.begin("long");
    wait_for_endless_step(&project);
    kill(
        Pid::from_raw(build.id().try_into().unwrap()),
        Signal::SIGINT,
    )
    .unwrap();
    let done = finish(build);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.contains("cancelled"), "{done:?}");
    assert!(project.alive().is_empty(), "it is still running: {done:?}");
    assert_eq!(cached(&rebuild_without_endless_step(&project)), 1);
}

#[jiffy_test(root)]
fn a_build_can_be_resumed_after_a_daemon_crash() {
    let project = BuildProject::new();
    write_endless_dockerfile(&project);
    let build = project.begin("long");
    wait_for_endless_step(&project);
    project.test_home.kill_daemon();
    let done = finish(build);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(
        project.alive().is_empty(),
        "the next daemon removes the remaining sandbox"
    );
    assert_eq!(cached(&rebuild_without_endless_step(&project)), 1);
    assert_eq!(project.run("long", "cat /done"), "done");
    let unfinished = |path: &Path| {
        let names = fs::read_dir(path).unwrap().flatten();
        let mut names = names.map(|n| n.file_name().to_string_lossy().into_owned());
        names.any(|n| n.starts_with(".new-") || n.starts_with("build-"))
    };
    assert!(!unfinished(&project.test_home.dir.path().join("templates")));
}

#[jiffy_test(root)]
fn the_build_cache_is_removed_on_request() {
    let project = BuildProject::new();
    project.file("file", "sent");
    project.file("Dockerfile", "FROM base\nCOPY file /tmp/file\n");
    project.built("cached", &[]);
    let recent = ["template", "prune", "--older-than", "1d"];
    assert_eq!(project.test_home.json(&recent)["steps"], 0);
    assert_eq!(cached(&project.built("cached", &[])), 1);
    let pruned = project.test_home.json(&["template", "prune"]);
    assert_eq!(pruned["steps"], 1);
    assert_ne!(pruned["upload_bytes"], 0);
    assert_eq!(project.run("cached", "cat /tmp/file"), "sent");
    let again = project.built("cached", &[]);
    assert_eq!(cached(&again), 0, "{again:?}");
    // The daemon detects removals that happened without it.
    project.test_home.ok(&["template", "rm", "cached"]);
    assert_eq!(
        project
            .test_home
            .call(&["create", "--template", "cached"])
            .code,
        Some(1)
    );
    project.built("cached", &[]);
    assert_eq!(project.run("cached", "cat /tmp/file"), "sent");
}

#[jiffy_test(root)]
fn concurrent_builds_of_one_name_run_in_turn_and_one_is_the_template() {
    let project = BuildProject::new();
    let dockerfile = |word: &str| {
        let path = project.file(
            &format!("{word}/Dockerfile"),
            &format!("FROM base\nUSER root\nRUN echo {word} > /first && sleep 1\nRUN echo {word} > /second\n"),
        );
        path.parent().unwrap().to_owned()
    };
    // Another way to create a template, without the daemon.
    let root = project.file("root/third", "imported");
    let root = root.parent().unwrap();
    // This starts the daemon.
    project.test_home.ok(&["ls"]);
    let begin = |args: &[&str]| {
        let args = [&["template", "build", "--name", "same"], args].concat();
        let mut command = jiffy(&args);
        command
            .env("JIFFY_HOME", project.test_home.dir.path())
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
            .contains("waiting for another build of the same template")
    };
    assert_eq!(done.iter().filter(waited).count(), 1, "{done:?}");
    let import = finish(import);
    assert_eq!(import.code, Some(0), "{import:?}");

    let details = project.test_home.json(&["template", "inspect", "same"]);
    match details["images"].as_array().unwrap().len() {
        // The imported template has one image and was created last. A built one has several.
        1 => assert!(
            details["origin"]["from"]
                .as_str()
                .unwrap()
                .ends_with("root")
        ),
        _ => {
            let output = project.run("same", "cat /first /second; ls /third 2>/dev/null; true");
            assert!(
                ["one\none", "two\ntwo"].contains(&output.as_str()),
                "{output}"
            );
        }
    }
    assert!(project.alive().is_empty());
    let names = fs::read_dir(project.test_home.dir.path().join("templates")).unwrap();
    let mut names: Vec<_> = names.map(|n| n.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["base", "same"]);
}

#[jiffy_test(root)]
fn container_storage_of_a_step_is_in_the_template_except_for_images() {
    let project = BuildProject::new();
    let step = |command: &str| {
        let text = format!("FROM base\nUSER root\nRUN {command}\n");
        project.file("Dockerfile", &text);
    };
    step("mkdir /var/lib/containers/own && echo kept > /var/lib/containers/own/file");
    project.built("kept", &[]);
    let look = "cat /var/lib/containers/own/file; stat -c %u /var/lib /var/lib/containers";
    assert_eq!(project.run("kept", look), "kept\n0\n0");

    step("mkdir -p /var/lib/docker/overlay2/0a1b/diff");
    let refused = project.build("refused", &[]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(
        refused.stderr.contains("/var/lib/docker/overlay2"),
        "{refused:?}"
    );
}
