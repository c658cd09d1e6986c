//! Volumes of keys, and access to their files over a server.
#![allow(clippy::unwrap_used)]

use jiffy_volumes::{
    EntryKind, FileErrorKind, HostVolumes, NewAttributes, NewVolume, ServerProgram, SessionRights,
    Volume, VolumeError, VolumePath,
};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Opens the volumes of a host, whose servers are threads of this process.
fn open(home: &std::path::Path) -> HostVolumes {
    HostVolumes::open(home, &home.join("run"), ServerProgram::Thread).unwrap()
}

/// Returns the description of a volume of `bytes` bytes and 1,000 files.
fn new(name: &str, bytes: u64) -> NewVolume {
    NewVolume {
        name: name.to_owned(),
        bytes,
        files: 1000,
    }
}

/// Creates an empty volume.
fn create(host: &HostVolumes, owner: &str, new: &NewVolume) -> Result<Volume, VolumeError> {
    let created = host.prepare(owner, new)?;
    host.create(&created)?;
    Ok(created)
}

/// Parses a path of a file in a volume.
fn path(text: &str) -> VolumePath {
    VolumePath::parse(text).unwrap()
}

#[test]
fn volumes_are_found_by_their_owner_only_and_tokens_belong_to_one_volume() {
    let home = tempfile::tempdir().unwrap();
    let host = open(home.path());
    let mine = create(&host, "a", &new("data", 1 << 20)).unwrap();
    let other = create(&host, "b", &new("data", 1 << 20)).unwrap();
    let volumes = host.volumes();
    assert!(matches!(
        volumes.get("b", &mine.id),
        Err(VolumeError::Unknown(_))
    ));
    assert_eq!(volumes.get("a", "data").unwrap(), mine);
    let again = create(&host, "a", &new("data", 1 << 20));
    assert!(matches!(again, Err(VolumeError::Exists(_))));
    let token = volumes.token(&mine).unwrap();
    assert_eq!(
        volumes.authenticate(&mine.id, &token).unwrap(),
        Some(mine.clone())
    );
    assert_eq!(volumes.authenticate(&other.id, &token).unwrap(), None);
    // A part of the token is not valid.
    assert_eq!(volumes.authenticate(&mine.id, &token[1..]).unwrap(), None);
    // The log of the database contains its latest changes, among them the encrypted token.
    let database = std::fs::read(home.path().join("volumes.db-wal")).unwrap();
    let is_plain = database
        .windows(token.len())
        .any(|part| part == token.as_bytes());
    assert!(!is_plain, "the token is not encrypted");
    host.remove(&mine).unwrap();
    assert!(!home.path().join("volumes").join(&mine.id).exists());
    assert_eq!(volumes.authenticate(&mine.id, &token).unwrap(), None);
    // 1 TiB is the maximum size of a volume, and of all volumes of a key together. Rejected are a
    // larger size, a name that looks like an id, and a name with a slash.
    let sizes = [
        create(&host, "a", &new("x", 1 << 50)),
        create(&host, "a", &new("vol-x", 1 << 20)),
        create(&host, "a", &new("a/b", 1 << 20)),
    ];
    assert!(sizes.iter().all(Result::is_err));
    // This volume exhausts the total size of the key's volumes.
    create(&host, "a", &new("x", 1 << 40)).unwrap();
    let total = create(&host, "a", &new("y", 1 << 20));
    assert!(matches!(total, Err(VolumeError::Total)));
}

