//! Advisory locks between the clients of a volume.
//!
//! Each request of a client has an id, which a late reply repeats. The kernel chooses even ids for
//! requests, and odd ids for interrupts.
#![allow(clippy::unwrap_used)]

use jiffy_proto::file_lock::RECLAIM;
use jiffy_volume_server::abi::{Fields, FieldsMut, begin_request, finish, opcode};
use jiffy_volume_server::{LateReply, Quota, ROOT, Session, SessionRights, Volume};
use nix::libc;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Flag of a lock of `flock`. Other locks are locks of `fcntl`.
const FLOCK: u32 = 1;
/// End of a range without an end.
const END: u64 = i64::MAX.cast_unsigned();
const READ: i32 = libc::F_RDLCK;
const WRITE: i32 = libc::F_WRLCK;
const UNLOCK: i32 = libc::F_UNLCK;

/// Session of a client that uses one file.
struct Client {
    session: Session,
    late: Receiver<LateReply>,
    node: u64,
}

/// A request for a lock: owner, range, kind and flags.
#[derive(Clone, Copy)]
struct Lock(u64, (u64, u64), i32, u32);

/// Opens a volume in a directory.
fn open(home: &Path) -> Arc<Volume> {
    let quota = Quota {
        bytes: 1 << 24,
        nodes: 1000,
    };
    Arc::new(Volume::open(home, quota).unwrap())
}

impl Client {
    /// Opens a session. Finds the file `file`, or creates the file.
    fn new(volume: &Arc<Volume>, is_read_only: bool) -> Self {
        let rights = SessionRights {
            is_read_only,
            is_daemon: false,
        };
        let session = Session::new(volume.clone(), rights);
        let late = session.late_replies().unwrap();
        let mut client = Self {
            session,
            late,
            node: ROOT,
        };
        client.node = match client.call(1, opcode::LOOKUP, b"file\0") {
            Some(Ok(found)) => Fields(&found).entry().unwrap().node,
            _ => {
                let mut body = Vec::new();
                body.put_u32(0);
                body.put_u32(libc::S_IFREG | 0o640);
                body.put_u64(0);
                body.put_name(b"file");
                let made = client.call(1, opcode::CREATE, &body).unwrap().unwrap();
                Fields(&made).entry().unwrap().node
            }
        };
        client
    }

    /// Returns the reply. `None` if it follows later, or if the request has none.
    fn call(&self, id: u64, opcode: u32, body: &[u8]) -> Option<Result<Vec<u8>, i32>> {
        let (mut request, mut reply) = (Vec::new(), Vec::new());
        begin_request(&mut request, opcode, id, self.node, (0, 0));
        request.extend_from_slice(body);
        finish(&mut request);
        if !self.session.answer(&request, &mut reply).unwrap() {
            return None;
        }
        let error = i32::from_le_bytes(reply[4..8].try_into().unwrap());
        Some(match error {
            0 => Ok(reply[16..].to_vec()),
            error => Err(-error),
        })
    }

    /// Sends a request for a lock (`struct fuse_lk_in`). `None` if the reply follows later.
    fn request(&self, id: u64, opcode: u32, lock: Lock) -> Option<Result<Vec<u8>, i32>> {
        let Lock(owner, (start, end), kind, flags) = lock;
        let mut body = Vec::new();
        body.put_u64(0);
        body.put_u64(owner);
        body.put_u64(start);
        body.put_u64(end);
        body.put_u32(kind.cast_unsigned());
        body.put_u32(7); // pid
        body.put_u32(flags);
        body.put_u32(0);
        self.call(id, opcode, &body)
    }

    /// Requests a lock without waiting.
    fn lock(&self, lock: Lock) -> Result<(), i32> {
        self.request(2, opcode::SETLK, lock).unwrap().map(|_| ())
    }

    /// Requests a lock. Returns false if the request waits.
    fn wait(&self, id: u64, lock: Lock) -> Result<bool, i32> {
        match self.request(id, opcode::SETLKW, lock) {
            None => Ok(false),
            Some(reply) => reply.map(|_| true),
        }
    }

    /// Waits for a late reply. Returns the id of its request, and its error number.
    fn late(&self) -> (u64, i32) {
        let reply = self.late.recv_timeout(Duration::from_secs(20)).unwrap();
        (reply.id, reply.error)
    }

    /// Sends FLUSH or RELEASE for an owner: a process has closed a descriptor, or an open file.
    fn close(&self, opcode: u32, owner: u64) {
        let mut body = vec![0; 12];
        // Ends the flock of the owner, if this is a RELEASE.
        body.put_u32(2);
        body.put_u64(owner);
        self.call(3, opcode, &body).unwrap().unwrap();
    }
}

