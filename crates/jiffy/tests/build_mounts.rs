//! Tests for mounts of build steps, secrets of builds, and files of other hosts.

use crate::support::build_project::{BuildProject, cached};
use crate::support::network_probe::networked;
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use nix::unistd::{Whence, lseek};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Secret that no file of the data directory may contain.
const SECRET: &str = "s3cret-kqmvzt-of-a-build";

#[jiffy_test(engine = "each", root)]
fn mounts_are_visible_to_their_command_only_and_secrets_are_stored_nowhere() {
    let project = BuildProject::new();
    let home = project.test_home.dir.path().to_path_buf();
    // Outside of the data directory, which is searched below.
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, SECRET).unwrap();
    project.file("src/input", "from the context");
    project.file(
        "Dockerfile",
        "FROM base AS tools\n\
         USER root\n\
         RUN mkdir /out && echo from-a-stage > /out/tool && sync\n\
         FROM base AS parent\n\
         ONBUILD RUN echo triggered >> /triggers\n\
         USER root\n\
         FROM parent\n\
         ONBUILD RUN echo inherited > /inherited\n\
         RUN --mount=target=/ctx,source=src --mount=from=tools,source=/out/tool,target=/t/tool \\\n\
         --mount=type=tmpfs,target=/scratch,size=1m \\\n\
         cat /ctx/input /t/tool > /seen && ! touch /ctx/new && ! dd if=/dev/zero of=/scratch/x bs=1M count=2\n\
         RUN --mount=source=src,target=/ctx,rw echo more >> /ctx/input && cat /ctx/input >> /seen\n\
         RUN --mount=type=cache,target=/cache,uid=1000,mode=0700 \\\n\
         stat -c %u:%a /cache >> /seen; echo x >> /cache/runs; wc -l < /cache/runs > /runs\n\
         RUN --mount=type=secret,id=token,required --mount=type=secret,id=token,env=TOKEN,target=/root/key,mode=0440,gid=7 \\\n\
         --mount=type=secret,id=absent \\\n\
         stat -c %u:%g:%a /run/secrets/token /root/key >> /seen; sha256sum < /root/key > /sum; \\\n\
         test \"$TOKEN\" = \"$(cat /run/secrets/token)\"; echo the token is $TOKEN; test ! -e /run/secrets/absent\n\
         RUN --mount=type=ssh,required --mount=type=ssh,id=absent,target=/absent \\\n\
         ssh-add -l && ! ssh-add -D && echo not changed && test ! -e /absent && \\\n\
         ssh-add -L > /key.pub && echo signed > /message && ssh-keygen -Y sign -n test -f /key.pub /message && \\\n\
         stat -c %a $SSH_AUTH_SOCK | grep -qx 600 && echo $(ssh-add -L | wc -l) key after the step\n\
         RUN test -z \"$SSH_AUTH_SOCK\" && test ! -e /run/buildkit && ! ssh-add -l && test ! -e /tmp/.jiffy-build/ssh*\n\
         RUN test ! -e /ctx && test ! -e /t && test ! -e /scratch && test ! -e /cache && test ! -e /root/key && test ! -e /run/secrets && test -z \"$TOKEN\" && echo clean >> /seen\n",
    );
    let given = format!("id=token,src={}", secret.display());
    let agent = SshAgent::start(outside.path());
    let ssh = format!("default={}", agent.socket.display());
    let built = project.built("mounted", &["--secret", &given, "--ssh", &ssh]);
    for word in ["ED25519", "not changed", "1 key after the step"] {
        assert!(built.stderr.contains(word), "{word}: {built:?}");
    }
    assert!(agent.has_key(), "the build must not remove the key");
    assert!(built.stderr.contains("the token is ***"), "{built:?}");
    assert!(!built.stderr.contains(SECRET), "{built:?}");
    let seen = project.run(
        "mounted",
        "cat /seen /runs /triggers; cat /sum; ls /inherited 2>/dev/null || true",
    );
    let sum = Command::new("sha256sum").arg(&secret).output().unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap()[..64].to_owned();
    assert_eq!(
        seen,
        format!(
            "from the contextfrom-a-stage\nfrom the contextmore\n1000:700\n0:0:400\n0:7:440\nclean\n1\ntriggered\n{sum}  -"
        )
    );
    let signature = project.run("mounted", "cat /message.sig");
    agent.verify(&signature, "signed\n");
    assert_eq!(files_with(&home, SECRET), Vec::<PathBuf>::new());
    // A line of the private key.
    assert_eq!(
        files_with(&home, &agent.private_line()),
        Vec::<PathBuf>::new()
    );
    // The search finds the log.
    assert!(!files_with(&home, "the token is ***").is_empty());

    // Cached results need neither mounts nor secrets. A changed step receives the content of its
    // cache mount again, also in another template. The `ONBUILD` instructions of the base template
    // run.
    // Steps: the nine `RUN` instructions of `tools`, of the `ONBUILD` of `parent`, and of the last
    // stage.
    assert_eq!(cached(&project.built("mounted", &[])), 9);
    project.file(
        "Dockerfile",
        "FROM mounted\n\
         RUN --mount=type=cache,target=/cache,uid=1000,mode=0700 echo y >> /cache/runs; wc -l < /cache/runs > /runs\n\
         RUN --mount=type=secret,id=token,required true\n\
         RUN --mount=type=ssh,required true\n",
    );
    for (options, words) in [
        (&[][..], ["line 3", "the secret `token` is required"]),
        (
            &["--secret", &given][..],
            ["line 4", "the SSH agent `default` is required"],
        ),
    ] {
        let failed = project.build("child", options);
        assert_eq!(failed.code, Some(1), "{failed:?}");
        for word in words {
            assert!(failed.stderr.contains(word), "{failed:?}");
        }
    }
    project.built("child", &["--secret", &given, "--ssh", &ssh]);
    assert_eq!(project.run("child", "cat /runs /inherited"), "2\ninherited");
    project.file("Dockerfile", "FROM child\nRUN test -e /inherited\n");
    project.built("grandchild", &[]);
    assert!(project.alive().is_empty());
}

