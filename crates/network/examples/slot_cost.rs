//! Measures the cost of network slots: processor time (of this process and of programs that it
//! starts) and duration per slot created and removed.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! Run in new network and mount namespaces with a private `/run`, so that the host is not changed:
//!
//! ```text
//! cargo build --example slot_cost -p jiffy-network
//! unshare -nm sh -c 'mount -t tmpfs none /run && target/debug/examples/slot_cost 50 5'
//! ```

use jiffy_network::{Network, NetworkConfig, NicKind};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use std::error::Error;
use std::time::{Duration, Instant};

/// Interval between checks of the background work.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Returns the processor time of this process and its exited children, in microseconds.
fn processor_time() -> nix::Result<i64> {
    let mut time = 0;
    for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
        let usage = getrusage(who)?;
        time += usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    }
    Ok(time)
}

/// Returns processor time and duration of `work`, each in milliseconds per slot.
fn per_slot(slots: u32, work: impl FnOnce()) -> nix::Result<(f64, f64)> {
    let (time, began) = (processor_time()?, Instant::now());
    work();
    let took = began.elapsed();
    let time = processor_time()? - time;
    let slots = f64::from(slots);
    Ok((
        time as f64 / 1000.0 / slots,
        took.as_secs_f64() * 1000.0 / slots,
    ))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse());
    let (slots, rounds): (u32, u32) = (number(50)?, number(3)?);
    for nic in [NicKind::Tap, NicKind::Veth] {
        for _ in 0..rounds {
            let home = std::env::temp_dir().join(format!("slot-cost-{}", std::process::id()));
            std::fs::create_dir_all(&home)?;
            let mut config = NetworkConfig::new(&home);
            config.ready = slots as usize + 1;
            config.nic = nic;
            let began = Instant::now();
            // Includes the creation of the first slot.
            let network = Network::open(&config)?;
            let opened = began.elapsed();
            let created = per_slot(slots, || {
                while network.slots().0 < config.ready {
                    std::thread::sleep(POLL_INTERVAL);
                }
            })?;
            let removed = per_slot(slots + 1, || network.close())?;
            std::fs::remove_dir(&home)?;
            println!(
                "{nic:?}: open {opened:.1?}; per slot: created in {:.2} ms of a processor, {:.2} ms; \
                 removed in {:.2} ms of a processor, {:.2} ms",
                created.0, created.1, removed.0, removed.1
            );
        }
    }
    Ok(())
}