#[test]
fn files_are_written_listed_read_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let host = open(home.path());
    let volume = create(&host, "a", &new("data", 8 << 20)).unwrap();
    let files = || host.files(&volume).unwrap();
    let write = |at: &str, content: &[u8], force| {
        let mut upload = files().upload(&path(at), NewAttributes::default(), force)?;
        upload.write(content)?;
        upload.finish()
    };
    // Without `force`, missing directories are not created.
    let missing = write("/a/b/c", b"x", false).unwrap_err();
    assert_eq!(missing.kind(), FileErrorKind::NotFound);
    let content: Vec<u8> = (0..700_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let made = write("/a/b/c", &content, true).unwrap();
    assert_eq!((made.path.as_str(), made.name()), ("/a/b/c", "c"));
    assert_eq!((made.attributes.size, made.permissions()), (700_000, 0o644));
    let mut reader = files();
    let found = reader.open(&path("a/b/c")).unwrap();
    let mut read = Vec::new();
    loop {
        let part = reader
            .read(&path("a/b/c"), found.node, read.len() as u64)
            .unwrap();
        if part.is_empty() {
            break;
        }
        read.extend_from_slice(part);
    }
    assert_eq!(read, content);
    // An upload that does not finish changes nothing, and its space is released.
    let mut upload = files()
        .upload(&path("/a/b/c"), NewAttributes::default(), false)
        .unwrap();
    upload.write(b"partial").unwrap();
    drop(upload);
    assert_eq!(
        files().stat(&path("/a/b/c")).unwrap().attributes.size,
        700_000
    );
    let set = NewAttributes {
        mode: Some(0o600),
        uid: Some(5),
        gid: None,
    };
    files().set(&path("/a/b/c"), set).unwrap();
    // A replaced file passes on its owner and permissions.
    let replaced = write("/a/b/c", b"new", false).unwrap();
    assert_eq!(
        (replaced.permissions(), replaced.attributes.uid),
        (0o600, 5)
    );
    let listed = files().list(&path("/"), 3).unwrap();
    let listed: Vec<(&str, EntryKind)> = listed
        .iter()
        .map(|entry| (entry.path.as_str(), entry.kind()))
        .collect();
    let directory = EntryKind::Directory;
    assert_eq!(
        listed,
        [
            ("/a", directory),
            ("/a/b", directory),
            ("/a/b/c", EntryKind::File)
        ]
    );
    // More entries than the server reads from its catalog at once (128).
    for number in 0..600 {
        let name = format!("/a/many/{number}");
        write(&name, b"", true).unwrap();
    }
    assert_eq!(files().list(&path("/a/many"), 1).unwrap().len(), 600);
    files().remove(&path("/a")).unwrap();
    assert!(files().list(&path("/"), 9).unwrap().is_empty());
    // The volume has 8 MiB.
    let full = write("/big", &vec![0; 9 << 20], false).unwrap_err();
    assert_eq!(full.kind(), FileErrorKind::Full);
    for bad in ["/../x", "a/../b", "a\0b", &"x".repeat(300)] {
        assert!(VolumePath::parse(bad).is_err(), "{bad:?}");
    }
}

/// Rights of a guest that may write.
const GUEST: SessionRights = SessionRights {
    is_read_only: false,
    is_daemon: false,
};

/// Starts a session of a guest. Returns the stream of the client.
fn guest(host: &HostVolumes, volume: &jiffy_volumes::Volume, mount: u64) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let servers = host.servers();
    let opened = servers.open_session(volume, theirs.as_fd(), GUEST, Some(mount));
    opened.unwrap();
    ours
}

/// Sends a STATFS. Returns whether it is answered.
fn is_served(mut stream: &UnixStream) -> bool {
    // The request is a `struct fuse_in_header`: the length of the message, the opcode STATFS, and
    // node 1.
    let mut request = vec![0; 40];
    request[0] = 40;
    request[4] = 17;
    request[16] = 1;
    let mut reply = [0; 96];
    stream.write_all(&request).is_ok() && stream.read_exact(&mut reply).is_ok()
}

#[test]
fn a_session_ends_with_invalid_messages_or_a_later_session_of_its_mount_only() {
    let home = tempfile::tempdir().unwrap();
    let host = open(home.path());
    let volume = create(&host, "a", &new("data", 1 << 20)).unwrap();
    let (first, other) = (guest(&host, &volume, 1), guest(&host, &volume, 2));
    assert!(is_served(&first) && is_served(&other));
    let second = guest(&host, &volume, 1);
    assert!(!is_served(&first) && is_served(&second) && is_served(&other));
    // The lengths in the headers are too small, too large, and larger than the message.
    for message in [vec![0; 64], vec![255; 64], vec![41, 0, 0, 0, 1]] {
        let mut hostile = guest(&host, &volume, 3);
        hostile.write_all(&message).unwrap();
        hostile.shutdown(Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        // The connection ends, with or without an error.
        let _ = hostile.read_to_end(&mut rest);
        // At most the header of a reply (16 bytes) arrives.
        assert!(rest.len() <= 16, "{rest:?}");
    }
    // A length that is valid, and a body of which the client never sends the rest.
    let mut slow = guest(&host, &volume, 4);
    slow.write_all(&[0, 0, 4, 0]).unwrap();
    assert!(is_served(&second) && is_served(&other));
    let mut watch = host.servers().watch(&volume).unwrap();
    assert_eq!(host.servers().watch(&volume).unwrap().server, watch.server);
    host.remove(&volume).unwrap();
    // The server has ended together with its volume, which closes the connection.
    assert_eq!(watch.connection.read(&mut [0]).unwrap(), 0);
}