#[test]
fn locks_exclude_other_clients_until_they_are_unlocked_or_their_owner_or_client_ends() {
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    let (a, b) = (Client::new(&volume, false), Client::new(&volume, false));
    let reader = Client::new(&volume, true);
    for flags in [0, FLOCK] {
        let whole = |owner, kind| Lock(owner, (0, END), kind, flags);
        // Owners with the same number in different clients are different owners.
        a.lock(whole(1, WRITE)).unwrap();
        assert_eq!(b.lock(whole(1, READ)), Err(libc::EAGAIN));
        assert_eq!(a.lock(whole(2, READ)), Err(libc::EAGAIN));
        // Shared locks do not exclude each other.
        a.lock(whole(1, READ)).unwrap();
        b.lock(whole(1, READ)).unwrap();
        reader.lock(whole(1, READ)).unwrap();
        // A read-only client may not have exclusive locks.
        assert_eq!(reader.lock(whole(1, WRITE)), Err(libc::EBADF));
        assert_eq!(a.lock(whole(1, WRITE)), Err(libc::EAGAIN));
        reader.lock(whole(1, UNLOCK)).unwrap();
        // A lock ends when its owner closes the file.
        b.close(
            if flags == 0 {
                opcode::FLUSH
            } else {
                opcode::RELEASE
            },
            1,
        );
        a.lock(whole(1, WRITE)).unwrap();
        a.lock(whole(1, UNLOCK)).unwrap();
    }
    // Locks of both families, and of other ranges, do not exclude each other.
    a.lock(Lock(1, (0, END), WRITE, FLOCK)).unwrap();
    a.lock(Lock(1, (10, 19), WRITE, 0)).unwrap();
    b.lock(Lock(1, (20, END), WRITE, 0)).unwrap();
    assert_eq!(b.lock(Lock(1, (0, 10), READ, 0)), Err(libc::EAGAIN));
    let found = b.request(4, opcode::GETLK, Lock(1, (0, 15), READ, 0));
    let found = found.unwrap().unwrap();
    let mut fields = Fields(&found);
    // The conflicting lock of client a: its range, its kind, and no process id, because the process
    // belongs to another client.
    assert_eq!((fields.u64().unwrap(), fields.u64().unwrap()), (10, 19));
    assert_eq!(fields.u32().unwrap().cast_signed(), WRITE);
    assert_eq!(fields.u32().unwrap(), 0);
    // The locks of a client end with the client, and waiting requests are granted.
    assert_eq!(b.wait(6, Lock(2, (10, 10), READ, 0)), Ok(false));
    assert_eq!(b.wait(8, Lock(2, (0, END), READ, FLOCK)), Ok(false));
    drop(a);
    let mut granted = [b.late(), b.late()];
    granted.sort_unstable();
    assert_eq!(granted, [(6, 0), (8, 0)]);
    // An ended session locks nothing.
    b.session.end_locks();
    assert_eq!(b.lock(Lock(1, (0, 0), READ, 0)), Err(libc::EIO));
    assert!(b.late.recv().is_err());
}

#[test]
fn waits_are_granted_in_order_interrupted_and_end_in_no_deadlock() {
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    let (a, b) = (Client::new(&volume, false), Client::new(&volume, false));
    let whole = |owner, kind, flags| Lock(owner, (0, END), kind, flags);
    a.lock(whole(1, WRITE, 0)).unwrap();
    assert_eq!(b.wait(10, whole(1, WRITE, 0)), Ok(false));
    assert_eq!(b.wait(12, whole(2, READ, 0)), Ok(false));
    assert_eq!(a.wait(10, whole(2, READ, 0)), Ok(false));
    // An interrupt concerns one request of its client. It has no effect on a request that does not
    // wait any longer (12, the second time), or that does not exist (14 and 99).
    for id in [12_u64, 12, 14, 99] {
        assert!(b.call(13, opcode::INTERRUPT, &id.to_le_bytes()).is_none());
    }
    assert_eq!(b.late(), (12, libc::EINTR));
    a.lock(whole(1, UNLOCK, 0)).unwrap();
    assert_eq!(b.late(), (10, 0));
    b.lock(whole(1, READ, 0)).unwrap();
    assert_eq!(a.late(), (10, 0));
    a.close(opcode::FLUSH, 2);
    b.close(opcode::FLUSH, 1);
    // A waits for B, which waits for A.
    a.lock(Lock(1, (0, 0), WRITE, 0)).unwrap();
    b.lock(Lock(1, (1, 1), WRITE, 0)).unwrap();
    assert_eq!(a.wait(20, Lock(1, (1, 1), WRITE, 0)), Ok(false));
    assert_eq!(b.wait(20, Lock(1, (0, 0), WRITE, 0)), Err(libc::EDEADLK));
    b.close(opcode::FLUSH, 1);
    assert_eq!(a.late(), (20, 0));
    // Two holders of shared locks request exclusive locks, one after the other.
    a.lock(whole(5, READ, FLOCK)).unwrap();
    b.lock(whole(5, READ, FLOCK)).unwrap();
    assert_eq!(a.wait(22, whole(5, WRITE, FLOCK)), Ok(false));
    // The first request has removed the shared lock of its owner, as in Linux.
    assert_eq!(b.wait(22, whole(5, WRITE, FLOCK)), Ok(true));
    b.close(opcode::RELEASE, 5);
    assert_eq!(a.late(), (22, 0));
}

