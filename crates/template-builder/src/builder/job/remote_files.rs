//! Sources of `ADD` on other hosts: files of web servers, which the confined puller process
//! downloads, and Git repositories, which a sandbox of the build clones.
//!
//! The *key* of a step is a hash of its inputs, by which later builds find its result.

use super::super::copy::{self, CopyRequest, ROOT_USER, StagedFile};
use super::super::failure::BuildFailure;
use super::super::stage_config::StageConfig;
use super::super::transfer;
use super::BuildJob;
use super::stage::StageState;
use data_encoding::HEXLOWER;
use jiffy_agent_client::{AgentClient, ProcessEvent, ProcessSpec};
use jiffy_build_spec::spec::{BuildStage, GitSource, StageBase, UrlSource};
use jiffy_image::{Progress, download_file};
use jiffy_registry_pull::Cancel;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Seek};

/// Stock template whose sandbox clones repositories.
const GIT_TEMPLATE: &str = "base";
/// Directory of clones in this sandbox.
const CLONES: &str = "/tmp/jiffy-git";
/// Maximum length of the output of a Git command in bytes. A repository may have many references.
const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// Script that clones one commit: directory, URL, commit, and `keep` to retain `.git`. Servers that
/// cannot send a single commit send all branches and tags.
const CLONE: &str = r#"
set -e
export GIT_TERMINAL_PROMPT=0 GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
rm -rf "$1" && mkdir -p "$1" && cd "$1"
git init -q . && git remote add origin "$2"
git fetch -q --depth 1 origin "$3" 2>/dev/null || git fetch -q --tags origin
git -c advice.detachedHead=false checkout -q "$3"
if [ -e .gitmodules ]; then git submodule -q update --init --recursive; fi
if [ "$4" != keep ]; then find . -name .git -prune -exec rm -rf {} +; fi
"#;
/// Size of the buffer for checksums in bytes.
const CHUNK_BYTES: usize = 256 * 1024;

/// A file of a web server.
pub(super) struct RemoteFile {
    url: String,
    /// Name of the file, from the path of the URL. Empty if the path ends with a slash.
    name: String,
    /// SHA-256 of the content in hexadecimal.
    sha256: String,
    /// Downloaded content. `None` if only the checksum is known.
    content: Option<File>,
}

impl RemoteFile {
    /// Returns the part of the step's key that identifies the file.
    pub(super) fn key(&self) -> String {
        // The name determines the path if the destination is a directory.
        format!("{} {}", self.sha256, self.name)
    }

    /// Returns the name of the file for the destination `to`.
    pub(super) fn name_for(&self, to: &str) -> Result<&str, BuildFailure> {
        match self.name.as_str() {
            "" if to.ends_with('/') => Err(BuildFailure::new(format!(
                "`{}` has no file name: specify a file as the destination",
                self.url
            ))),
            "" => Ok("file"),
            name => Ok(name),
        }
    }
}

/// A commit of a Git repository.
pub(super) struct RepositoryCommit {
    url: String,
    commit: String,
    /// Directory of the repository whose contents are copied. Empty for the whole repository.
    directory: String,
    keep_git_dir: bool,
}

impl RepositoryCommit {
    /// Returns the part of the step's key that identifies the files.
    pub(super) fn key(&self) -> String {
        let Self {
            url,
            commit,
            directory,
            keep_git_dir,
        } = self;
        // The directory `.git` contains the URL.
        let kept = if *keep_git_dir { url.as_str() } else { "" };
        format!("git {commit} {directory:?} {keep_git_dir} {kept}")
    }
}

