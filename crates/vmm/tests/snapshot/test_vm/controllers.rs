//! Change of a VM's controller.
//!
//! A *controller* is the process that drives a VMM through its control socket. A VMM that was
//! *detached* continues to run without a controller.

use super::super::files::SnapshotTarget;
use super::TestVm;
use jiffy_proto::channel::Channel;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::snapshot::SnapshotDecision;
use jiffy_proto::vm::{CONTROL_PROTOCOL_VERSION, Event, FdIndex, Request};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

impl TestVm {
    /// Detaches the VM from its controller. Later controllers connect at `path`.
    pub fn detach(&mut self, path: &Path) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let request = Request::Detach {
            listener: FdIndex(0),
            log: None,
            greeting: Some(FdIndex(1)),
            request_id: None,
        };
        let greeting = self.greeting.take().unwrap();
        let fds = [listener.as_fd(), greeting.as_fd()];
        self.channel.send(&request, &fds).unwrap();
        self.wait(|event| match event {
            Event::Detached => Ok(()),
            other => Err(other),
        });
    }

    /// Closes the control socket.
    pub fn disconnect(&mut self) {
        self.channel = Channel::pair().unwrap().0;
    }

    /// Connects as another controller and receives the VM's files. Returns whether the guest runs,
    /// and the prepared snapshot.
    pub fn adopt(&mut self, path: &Path) -> (bool, Option<String>) {
        let flags = SockFlag::SOCK_CLOEXEC;
        let next = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        connect(next.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        self.channel = Channel::new(next);
        self.former = Some(self.overlay.try_clone().unwrap());
        self.reattach()
    }

    /// Requests the VM's state and files, as a new controller does.
    fn reattach(&mut self) -> (bool, Option<String>) {
        self.send(&Request::Reattach);
        loop {
            match self.event() {
                (
                    Event::Reattached {
                        protocol: CONTROL_PROTOCOL_VERSION,
                        running,
                        prepared_snapshot,
                        captured,
                        rollback: true,
                        fold: true,
                        console: FdIndex(0),
                        overlays,
                        ..
                    },
                    mut fds,
                ) => {
                    assert_eq!(overlays, [FdIndex(1)]);
                    self.captured = captured;
                    self.overlay = File::from(fds.pop().unwrap());
                    self.console = ConsoleRing::open(fds.pop().unwrap()).unwrap();
                    return (running, prepared_snapshot);
                }
                // Reply to a request of the former controller.
                (Event::SnapshotFailed { .. }, _) => {}
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    /// Makes `target`, which was written for an earlier controller, the newest layer of the VM.
    pub fn adopt_snapshot(&mut self, target: SnapshotTarget) {
        self.origin.state = Some(target.state);
        self.origin.memory.push((target.memory, target.index));
        let frozen = self.former.take().unwrap();
        self.origin.disk.push((frozen, target.disk_index));
    }

    /// Commits or aborts the last snapshot.
    pub fn commit_or_abort(&mut self, decision: SnapshotDecision) {
        self.send(&Request::ResolveSnapshot { decision });
        let failure = self.wait(|event| match event {
            Event::SnapshotResolved { failure } => Ok(failure),
            other => Err(other),
        });
        assert_eq!(failure, None);
        assert_eq!(self.reattach().1, None);
    }
}
