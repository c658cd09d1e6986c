//! Main function: receives the configuration, builds the machine, serves it until the VM ends.
//!
//! The *controller* is the process that drives this VMM: the daemon. A *detached* VM outlives its
//! controller, and a later controller takes it over. The *greeting* is the first message of the
//! agent, which then receives the identity of its sandbox. A *spare* VMM process is started in
//! advance, and creates a VM before its guest is known.

mod batch;
mod captured;
mod devices;
mod disk_thread;
mod first_use;
mod fold_layers;
mod frozen_machine;
mod messages;
mod reattach;
mod rollback;
mod snapshot;

use crate::allocator;
use crate::confined_thread::SpareThreads;
use crate::control_socket;
use crate::error::VmmError;
use crate::jail;
use crate::machine::bus::lock;
use crate::machine::vcpu::{VcpuEnd, Vcpus};
use crate::machine::{
    EventSlot, ExitCounters, KvmVm, Machine, ReceivedFds, SPARE_VCPUS, build, restore,
};
use crate::poll::ReadyEvent;
use crate::seccomp;
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::write_tracker::WriteTracker;
use crate::virtio::balloon::Balloon;
use crate::virtio::blk::{Block, DiskLayers};
use crate::virtio::vsock::{GuestConnect, Vsock, VsockConnectError};
use disk_thread::DiskThread;
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::snapshot::{FoldedLayers, PopulateMoment, RestoreConfig};
use jiffy_proto::vm::jail::{ENTER_ARGUMENT, MAKE_ARGUMENT};
use jiffy_proto::vm::{CONTROL_FD, Event, Request, SPARE_NAME, StartTimes, StopCause, VmConfig};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::EpollFlags;
use nix::sys::prctl;
use snapshot::{BackgroundCopy, PreparedSnapshot};
use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Allowance for state and index files that exceed a small VM's memory and disks, in bytes.
const FILE_HEADROOM_BYTES: u64 = 16 << 20;
/// Name of the process after its first request.
const NAME: &str = "jiffy-vmm";
/// Maximum time for vCPUs to leave the guest before the process exits, which terminates them.
const LAST_PAUSE_TIMEOUT: Duration = Duration::from_millis(100);

/// Event loop slots of the VMM itself. Slots of devices follow (`machine::devices`).
const SLOT_CONTROL: u32 = 0;
const SLOT_LISTENER: u32 = 1;
const SLOT_VCPU_END: u32 = 2;
const SLOT_DEVICE_FAILURE: u32 = 3;
const SLOT_BACKGROUND_COPY: u32 = 4;