impl BuildJob {
    /// Determines the content of a file. Downloads the file if its checksum is not specified.
    pub(super) async fn remote_file(
        &self,
        source: &UrlSource,
        config: &StageConfig,
    ) -> Result<RemoteFile, BuildFailure> {
        let url = config.expand(&source.url).map_err(BuildFailure::new)?;
        let expected = source.sha256.as_ref().map(|sum| config.expand(sum));
        let expected = expected.transpose().map_err(BuildFailure::new)?;
        let path = url.split(['?', '#']).next().unwrap_or_default();
        let path = path.split_once("://").map_or(path, |(_, rest)| rest);
        let name = path
            .split_once('/')
            .and_then(|(_, path)| path.rsplit('/').next());
        let name = name
            .filter(|n| !matches!(*n, "." | ".."))
            .unwrap_or_default();
        let mut file = RemoteFile {
            name: name.to_owned(),
            sha256: String::new(),
            content: None,
            url,
        };
        if let Some(expected) = expected {
            let digits = expected.strip_prefix("sha256:").unwrap_or(&expected);
            if digits.len() != 64 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(BuildFailure::new(format!(
                    "--checksum: `{expected}` is not sha256: and 64 hexadecimal digits"
                )));
            }
            file.sha256 = digits.to_ascii_lowercase();
            return Ok(file);
        }
        let (content, sha256) = self.fetch(&file.url).await?;
        file.content = Some(content);
        file.sha256 = sha256;
        Ok(file)
    }

    /// Returns the content of a file. Verifies the checksum of a file that is downloaded now.
    pub(super) async fn download(&self, file: RemoteFile) -> Result<File, BuildFailure> {
        if let Some(content) = file.content {
            return Ok(content);
        }
        let (content, sha256) = self.fetch(&file.url).await?;
        if sha256 == file.sha256 {
            return Ok(content);
        }
        Err(BuildFailure::new(format!(
            "`{}` has the checksum sha256:{sha256}, not sha256:{}",
            file.url, file.sha256
        )))
    }

    /// Downloads a file. Returns the file and its SHA-256.
    async fn fetch(&self, url: &str) -> Result<(File, String), BuildFailure> {
        let caller = self.build.caller.clone();
        // Limits concurrent downloads, in total and per API key.
        let permit = self.inner.pulls.acquire(caller.as_deref()).await;
        let cancel = Cancel::new().map_err(|e| BuildFailure::from_error(&e))?;
        // Dropping the guard cancels the download when the build is cancelled.
        let _guard = cancel.guard();
        let mut pull = self
            .inner
            .settings
            .registries
            .pull(caller.is_some(), &cancel);
        // As for registries, only the host's owner may use plain HTTP, to servers of the host.
        let local = ["http://localhost:", "http://127.0.0.1:"];
        if caller.is_none() && local.iter().any(|prefix| url.starts_with(prefix)) {
            let authority = url.split('/').nth(2).unwrap_or_default();
            pull.registries.plain_http.push(authority.to_owned());
        }
        let (inner, log, url) = (self.inner.clone(), self.log.clone(), url.to_owned());
        let work = move || {
            let mut on_progress = |progress: Progress<'_>| log.on_progress("base", &progress);
            let limit = inner.settings.limits.bytes;
            let file = download_file(&inner.templates, &url, &pull, limit, &mut on_progress);
            drop(permit);
            let mut file = file.map_err(|e| BuildFailure::from_error(&e))?;
            let sha256 = sha256(&mut file);
            let sha256 =
                sha256.map_err(|e| BuildFailure::new(format!("cannot read {url}: {e}")))?;
            Ok((file, sha256))
        };
        let fetched = tokio::task::spawn_blocking(work).await;
        self.log.end_progress();
        fetched.map_err(|e| BuildFailure::new(e.to_string()))?
    }

    /// Determines the commit of a reference.
    pub(super) async fn repository_commit(
        &self,
        source: &GitSource,
        config: &StageConfig,
    ) -> Result<RepositoryCommit, BuildFailure> {
        let text = config.expand(&source.url).map_err(BuildFailure::new)?;
        let expected = source.commit.as_ref().map(|commit| config.expand(commit));
        let expected = expected.transpose().map_err(BuildFailure::new)?;
        let (url, fragment) = text.split_once('#').unwrap_or((&text, ""));
        let (reference, directory) = fragment.split_once(':').unwrap_or((fragment, ""));
        let is_http = url.starts_with("https://") || url.starts_with("http://");
        // Git treats a word with a leading dash as an option.
        if !is_http || reference.starts_with('-') || text.contains(char::is_control) {
            return Err(BuildFailure::new(format!(
                "`{text}` is not the URL of a Git repository: use https://host/name.git#REF:DIRECTORY"
            )));
        }
        let commit = if is_commit(reference) {
            reference.to_ascii_lowercase()
        } else {
            self.log.info(None, &format!("resolving {url}"));
            let agent = self.git_agent().await?;
            let script =
                "export GIT_TERMINAL_PROMPT=0 HOME=/nonexistent; exec git ls-remote \"$1\"";
            let references = self.git(&agent, script, &[url]).await?;
            resolve(&references, reference).ok_or_else(|| {
                BuildFailure::new(format!(
                    "{url} has no branch, tag or commit `{reference}`: a commit must have 40 digits"
                ))
            })?
        };
        if let Some(expected) = expected.filter(|expected| !expected.eq_ignore_ascii_case(&commit))
        {
            return Err(BuildFailure::new(format!(
                "--checksum: `{text}` is the commit {commit}, not {expected}"
            )));
        }
        Ok(RepositoryCommit {
            url: url.to_owned(),
            commit,
            directory: directory.to_owned(),
            keep_git_dir: source.keep_git_dir,
        })
    }

    /// Clones a commit, and copies its files into the directory `place` of another sandbox.
    pub(super) async fn copy_repository(
        &self,
        agent: &AgentClient,
        commit: &RepositoryCommit,
        place: &str,
        request: &CopyRequest,
    ) -> Result<Vec<StagedFile>, BuildFailure> {
        let from = self.git_agent().await?;
        let clone = format!("{CLONES}/{}", commit.commit);
        let kept = if commit.keep_git_dir { "keep" } else { "" };
        self.git(&from, CLONE, &[&clone, &commit.url, &commit.commit, kept])
            .await?;
        let directory = match commit.directory.trim_matches('/') {
            "" => ".".to_owned(),
            directory => directory.to_owned(),
        };
        // A repository belongs to root, like all files of `ADD`.
        let request = CopyRequest {
            owner: request.owner.clone().or(Some("0:0".to_owned())),
            ..request.clone()
        };
        let found = copy::find_sources(&from, &clone, &[directory]).await?;
        transfer::copy_between(&from, agent, &found, place, &request).await
    }

    /// Returns the agent of the sandbox that clones repositories. All clones of a build share it.
    async fn git_agent(&self) -> Result<AgentClient, BuildFailure> {
        let mut stage = self.git_stage.lock().await;
        let stage = match &mut *stage {
            Some(stage) => stage,
            none => {
                let description = BuildStage {
                    name: None,
                    from: StageBase::Template(GIT_TEMPLATE.to_owned()),
                    steps: Vec::new(),
                };
                let begun: StageState = self.begin_stage(&description, &[]).await?;
                none.insert(begun)
            }
        };
        self.agent(stage).await
    }

    /// Runs a script with Git as root. Returns its standard output. The last lines of its error
    /// output are part of the failure.
    async fn git(
        &self,
        agent: &AgentClient,
        script: &str,
        args: &[&str],
    ) -> Result<Vec<u8>, BuildFailure> {
        let words = ["-c", script, "git"]
            .into_iter()
            .chain(args.iter().copied());
        let spec = ProcessSpec {
            user: Some(ROOT_USER.to_owned()),
            cwd: Some("/".to_owned()),
            timeout: Some(self.inner.settings.step_limit),
            ..ProcessSpec::new("/bin/sh", words)
        };
        let failed = |e| BuildFailure::agent("run git", e);
        let mut process = agent.start(&spec).await.map_err(failed)?;
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        loop {
            match process.next_event().await.map_err(failed)? {
                Some(ProcessEvent::Stdout(bytes)) => output.extend_from_slice(&bytes),
                Some(ProcessEvent::Stderr(bytes)) => errors.extend_from_slice(&bytes),
                Some(ProcessEvent::End(end)) if end.exited && end.exit_code == 0 => {
                    return Ok(output);
                }
                Some(ProcessEvent::End(end)) => {
                    let text = String::from_utf8_lossy(&errors);
                    let reason = text.trim().lines().last().unwrap_or(&end.status);
                    return Err(BuildFailure::new(format!("cannot clone: {reason}")));
                }
                Some(_) => {}
                None => return Err(BuildFailure::new("the sandbox of Git terminated")),
            }
            // The server determines the length.
            if output.len() + errors.len() > MAX_OUTPUT_BYTES {
                return Err(BuildFailure::new("the output of Git is too long"));
            }
        }
    }
}