/// An SSH agent with a key.
struct SshAgent {
    process: std::process::Child,
    socket: PathBuf,
    key: PathBuf,
}

impl SshAgent {
    /// Starts an agent with a new key in `directory`.
    fn start(directory: &Path) -> Self {
        let (socket, key) = (directory.join("agent"), directory.join("key"));
        let mut generate = Command::new("ssh-keygen");
        generate
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(&key);
        assert!(generate.status().unwrap().success());
        let mut agent = Command::new("ssh-agent");
        let process = agent.arg("-D").arg("-a").arg(&socket).spawn().unwrap();
        let this = Self {
            process,
            socket,
            key,
        };
        wait_for("the SSH agent", || this.socket.exists().then_some(()));
        let mut add = this.ssh_add();
        assert!(add.arg("-q").arg(&this.key).status().unwrap().success());
        this
    }

    fn ssh_add(&self) -> Command {
        let mut command = Command::new("ssh-add");
        command.env("SSH_AUTH_SOCK", &self.socket);
        command
    }

    fn has_key(&self) -> bool {
        self.ssh_add().arg("-l").status().unwrap().success()
    }

    /// Returns a line of the private key.
    fn private_line(&self) -> String {
        let text = fs::read_to_string(&self.key).unwrap();
        text.lines().nth(2).unwrap().to_owned()
    }

    /// Checks that the key has signed a message.
    fn verify(&self, signature: &str, message: &str) {
        let file = self.key.with_extension("sig");
        fs::write(&file, signature).unwrap();
        let public = fs::read_to_string(self.key.with_extension("pub")).unwrap();
        let signers = self.key.with_extension("signers");
        fs::write(&signers, format!("build {public}")).unwrap();
        let mut command = Command::new("ssh-keygen");
        command.args(["-Y", "verify", "-n", "test", "-I", "build", "-f"]);
        command.arg(&signers).arg("-s").arg(&file);
        let mut verify = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut input = verify.stdin.take().unwrap();
        input.write_all(message.as_bytes()).unwrap();
        drop(input);
        assert!(verify.wait().unwrap().success());
    }
}

impl Drop for SshAgent {
    fn drop(&mut self) {
        // Ignore errors: the agent may have exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the files below `directory` that contain `text`. Links are not followed, and holes are
/// not read: images of disks are sparse.
fn files_with(directory: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        // Files of a daemon may disappear at any time.
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        if metadata.is_dir() {
            found.extend(files_with(&path, text));
        } else if metadata.is_file() && fs::File::open(&path).is_ok_and(|f| contains(&f, text)) {
            found.push(path);
        }
    }
    found
}

/// Returns whether a file contains `text`. Holes are skipped.
fn contains(file: &fs::File, text: &str) -> bool {
    let mut at = 0;
    let mut chunk = vec![0; 1 << 20];
    loop {
        // The call fails at the end of the data.
        let Ok(data) = lseek(file, at, Whence::SeekData) else {
            return false;
        };
        let at_data = u64::try_from(data).unwrap();
        let read = file.read_at(&mut chunk, at_data).unwrap();
        let content = &chunk[..read];
        let mut windows = content.windows(text.len());
        if windows.any(|window| window == text.as_bytes()) {
            return true;
        }
        if read < text.len() {
            return false;
        }
        // The text may continue in the next chunk.
        at = data + i64::try_from(read - text.len() + 1).unwrap();
    }
}

/// Serves the files below `directory`. Returns the number of requests.
fn serve_files(listener: TcpListener, directory: PathBuf) -> Arc<AtomicUsize> {
    let requests = Arc::new(AtomicUsize::new(0));
    let count = requests.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let first = lines.next().unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let path = first.split(' ').nth(1).unwrap_or_default();
            let path = path.split('?').next().unwrap_or_default();
            count.fetch_add(1, Ordering::Relaxed);
            let content = fs::read(directory.join(path.trim_start_matches('/')));
            let status = if content.is_ok() {
                "200 OK"
            } else {
                "404 Not Found"
            };
            let body = content.unwrap_or_default();
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            // Ignore a disconnected client.
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.write_all(&body);
        }
    });
    requests
}

