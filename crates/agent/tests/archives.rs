//! Tests of the tar archives by which clients copy file trees from and to a guest. The agent runs
//! as a program of the test's host, so that the test can inspect the files.

#![allow(
    clippy::unwrap_used,
    reason = "test helpers, in which a panic is a failed test"
)]

use crate::common::{TestAgent, gzip};
use jiffy_agent_client::{ArchiveOptions, ClientError, FileReader};
use jiffy_archive::{ArchiveEntry, ArchiveEntryKind, ArchiveWriter};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Reads a whole archive.
async fn all(mut reader: FileReader) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(piece) = reader.next().await.unwrap() {
        bytes.extend_from_slice(&piece);
    }
    bytes
}

/// Extracts the archive `bytes` into a directory of the guest.
async fn put(
    agent: &TestAgent,
    directory: &str,
    options: &ArchiveOptions,
    bytes: &[u8],
) -> Result<(), ClientError> {
    let mut writer = agent.client.archive_write(directory, options);
    for piece in bytes.chunks(100_000) {
        writer.write(piece.to_vec()).await?;
    }
    writer.finish().await
}

/// Runs a command line of bash that must succeed. Returns its output.
fn shell(line: &str) -> String {
    let done = std::process::Command::new("/bin/bash")
        .args(["-ec", line])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{line}: {errors}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Returns all properties of a file tree that an archive must preserve.
fn listing(directory: &str) -> String {
    shell(&format!(
        "cd {directory}; find . -printf '%p %y %m %U %G %T@ %l %n ' -a \\( -type d -printf '\\n' -o -printf '%s\\n' \\) | sort; \
         find . -type f -print0 | sort -z | xargs -0 -r sha256sum; getfattr -Rhd -m 'user.*|security.capability' . 2>/dev/null || true"
    ))
}

/// Creates a file tree with all types of files.
fn tree(top: &str) {
    shell(&format!(
        "mkdir -p {top}/deep/er; cd {top}
        echo one >f; ln f deep/hard; ln -s f sym; ln -s /nowhere dangling; mkfifo pipe
        echo s >setuid; chown 1234:5678 setuid; chmod 4755 setuid
        chmod 0500 deep/er; mkdir sticky; chmod 1777 sticky
        printf x >$'n\\xfft utf8'; printf l >$(printf 'long%.0s' $(seq 60)); ln -s $(printf 'long%.0s' $(seq 60)) longlink
        mkdir -p $(printf 'component/%.0s' $(seq 20)); echo p >$(printf 'component/%.0s' $(seq 20))leaf
        truncate -s 60M sparse; printf middle | dd of=sparse bs=1 seek=30000000 conv=notrunc status=none
        printf end >>sparse
        truncate -s 1M hole
        touch -d '1969-12-31 23:59:58.25 UTC' old; touch -d '2100-01-01 00:00:00.123456789 UTC' new
        touch -h -d '2001-02-03' sym; touch -d '2002-03-04' deep
        setfattr -n user.note -v hello f || true; setfattr -n user.dir -v d deep || true"
    ));
}

#[tokio::test]
async fn a_tree_survives_the_round_trip_with_all_attributes() {
    let agent = TestAgent::new();
    tree(&agent.path("tree"));
    let reader = agent.client.archive_read(&[agent.path("tree")], None).await;
    let bytes = all(reader.unwrap()).await;
    assert!(bytes.len() < 2_000_000, "holes were sent: {}", bytes.len());
    put(
        &agent,
        &agent.path("back"),
        &ArchiveOptions::default(),
        &bytes,
    )
    .await
    .unwrap();
    let before = listing(&agent.path("tree"));
    assert_eq!(listing(&agent.path("back/tree")), before);
    let back = fs::metadata(agent.path("back/tree/sparse")).unwrap();
    // The file has 60 MB. Its holes occupy no space, so 2 MiB (4096 blocks of 512 bytes) suffice.
    assert!(back.blocks() < 4096, "{} blocks", back.blocks());

    // GNU tar reads the agent's archives, and the agent reads GNU tar's archives.
    fs::write(agent.path("ours.tar"), &bytes).unwrap();
    let other = agent.path("other");
    shell(&format!(
        "mkdir {other}; tar -xpf {} -C {other} --xattrs --numeric-owner",
        agent.path("ours.tar")
    ));
    assert_eq!(listing(&format!("{other}/tree")), before);
    for format in [
        "--format=pax -S",
        "--format=gnu -S",
        "--format=gnu",
        "--format=pax -S --sparse-version=0.1",
    ] {
        let theirs = agent.path("theirs.tar");
        shell(&format!(
            "tar -cf {theirs} {format} --xattrs --xattrs-include='user.*' -C {other} tree"
        ));
        let (into, bytes) = (agent.path("again"), fs::read(&theirs).unwrap());
        put(&agent, &into, &ArchiveOptions::default(), &bytes)
            .await
            .unwrap();
        let content = |top: &str| {
            shell(&format!(
                "cd {top}; find . -type f -print0 | sort -z | xargs -0 sha256sum"
            ))
        };
        assert_eq!(
            content(&format!("{into}/tree")),
            content(&format!("{other}/tree")),
            "{format}"
        );
        fs::remove_dir_all(into).unwrap();
    }
}

#[tokio::test]
async fn several_paths_files_and_links_are_archived() {
    let agent = TestAgent::new();
    fs::create_dir_all(agent.path("d/sub")).unwrap();
    fs::write(agent.path("d/sub/x"), "x").unwrap();
    fs::write(agent.path("f"), "f").unwrap();
    std::os::unix::fs::symlink("d", agent.path("link")).unwrap();
    let paths = [agent.path("f"), agent.path("link"), agent.path("d/.")];
    let bytes = all(agent.client.archive_read(&paths, None).await.unwrap()).await;
    fs::write(agent.path("a.tar"), bytes).unwrap();
    let names = shell(&format!("tar -tf {}", agent.path("a.tar")));
    let names: Vec<&str> = names.lines().map(|n| n.trim_end_matches('/')).collect();
    assert_eq!(
        names,
        [
            "f",
            "link",
            "link/sub",
            "link/sub/x",
            ".",
            "./sub",
            "./sub/x"
        ]
    );
    let missing = agent.client.archive_read(&["/no/such"], None).await;
    assert!(matches!(
        missing.err(),
        Some(ClientError::Status { status: 404, .. })
    ));
    let proc = all(agent.client.archive_read(&["/proc"], None).await.unwrap()).await;
    assert!(proc.len() < 4096, "files of /proc were read");
}

#[tokio::test]
async fn owner_and_mode_can_be_set_and_a_link_to_a_directory_remains() {
    let agent = TestAgent::new();
    let mut archive = ArchiveWriter::new(Vec::new());
    let file = ArchiveEntry::new(ArchiveEntryKind::File, *b"dir/link/f", 0o600).with_size(3);
    archive
        .add(
            &ArchiveEntry::new(ArchiveEntryKind::Directory, *b"dir", 0o700),
            b"",
        )
        .unwrap();
    archive
        .add(
            &ArchiveEntry::new(ArchiveEntryKind::Directory, *b"dir/link", 0o700),
            b"",
        )
        .unwrap();
    archive.add(&file, b"abc").unwrap();
    let bytes = archive.finish().unwrap();
    fs::create_dir_all(agent.path("into/dir")).unwrap();
    fs::create_dir_all(agent.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(agent.path("elsewhere"), agent.path("into/dir/link")).unwrap();
    let options = ArchiveOptions {
        owner: Some("nobody:12".to_owned()),
        mode: Some("0741".to_owned()),
        gzip: true,
        ..ArchiveOptions::default()
    };
    put(&agent, &agent.path("into"), &options, &gzip(&bytes))
        .await
        .unwrap();
    for path in ["elsewhere/f", "into/dir"] {
        let found = fs::metadata(agent.path(path)).unwrap();
        assert_eq!(
            (found.uid(), found.gid(), found.mode() & 0o7777),
            (65534, 12, 0o741),
            "{path}"
        );
    }
    assert_eq!(fs::read(agent.path("elsewhere/f")).unwrap(), b"abc");
}

#[tokio::test]
async fn errors_in_an_archive_name_the_entry() {
    let agent = TestAgent::new();
    fs::write(agent.path("kept"), "kept").unwrap();
    fs::create_dir_all(agent.path("into/is/directory")).unwrap();
    let one = |entry: ArchiveEntry, content: &[u8]| {
        let mut archive = ArchiveWriter::new(Vec::new());
        archive
            .add(
                &ArchiveEntry::new(ArchiveEntryKind::File, *b"first", 0o644),
                b"",
            )
            .unwrap();
        archive.add(&entry, content).unwrap();
        archive.finish().unwrap()
    };
    let plain = |path: &str| {
        one(
            ArchiveEntry::new(ArchiveEntryKind::File, path, 0o644).with_size(1),
            b"x",
        )
    };
    let link = |kind, path: &str, to: &str| {
        let mut entry = ArchiveEntry::new(kind, path, 0o777);
        entry.link = to.into();
        one(entry, b"")
    };
    let big = one(
        ArchiveEntry::new(ArchiveEntryKind::File, *b"big", 0o644).with_size(5000),
        &[1; 5000],
    );
    // The second header of the archive no longer has the right checksum.
    let mut scrambled = big.clone();
    scrambled[512] ^= 1;
    for (bytes, expected) in [
        (plain("../kept"), "'../kept' leads out"),
        (plain("a/../../kept"), "leads out"),
        (
            link(ArchiveEntryKind::HardLink, "h", "../kept"),
            "'../kept' leads out",
        ),
        (
            link(ArchiveEntryKind::HardLink, "h", "missing"),
            "'h' is a hard link to a file that does not exist",
        ),
        (
            link(ArchiveEntryKind::Symlink, "s", ""),
            "'s' is a link to nothing",
        ),
        (
            plain("is/directory"),
            "'is/directory' would replace a directory",
        ),
        (
            one(
                ArchiveEntry::new(ArchiveEntryKind::Directory, *b"first", 0o755),
                b"",
            ),
            "'first' is a directory that would replace",
        ),
        (
            plain("first/x"),
            "'first/x' has a parent that is not a directory",
        ),
        (big[..4000].to_vec(), "ends in the middle, after 'big'"),
        (big[..512].to_vec(), "ends in the middle, after 'first'"),
        (scrambled, "broken after 'first'"),
        (b"no archive at all".repeat(100), "is not a tar archive"),
        (Vec::new(), "ends in the middle"),
    ] {
        let refused = put(
            &agent,
            &agent.path("into"),
            &ArchiveOptions::default(),
            &bytes,
        )
        .await;
        match refused {
            Err(ClientError::Status {
                status: 400,
                message,
            }) => {
                assert!(message.contains(expected), "{message}");
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
    // Absolute names are relative to the target directory.
    let bytes = plain("/absolute");
    put(
        &agent,
        &agent.path("into"),
        &ArchiveOptions::default(),
        &bytes,
    )
    .await
    .unwrap();
    assert!(Path::new(&agent.path("into/absolute")).exists());
    assert_eq!(fs::read(agent.path("kept")).unwrap(), b"kept");
    let gzip = ArchiveOptions {
        gzip: true,
        ..ArchiveOptions::default()
    };
    let refused = put(&agent, &agent.path("into"), &gzip, &bytes).await;
    assert!(
        matches!(refused, Err(ClientError::Status { status: 400, .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn an_error_reaches_a_client_that_is_still_sending_an_archive() {
    let agent = TestAgent::new();
    let mut archive = ArchiveWriter::new(Vec::new());
    archive
        .add(
            &ArchiveEntry::new(ArchiveEntryKind::File, *b"../out", 0o644),
            b"",
        )
        .unwrap();
    let mut bytes = archive.finish().unwrap();
    bytes.resize(40_000_000, 7);
    let refused = put(
        &agent,
        &agent.path("into"),
        &ArchiveOptions::default(),
        &bytes,
    )
    .await;
    assert!(
        matches!(refused, Err(ClientError::Status { status: 400, .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_full_disk_and_a_broken_archive_are_distinguished() {
    let agent = TestAgent::new();
    let small = agent.path("small");
    shell(&format!(
        "mkdir {small}; mount -t tmpfs -o size=1M tmpfs {small}"
    ));
    let mut archive = ArchiveWriter::new(Vec::new());
    let entry = ArchiveEntry::new(ArchiveEntryKind::File, *b"large", 0o644).with_size(4_000_000);
    archive.add(&entry, &vec![1; 4_000_000]).unwrap();
    let refused = put(
        &agent,
        &small,
        &ArchiveOptions::default(),
        &archive.finish().unwrap(),
    )
    .await;
    shell(&format!("umount {small}"));
    match refused {
        Err(ClientError::Status {
            status: 507,
            message,
        }) => assert!(message.contains("'large'"), "{message}"),
        other => panic!("{other:?}"),
    }
}

/// `JIFFY_ARCHIVE_DIRECTORIES` sets the number of directories with 1,000 files each.
#[tokio::test]
async fn archives_of_any_size_take_little_memory() {
    let agent = TestAgent::new();
    let directories = std::env::var("JIFFY_ARCHIVE_DIRECTORIES");
    let directories: usize = directories.map_or(20, |n| n.parse().unwrap());
    shell(&format!(
        "mkdir {0}; cd {0}; head -c 100M /dev/zero | tr '\\0' x >large; \
         for i in $(seq {directories}); do mkdir d$i; (cd d$i; seq 1000 | xargs touch); done",
        agent.path("many")
    ));
    let mut reader = agent
        .client
        .archive_read(&[agent.path("many")], None)
        .await
        .unwrap();
    let mut writer = agent
        .client
        .archive_write(agent.path("copy"), &ArchiveOptions::default());
    let mut bytes = 0;
    while let Some(piece) = reader.next().await.unwrap() {
        bytes += piece.len();
        writer.write(piece).await.unwrap();
    }
    writer.finish().await.unwrap();
    // Each file has a header of 512 bytes. `find` also prints the directories and the large file.
    assert!(bytes > 100_000_000 + 512 * 1000 * directories);
    let count = shell(&format!("find {} | wc -l", agent.path("copy/many")));
    assert_eq!(count.trim(), (1001 * directories + 2).to_string());
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    let peak = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    let kib: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    // Far less than the large file of 100 MB.
    assert!(kib < 12 * 1024, "{kib} KiB resident at most");
}

#[tokio::test]
async fn a_file_that_changes_while_it_is_read_leaves_the_archive_whole() {
    let agent = TestAgent::new();
    let path = agent.path("shrinks");
    fs::write(&path, vec![b'x'; 30_000_000]).unwrap();
    let mut reader = agent.client.archive_read(&[&path], None).await.unwrap();
    let mut bytes = reader.next().await.unwrap().unwrap().to_vec();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(10)
        .unwrap();
    while let Some(piece) = reader.next().await.unwrap() {
        bytes.extend_from_slice(&piece);
    }
    put(
        &agent,
        &agent.path("back"),
        &ArchiveOptions::default(),
        &bytes,
    )
    .await
    .unwrap();
    let back = fs::File::open(agent.path("back/shrinks")).unwrap();
    assert_eq!(back.metadata().unwrap().len(), 30_000_000);
    // The missing rest of a file that has shrunk is filled with zeros.
    let mut last = [9];
    back.read_exact_at(&mut last, 29_999_999).unwrap();
    assert_eq!(last, [0]);
}

#[tokio::test]
async fn archives_need_the_token_and_names_need_not_be_text() {
    let agent = TestAgent::with(&["--token", "secret"]);
    let name = std::ffi::OsStr::from_bytes(b"n\xff");
    let directory = agent.directory.path().join(name);
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).unwrap();
    let path = directory.as_os_str().as_bytes();
    let refused = agent.client.archive_read(&[path], None).await;
    assert!(refused.is_err());
    let refused = put(&agent, "/tmp", &ArchiveOptions::default(), b"").await;
    assert!(refused.is_err());
    let client = agent.client.clone().with_token("secret");
    let bytes = all(client.archive_read(&[path], None).await.unwrap()).await;
    // A tar header ends the name with a zero byte.
    assert!(bytes.windows(3).any(|name| name == b"n\xff\0"));
    // Only sandboxes have a layer: the changes of their overlay file system. This agent has no
    // overlay.
    let missing = client.layer().await;
    assert!(matches!(
        missing.err(),
        Some(ClientError::Status { status: 404, .. })
    ));
}