/// Returns the commit of `reference` in the output of `git ls-remote`. An empty reference is the
/// default branch. Branches have precedence over tags.
fn resolve(references: &[u8], reference: &str) -> Option<String> {
    let text = String::from_utf8_lossy(references);
    let commit = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('\t'));
        let found = lines.find(|(commit, known)| *known == name && is_commit(commit));
        found.map(|(commit, _)| commit.to_owned())
    };
    if reference.is_empty() {
        return commit("HEAD");
    }
    commit(&format!("refs/heads/{reference}"))
        // An annotated tag is an object of its own, which refers to the commit.
        .or_else(|| commit(&format!("refs/tags/{reference}^{{}}")))
        .or_else(|| commit(&format!("refs/tags/{reference}")))
        .or_else(|| commit(reference))
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Returns the SHA-256 of a file's content in hexadecimal.
fn sha256(file: &mut File) -> io::Result<String> {
    file.rewind()?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(HEXLOWER.encode(&hash.finalize())),
            read => hash.update(chunk.get(..read).unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_branches_tags_or_the_default_branch() {
        let (a, b, c) = ("a".repeat(40), "b".repeat(40), "c".repeat(40));
        let text = format!(
            "{a}\tHEAD\n{a}\trefs/heads/main\n{b}\trefs/tags/v1\n{c}\trefs/tags/v1^{{}}\nx\trefs/heads/bad\n"
        );
        let found = |reference: &str| resolve(text.as_bytes(), reference);
        assert_eq!(found(""), Some(a.clone()));
        assert_eq!(found("main"), Some(a.clone()));
        assert_eq!(found("v1"), Some(c), "the commit of an annotated tag");
        assert_eq!(found("refs/heads/main"), Some(a));
        assert_eq!(found("bad"), None);
        assert_eq!(found("none"), None);
    }
}
