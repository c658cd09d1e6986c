//! Requests of clients, valid and hostile. A client is the kernel of a guest, which mounts the
//! volume and sends FUSE messages. A *node* is a file or directory of the volume, by its number.
#![allow(clippy::unwrap_used)]

use jiffy_volume_server::abi::{Fields, FieldsMut, begin_request, finish, opcode};
use jiffy_volume_server::{Quota, ROOT, Session, SessionRights, Volume};
use nix::libc;
use std::sync::Arc;

/// Session of a client of a new volume.
struct Client {
    session: Session,
    _home: tempfile::TempDir,
    volume: Arc<Volume>,
}

/// Rights of a guest that may write.
const RIGHTS: SessionRights = SessionRights {
    is_read_only: false,
    is_daemon: false,
};

impl Client {
    /// Opens a session of a client with a new volume.
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let quota = Quota {
            bytes: 1 << 24,
            nodes: 1000,
        };
        let volume = Arc::new(Volume::open(home.path(), quota).unwrap());
        Self {
            session: Session::new(volume.clone(), RIGHTS),
            _home: home,
            volume,
        }
    }

    /// Opens a session of another client of the volume.
    fn second(&self, rights: SessionRights) -> Session {
        Session::new(self.volume.clone(), rights)
    }

    /// Sends a request in the client's session.
    fn call(&self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        call(&self.session, opcode, node, body)
    }
}

/// Number of each request, which its reply repeats.
const UNIQUE: u64 = 42;

/// Sends a request of user and group 1000. Returns the body of the reply, or the number of the
/// error.
fn call(session: &Session, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    begin_request(&mut request, opcode, UNIQUE, node, (1000, 1000));
    request.extend_from_slice(body);
    finish(&mut request);
    if !session.answer(&request, &mut reply).unwrap() {
        return Ok(Vec::new());
    }
    let mut fields = Fields(&reply);
    assert_eq!(fields.u32().unwrap() as usize, reply.len());
    let error = fields.u32().unwrap().cast_signed();
    assert_eq!(fields.u64().unwrap(), UNIQUE);
    if error == 0 {
        Ok(fields.0.to_vec())
    } else {
        Err(-error)
    }
}

/// Returns the body of a CREATE request (`struct fuse_create_in` and the name).
fn create(name: &str) -> Vec<u8> {
    let mut body = Vec::new();
    body.put_u32(0);
    body.put_u32(libc::S_IFREG | 0o640);
    body.put_u64(0);
    body.put_name(name.as_bytes());
    body
}

/// Returns the body of a WRITE request (`struct fuse_write_in` and the data).
fn write(offset: u64, flags: i32, data: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    body.put_u64(0);
    body.put_u64(offset);
    body.put_u32(u32::try_from(data.len()).unwrap());
    body.put_u32(0);
    body.put_u64(0);
    body.put_u32(flags.cast_unsigned());
    body.put_u32(0);
    body.extend_from_slice(data);
    body
}

/// Returns the body of a READ request (`struct fuse_read_in`).
fn read(offset: u64, size: u32) -> Vec<u8> {
    let mut body = Vec::new();
    body.put_u64(0);
    body.put_u64(offset);
    body.put_u32(size);
    body.resize(40, 0);
    body
}

#[test]
fn a_removed_open_file_is_readable_until_its_client_forgets_it() {
    let client = Client::new();
    let made = client.call(opcode::CREATE, ROOT, &create("a")).unwrap();
    let node = Fields(&made).entry().unwrap().node;
    client
        .call(opcode::WRITE, node, &write(0, 0, b"one"))
        .unwrap();
    client
        .call(opcode::WRITE, node, &write(0, libc::O_APPEND, b"two"))
        .unwrap();
    // Another client removes the file.
    let other = client.second(RIGHTS);
    call(&other, opcode::UNLINK, ROOT, b"a\0").unwrap();
    assert_eq!(
        client.call(opcode::READ, node, &read(0, 100)).unwrap(),
        b"onetwo"
    );
    // The client has received the node once, and forgets one reference.
    client
        .call(opcode::FORGET, node, &1_u64.to_le_bytes())
        .unwrap();
    let gone = client.call(opcode::READ, node, &read(0, 100));
    assert_eq!(gone, Err(libc::ESTALE));
    assert_eq!(client.volume.space().bytes, 0);
    // The root remains.
    assert_eq!(client.volume.space().nodes, 1);
}