#[test]
fn a_client_cannot_hold_or_wait_for_unlimited_locks() {
    /// Maximum number of locked ranges of a client.
    const MAX_LOCKS: u64 = 1024;
    /// Maximum number of waiting requests of a client.
    const MAX_WAITING: usize = 256;
    let home = tempfile::tempdir().unwrap();
    let volume = open(home.path());
    let (a, b) = (Client::new(&volume, false), Client::new(&volume, false));
    let byte = |at: u64, kind| Lock(1, (at, at), kind, 0);
    let mut held = 0;
    // Ranges with gaps between them are not merged.
    while a.lock(byte(2 * held, WRITE)).is_ok() {
        held += 1;
    }
    assert_eq!(held, MAX_LOCKS);
    assert_eq!(a.lock(byte(9999, WRITE)), Err(libc::ENOLCK));
    // An unlock may not split ranges without limit either.
    a.lock(Lock(1, (0, END), WRITE, 0)).unwrap();
    let splits = (0..3000).filter(|at| a.lock(byte(2 * at + 1, UNLOCK)).is_ok());
    // Each unlock of a byte adds a range to the first one.
    assert_eq!(splits.count() as u64, MAX_LOCKS - 1);
    // Client a still has the lock of byte 0.
    let waits = (0..1000).filter(|n| b.wait(100 + 2 * n, byte(0, WRITE)) == Ok(false));
    assert_eq!(waits.count(), MAX_WAITING);
    // Late replies that the client does not receive count as well.
    let silent = Client::new(&volume, false);
    let interrupted = (0..1000).filter(|n| {
        let waits = silent.wait(100 + 2 * n, byte(0, WRITE)) == Ok(false);
        silent.call(1, opcode::INTERRUPT, &(100 + 2 * n).to_le_bytes());
        waits
    });
    assert_eq!(interrupted.count(), MAX_WAITING);
    // A range that ends before its start, and unknown kinds.
    for bad in [
        Lock(1, (5, 4), WRITE, 0),
        Lock(1, (0, 0), 3, 0),
        Lock(1, (0, 0), -1, 0),
    ] {
        assert_eq!(b.lock(bad), Err(libc::EINVAL));
    }
    let mut unknown = Client::new(&volume, false);
    unknown.node = 12345;
    assert_eq!(unknown.lock(byte(0, READ)), Err(libc::ESTALE));
}

#[test]
fn after_the_death_of_a_server_only_earlier_locks_are_granted_for_some_time() {
    let home = tempfile::tempdir().unwrap();
    let node = {
        let volume = open(home.path());
        let a = Client::new(&volume, false);
        a.lock(Lock(1, (0, END), WRITE, 0)).unwrap();
        assert!(home.path().join("locks").exists());
        a.node
    };
    let volume = open(home.path());
    let (a, b) = (Client::new(&volume, false), Client::new(&volume, false));
    assert_eq!(a.node, node);
    let begun = Instant::now();
    // Requests for new locks arrive first, but must wait until earlier locks are reclaimed. This
    // also applies to SETLK, which does not wait for other locks.
    assert_eq!(b.wait(2, Lock(1, (0, END), WRITE, 0)), Ok(false));
    assert!(
        b.request(4, opcode::SETLK, Lock(2, (0, 0), READ, 0))
            .is_none()
    );
    assert!(
        b.request(6, opcode::SETLK, Lock(3, (0, 0), READ, FLOCK))
            .is_none()
    );
    a.lock(Lock(1, (0, END), WRITE, RECLAIM)).unwrap();
    assert_eq!(b.lock(Lock(4, (0, 0), READ, RECLAIM)), Err(libc::EAGAIN));
    assert_eq!(b.late(), (4, libc::EAGAIN));
    // Earlier locks can be reclaimed for five seconds. The limit allows for the time before
    // `begun`.
    assert!(begun.elapsed() > Duration::from_secs(3));
    // Request 6 is for a lock of `flock`, which has no conflict. Request 2 waits for client a.
    assert_eq!(b.late(), (6, 0));
    a.close(opcode::FLUSH, 1);
    assert_eq!(b.late(), (2, 0));
}