/// Runs a Git command in `directory`.
fn git(directory: &Path, args: &[&str]) -> String {
    let mut command = Command::new("git");
    command.args(["-c", "user.name=t", "-c", "user.email=t@t.example"]);
    let done = command.args(args).current_dir(directory).output().unwrap();
    assert!(done.status.success(), "{args:?}: {done:?}");
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

/// Creates a repository with a tag `v1` and a newer commit. Returns the tagged commit.
fn repository(directory: &Path) -> String {
    let work = directory.join("work");
    fs::create_dir_all(work.join("sub")).unwrap();
    git(&work, &["init", "-q", "-b", "main"]);
    for version in ["one", "two"] {
        fs::write(work.join("sub/file"), version).unwrap();
        git(&work, &["add", "."]);
        git(&work, &["commit", "-q", "-m", version]);
        if version == "one" {
            git(&work, &["tag", "-a", "-m", "v1", "v1"]);
        }
    }
    publish(directory);
    git(&work, &["rev-parse", "v1^{commit}"])
}

/// Publishes the repository for clients without a Git server.
fn publish(directory: &Path) {
    let _ = fs::remove_dir_all(directory.join("r.git"));
    git(directory, &["clone", "-q", "--bare", "work", "r.git"]);
    git(&directory.join("r.git"), &["update-server-info"]);
}

fn build(test_home: &TestHome, context: &Path, dockerfile: &str) -> crate::support::Done {
    fs::write(context.join("Dockerfile"), dockerfile).unwrap();
    let context = context.to_str().unwrap();
    test_home.call(&["template", "build", context, "--name", "added"])
}

#[jiffy_test(lab)]
fn remote_files_are_verified_and_added_again_only_after_a_change() {
    networked(&["--plain-http", "9.9.9.9:8000"], |test_home, lab| {
        test_home.own_templates();
        let files = test_home.dir.path().join("served");
        fs::create_dir(&files).unwrap();
        let commit = repository(&files);
        fs::write(files.join("data"), "first").unwrap();
        let listener = lab.in_internet(|| TcpListener::bind("9.9.9.9:8000").unwrap());
        let requests = serve_files(listener, files.clone());
        let context = test_home.dir.path().join("context");
        fs::create_dir(&context).unwrap();
        let at = "http://9.9.9.9:8000";
        // SHA-256 of `first`.
        let sum = "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e";
        let text = format!(
            "FROM base\nADD {at}/data /d/\nADD --chmod=644 --checksum=sha256:{sum} {at}/data /e\n\
             ADD {at}/r.git#v1:sub /tagged\nADD --keep-git-dir {at}/r.git /whole\n"
        );
        let built = || {
            let done = build(test_home, &context, &text);
            assert_eq!(done.code, Some(0), "{done:?}");
            cached(&done)
        };
        let output_of = |script: &str| {
            let id = test_home.ok(&["create", "--template", "added"]);
            let output = test_home.sh(&id, script);
            test_home.ok(&["kill", &id]);
            output
        };
        assert_eq!(built(), 0);
        let script = "sudo cat /d/data; stat -c ' %U:%a' /d/data; cat /e /tagged/file /whole/sub/file; ls -d /tagged/.git /whole/.git 2>/dev/null || true";
        assert_eq!(output_of(script), "first root:600\nfirstonetwo/whole/.git");
        // All four `ADD` steps are unchanged.
        assert_eq!(built(), 4);

        // A new commit of the default branch, and new content.
        fs::write(files.join("work/sub/file"), "three").unwrap();
        git(&files.join("work"), &["commit", "-qam", "three"]);
        publish(&files);
        // Only the step that adds the default branch is executed.
        assert_eq!(built(), 3);
        assert_eq!(output_of("cat /whole/sub/file"), "three");
        fs::write(files.join("data"), "second").unwrap();
        let changed = build(test_home, &context, &text);
        assert_eq!(changed.code, Some(1), "{changed:?}");
        assert!(
            changed.stderr.contains("has the checksum sha256:"),
            "{changed:?}"
        );

        // With checksums, a cached step sends no request.
        let pinned = format!("FROM base\nADD --checksum={commit} {at}/r.git#{commit} /p\n");
        assert_eq!(build(test_home, &context, &pinned).code, Some(0));
        let before = requests.load(Ordering::Relaxed);
        assert_eq!(cached(&build(test_home, &context, &pinned)), 1);
        assert_eq!(requests.load(Ordering::Relaxed), before);
        // `--plain-http` permits http:// only for port 8000.
        for (line, reason) in [
            (format!("ADD {at}/none /x"), "line 2"),
            (
                format!("ADD {at}/r.git#none /x"),
                "no branch, tag or commit `none`",
            ),
            (
                "ADD http://9.9.9.9:81/x /x".to_owned(),
                "is not an https URL",
            ),
            (
                format!("ADD --checksum={commit} {at}/r.git /x"),
                "is the commit",
            ),
        ] {
            let done = build(test_home, &context, &format!("FROM base\n{line}\n"));
            assert_eq!(done.code, Some(1), "{done:?}");
            assert!(done.stderr.contains(reason), "{line}: {done:?}");
        }
    });
}