/// Runs the program.
pub fn run() -> ExitCode {
    let began = Instant::now();
    allocator::map_large_buffers();
    if std::env::args().nth(1).as_deref() == Some(MAKE_ARGUMENT) {
        return jail::make_namespaces();
    }
    let argument = std::env::args().nth(1);
    if let Err(e) = control_socket::place(argument.as_deref() == Some(ENTER_ARGUMENT)) {
        let _ = writeln!(io::stderr(), "jiffy-vmm: {e}");
        return ExitCode::from(2);
    }
    let confined = jail::confine(argument.as_deref());
    // SAFETY: the descriptor was opened above and has no other owner.
    let control = Channel::new(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
    if let Err(e) = confined {
        return finish(&control, &e.into());
    }
    let setup_time = began.elapsed();
    // A spare process waits here until a guest needs it, possibly for hours.
    set_process_name(SPARE_NAME);
    let mut first = control.recv::<Request>();
    let (mut spare, mut spare_threads) = (None, SpareThreads::default());
    if let Ok((Request::Prepare { kvm, memory_mib }, fds)) = first {
        let kvm = ReceivedFds::new(fds).take(kvm, "/dev/kvm");
        // Ignore errors: without a spare, `start` creates a VM and reports the error.
        spare = kvm.and_then(|kvm| KvmVm::prepare(kvm, memory_mib)).ok();
        spare_threads = SpareThreads::start(SPARE_VCPUS);
        seccomp::compile_main();
        first = control.recv::<Request>();
    }
    set_process_name(NAME);
    // Exclude the time during which the process waited.
    let began = Instant::now().checked_sub(setup_time).unwrap_or(began);
    let (origin, fds) = match first {
        Ok((Request::Start(config), fds)) => (VmOrigin::Boot(config), fds),
        Ok((Request::Restore(config), fds)) => (VmOrigin::Snapshot(config), fds),
        Ok((other, _)) => {
            let reason = format!("the first request must be start or restore, not {other:?}");
            return finish(&control, &StopCause::BadConfig { reason });
        }
        Err(ChannelError::Closed) => return ExitCode::SUCCESS,
        Err(e) => {
            let reason = e.to_string();
            return finish(&control, &StopCause::BadConfig { reason });
        }
    };
    let config_us = micros(began);
    let link = ControlLink::new(control);
    let times = (began, config_us);
    match start(&origin, fds, spare, spare_threads, &link, times) {
        Ok(mut vm) => {
            let cause = vm.serve();
            // The VM is halted even after a reset or a failure: other vCPUs and streams may still
            // be running.
            vm.halt();
            link.send(&Event::Stopped(cause), &[]);
            // Do not drop the VM: the kernel releases the memory of an exiting process at once, but
            // only one mapping after the other while KVM uses it.
            std::mem::forget(vm);
        }
        Err(e) => {
            link.send(&Event::Stopped(e.into()), &[]);
        }
    }
    ExitCode::SUCCESS
}

/// Sets the name of the process in process lists.
fn set_process_name(name: &str) {
    if let Ok(name) = CString::new(name) {
        let _ = prctl::set_name(&name);
    }
}

/// Reports that the VM cannot start. Returns the exit code of the process.
fn finish(control: &Channel, cause: &StopCause) -> ExitCode {
    // Ignore errors: the controller also learns of the failure from the exit code.
    let _ = control.send(&Event::Stopped(cause.clone()), &[]);
    ExitCode::FAILURE
}

fn micros(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Control channel to the controller. Empty if no controller is connected.
#[derive(Clone)]
struct ControlLink(Arc<Mutex<Option<Channel>>>);

impl ControlLink {
    fn new(channel: Channel) -> Self {
        Self(Arc::new(Mutex::new(Some(channel))))
    }

    /// Sends a message without waiting. Returns whether the controller's socket accepted it. A
    /// message that does not fit into the socket's buffer is lost.
    fn send(&self, event: &Event, fds: &[BorrowedFd<'_>]) -> bool {
        lock(&self.0)
            .as_ref()
            .is_some_and(|channel| channel.send(event, fds).is_ok())
    }
}

impl GuestConnect for ControlLink {
    fn guest_connect(&mut self, port: u32, stream: UnixStream) -> io::Result<()> {
        if self.send(&Event::GuestConnect { port }, &[stream.as_fd()]) {
            Ok(())
        } else {
            Err(io::ErrorKind::NotConnected.into())
        }
    }
}

/// Source of the VM: a configuration or a snapshot.
enum VmOrigin {
    Boot(Box<VmConfig>),
    Snapshot(Box<RestoreConfig>),
}

/// State of the event loop.
struct Vm {
    machine: Machine,
    link: ControlLink,
    /// Console ring. A later controller receives a duplicate.
    console: OwnedFd,
    /// Socket on which later controllers connect. `None` unless the VM is detached.
    listener: Option<OwnedFd>,
    /// Stream of the agent's greeting. If it were closed, the agent would send a new greeting.
    _greeting: Option<OwnedFd>,
    /// Former disk layers of a rollback that is not finished. Closing them takes time.
    former_disks: Vec<DiskLayers>,
    vcpus: Vcpus,
    disks: DiskThread,
    exits: ExitCounters,
    /// True while the vCPUs run.
    running: bool,
    /// Snapshot whose memory a forked process is writing.
    background_copy: Option<BackgroundCopy>,
    /// Complete snapshot that is neither committed nor aborted.
    prepared: Option<PreparedSnapshot>,
    /// True if a new controller waits for the state of the VM.
    reattach_pending: bool,
    /// Disks (by device number) that could not be thawed after a failed snapshot: their writes
    /// still go to the overlay of that snapshot.
    disks_to_thaw: Vec<usize>,
    /// Layers to fold whose disks were in use at the time of the request.
    unfolded: Vec<FoldedLayers>,
    cause: Option<StopCause>,
    /// Reason why the guest has ended while a captured snapshot (see `captured.rs`) is being
    /// written.
    ended_cause: Option<StopCause>,
}

/// Builds or restores the machine, and starts its threads. `spare` and `spare_threads` were created
/// before the request arrived, to save time.
fn start(
    origin: &VmOrigin,
    fds: Vec<OwnedFd>,
    spare: Option<KvmVm>,
    mut spare_threads: SpareThreads,
    link: &ControlLink,
    (began, config_us): (Instant, u64),
) -> Result<Vm, VmmError> {
    let mut fds = ReceivedFds::new(fds);
    let guest_connect = Box::new(link.clone());
    let (console, paused) = match origin {
        VmOrigin::Boot(c) => (c.console, false),
        VmOrigin::Snapshot(c) => (c.console, c.paused),
    };
    let console = fds.copy(console, "console")?;
    let mut machine = match origin {
        VmOrigin::Boot(c) => build(c, &mut fds, spare, guest_connect)?,
        VmOrigin::Snapshot(c) => {
            let link = link.clone();
            restore(c, &mut fds, spare, guest_connect, move |e| {
                exit_process(&link, e)
            })?
        }
    };
    // Close descriptors that the configuration sent but does not use.
    drop(fds);
    let loaded_us = micros(began);
    // Memory can belong to one userfaultfd only.
    if machine.lazy.is_none() {
        machine.write_tracker = WriteTracker::new();
    }

    let vcpus = std::mem::take(&mut machine.vcpus);
    let exits = ExitCounters::new(&vcpus);
    let ended = crate::machine::new_eventfd()?;
    let of_vcpus = spare_threads.take_vcpus(vcpus.len())?;
    let vcpus = Vcpus::start(vcpus, of_vcpus, &machine.bus, ended)?;
    let disks = DiskThread::start(&machine, spare_threads.take_disks()?, link.clone());
    let vm = Vm {
        machine,
        link: link.clone(),
        console,
        listener: None,
        _greeting: None,
        former_disks: Vec::new(),
        vcpus,
        disks,
        exits,
        running: !paused,
        background_copy: None,
        prepared: None,
        reattach_pending: false,
        disks_to_thaw: Vec::new(),
        unfolded: Vec::new(),
        cause: None,
        ended_cause: None,
    };
    vm.watch_descriptors()?;
    jail::limit_file_size(vm.max_file_bytes()?)?;
    // Install the filter after the setup, whose calls it forbids, and before the guest runs.
    seccomp::confine_main(vm.machine.write_tracker.is_some())?;
    if vm.running {
        vm.vcpus.resume();
    }
    link.send(
        &Event::Started(StartTimes {
            config_us,
            loaded_us,
            running_us: micros(began),
        }),
        &[],
    );
    Ok(vm)
}

/// Exits the process if guest memory cannot be filled: the event loop may wait for it forever.
fn exit_process(link: &ControlLink, error: VmmError) {
    messages::report(&error);
    link.send(&Event::Stopped(error.into()), &[]);
    // SAFETY: exits the process immediately. No cleanup is required.
    unsafe { libc::_exit(0) }
}

/// Registers a descriptor for reading in the event loop.
fn watch(slot: &crate::poll::SlotPoller, fd: BorrowedFd<'_>) -> Result<(), VmmError> {
    slot.add(fd, 0, EpollFlags::EPOLLIN)
        .map_err(|e| VmmError::host("epoll", e))
}

impl Vm {
    /// Returns the maximum size of the files that the VM writes, in bytes.
    fn max_file_bytes(&self) -> Result<u64, VmmError> {
        let memory = LinearMemory::new(&self.machine.memory)?.bytes();
        let disks = self.machine.devices.iter();
        let written = |block: &Block| block.writable().then(|| block.bytes());
        let disks = disks.filter_map(|device| lock(device).device_ref(written).flatten());
        let longest = disks.fold(memory, u64::max);
        Ok(longest.saturating_add(FILE_HEADROOM_BYTES))
    }

    /// Registers the descriptors of the process in the event loop: the control socket, and the
    /// eventfds for the end of a vCPU and for a failed device.
    fn watch_descriptors(&self) -> Result<(), VmmError> {
        let poller = &self.machine.poller;
        if let Some(channel) = lock(&self.link.0).as_ref() {
            fcntl(channel.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(|e| VmmError::host("control socket", e))?;
            watch(&poller.slot(SLOT_CONTROL), channel.as_fd())?;
        }
        let ended = crate::machine::borrow_eventfd(&self.vcpus.ended);
        watch(&poller.slot(SLOT_VCPU_END), ended)?;
        let device_failed = crate::machine::borrow_eventfd(&self.machine.device_failed);
        watch(&poller.slot(SLOT_DEVICE_FAILURE), device_failed)
    }

    /// Handles one event of the event loop. The slot identifies its source.
    fn dispatch(&mut self, ready: ReadyEvent) {
        match EventSlot::decode(ready.slot) {
            EventSlot::Queue(device) => self.on_device(device, |d| {
                lock(d).queue_event(usize::try_from(ready.token).unwrap_or(usize::MAX));
            }),
            EventSlot::Host(device) => {
                self.on_device(device, |d| lock(d).host_event(ready.token, ready.flags));
                self.record_frames(device);
            }
            EventSlot::Other(SLOT_CONTROL) => self.on_control(),
            EventSlot::Other(SLOT_LISTENER) => self.on_listener(),
            EventSlot::Other(SLOT_VCPU_END) => self.on_vcpu_end(),
            EventSlot::Other(SLOT_BACKGROUND_COPY) => self.on_background_copy(),
            EventSlot::Other(SLOT_DEVICE_FAILURE) => {
                // Reset the counter before reading the devices. A later failure sets it again.
                let _ = self.machine.device_failed.read();
                for device in &self.machine.devices {
                    // Do not wait for a disk: the holder of its lock reports its failure later.
                    if let Ok(device) = device.try_lock() {
                        self.report(device);
                    }
                }
            }
            EventSlot::Other(_) => {}
        }
    }

    /// Handles the end of a vCPU, which ends the VM.
    fn on_vcpu_end(&mut self) {
        if let Some(end) = self.vcpus.take_end() {
            self.cause = Some(match end {
                VcpuEnd::Reset => StopCause::GuestReset,
                VcpuEnd::Failed(e) => e.into(),
            });
        }
    }

    /// Handles one message of the controller, when the event loop finds the control socket
    /// readable.
    fn on_control(&mut self) {
        let received = match lock(&self.link.0).as_ref() {
            Some(channel) => channel.recv::<Request>(),
            None => return,
        };
        match received {
            Ok((request, fds)) => self.on_request(request, fds),
            Err(ChannelError::Io(Errno::EAGAIN)) => {}
            // A controller that violates the protocol is treated as disconnected.
            Err(_) => self.on_controller_disconnected(),
        }
    }

    fn pause(&mut self) {
        if self.running {
            self.vcpus.pause();
            self.running = false;
        }
    }

    /// Stops the guest before its end is reported, and closes all streams to it. Otherwise a client
    /// could mistake an old stream for a stream to the sandbox's next guest.
    fn halt(&mut self) {
        if self.running {
            self.vcpus.pause_within(LAST_PAUSE_TIMEOUT);
        }
        for device in self.machine.devices_of_event_loop() {
            // A device whose lock a vCPU did not release in time is closed with the process.
            if let Ok(mut device) = device.try_lock()
                && device.device_ref(|_: &Vsock| ()).is_some()
            {
                device.update(|vsock: &mut Vsock| {
                    vsock.disconnect();
                    Ok(())
                });
            }
        }
    }

    fn resume(&mut self) {
        if !self.running {
            self.vcpus.resume();
            self.running = true;
        }
    }

    /// Handles a request of the controller. `fds` are the descriptors of the message.
    fn on_request(&mut self, request: Request, fds: Vec<OwnedFd>) {
        match request {
            Request::Prepare { .. } | Request::Start(_) | Request::Restore(_) => {
                let reason = "the VM has started already".to_owned();
                self.cause = Some(StopCause::BadConfig { reason });
            }
            Request::Connect { port } => {
                let connection = PopulateMoment::Connection;
                self.machine.deferred_copies.on_moment(connection);
                if let Some(stream) = fds.into_iter().next() {
                    self.update_device(|vsock: &mut Vsock| match vsock.connect(port, stream) {
                        Err(VsockConnectError::Device(e)) => Err(e),
                        // Ignore the error: the owner of the other end then sees a closed stream.
                        Ok(()) | Err(_) => Ok(()),
                    });
                }
            }
            Request::Balloon { target_mib } => {
                self.update_device(|balloon: &mut Balloon| {
                    balloon.set_target(target_mib);
                    Ok(())
                });
            }
            Request::Stats => {
                let mut stats = self.machine.bus.stats();
                let actual = |b: &Balloon| b.actual_mib();
                let mut devices = self.machine.devices_of_event_loop().into_iter();
                let actual = devices.find_map(|d| lock(&d).device_ref(actual));
                stats.balloon_mib = actual.unwrap_or(0);
                // Ignore the error: the number of exits is optional in the reply.
                stats.exits = self.exits.read().ok().flatten();
                self.link.send(&Event::Stats(stats), &[]);
            }
            Request::Pause => {
                let began = Instant::now();
                self.pause();
                let stopped_us = micros(began);
                self.link.send(&Event::Paused { stopped_us }, &[]);
            }
            Request::Resume => {
                self.resume();
                self.link.send(&Event::Resumed, &[]);
            }
            Request::Snapshot(config) => self.on_snapshot(&config, fds),
            Request::Rollback(config) => self.on_rollback(&config, fds),
            Request::FinishRollback { greeting } => self.on_finish_rollback(greeting, fds),
            Request::WorkingSet {
                index,
                pagemap,
                written,
            } => {
                let chunks = self.working_set(index, pagemap, written, fds).ok();
                self.link.send(&Event::WorkingSet { chunks }, &[]);
            }
            Request::Detach {
                listener,
                log,
                greeting,
                request_id,
            } => {
                messages::set_request_id(request_id);
                self.on_detach(listener, log, greeting, fds);
            }
            Request::Reattach => self.on_reattach(),
            Request::ResolveSnapshot { decision } => {
                let failure = self.commit_or_abort(decision).err().map(|e| e.to_string());
                self.link.send(&Event::SnapshotResolved { failure }, &[]);
            }
            Request::AbortCapture => self.abort_capture(),
            Request::FoldLayers(layers) => self.on_fold_layers(*layers),
            Request::Stop => self.cause = Some(StopCause::Requested),
        }
    }
}