#[test]
fn a_read_only_session_changes_nothing_and_a_guest_has_no_requests_of_the_daemon() {
    let client = Client::new();
    let made = client.call(opcode::CREATE, ROOT, &create("a")).unwrap();
    let node = Fields(&made).entry().unwrap().node;
    let reader = client.second(SessionRights {
        is_read_only: true,
        ..RIGHTS
    });
    // A body of zeroes has the length of the structure of its request.
    for (opcode, node, body) in [
        (opcode::CREATE, ROOT, create("b")),
        (opcode::UNLINK, ROOT, b"a\0".to_vec()),
        (opcode::WRITE, node, write(0, 0, b"x")),
        (opcode::SETATTR, node, vec![0; 88]),
        (opcode::TMPFILE, ROOT, create("")),
        (opcode::FALLOCATE, node, vec![0; 32]),
    ] {
        assert_eq!(
            call(&reader, opcode, node, &body),
            Err(libc::EROFS),
            "{opcode}"
        );
    }
    call(&reader, opcode::LOOKUP, ROOT, b"a\0").unwrap();
    // REPLACE is for the daemon only. OPEN is not supported, so that the kernel omits it.
    let mut body = node.to_le_bytes().to_vec();
    body.put_name(b"b");
    assert_eq!(client.call(opcode::REPLACE, ROOT, &body), Err(libc::ENOSYS));
    assert_eq!(client.call(opcode::OPEN, node, &[0; 8]), Err(libc::ENOSYS));
}

#[test]
fn malformed_requests_and_guessed_nodes_are_errors() {
    let client = Client::new();
    client.call(opcode::CREATE, ROOT, &create("a")).unwrap();
    // A request that is too short, and a length that does not match.
    let mut reply = Vec::new();
    client.session.answer(&[0; 12], &mut reply).unwrap_err();
    client.session.answer(&[255; 64], &mut reply).unwrap_err();
    for node in [0, 3, u64::MAX, 1 << 63, 1 << 40] {
        let stale = client.call(opcode::GETATTR, node, &[0; 16]);
        assert_eq!(stale, Err(libc::ESTALE), "{node}");
    }
    // Every operation with bodies of up to 95 equal bytes.
    for opcode in (0..=60).chain([opcode::REPLACE, u32::MAX]) {
        for byte in [0, 1, 255] {
            for length in 0..96 {
                let _ = client.call(opcode, ROOT, &vec![byte; length]);
            }
        }
    }
    client.call(opcode::LOOKUP, ROOT, b"a\0").unwrap();
}

#[test]
fn a_guest_that_names_many_unknown_nodes_uses_no_memory_of_the_host() {
    let client = Client::new();
    let made = client.call(opcode::CREATE, ROOT, &create("a")).unwrap();
    let node = Fields(&made).entry().unwrap().node;
    for unknown in (node + 1)..(node + 1000) {
        for (opcode, body) in [
            (opcode::READ, read(0, 1)),
            (opcode::WRITE, write(0, 0, b"x")),
            (opcode::SETATTR, vec![0; 88]),
            (opcode::FALLOCATE, vec![0; 32]),
        ] {
            let stale = client.call(opcode, unknown, &body);
            assert_eq!(stale, Err(libc::ESTALE), "{opcode}");
        }
    }
    assert_eq!(client.session.used_nodes(), 1);
    // A session that ends releases its nodes.
    let reader = client.second(RIGHTS);
    call(&reader, opcode::READ, node, &read(0, 1)).unwrap();
    assert_eq!(reader.used_nodes(), 1);
    call(&reader, opcode::UNLINK, ROOT, b"a\0").unwrap();
    drop(reader);
    call(&client.session, opcode::READ, node, &read(0, 1)).unwrap();
    let forgotten = 1_u64.to_le_bytes();
    client.call(opcode::FORGET, node, &forgotten).unwrap();
    assert_eq!(client.volume.space().nodes, 1);
}
