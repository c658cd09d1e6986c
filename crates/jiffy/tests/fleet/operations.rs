//! Changes of a fleet without faults: warm pools that follow the creates, and the removal of a
//! front.

use super::client::Client;
use super::laboratory::{Host, Laboratory, report};
use crate::support::wait_for;
use std::time::{Duration, Instant};

/// Number of creates of one template: a demand for two guests, for at least 15 s.
const CREATES: usize = 10;
/// Guests in the pool of a template in use without such a demand.
const DEFAULT_POOL: u64 = 1;
/// Maximum time until all hosts have closed the connections of a removed front.
const REMOVAL: Duration = Duration::from_secs(20);

/// Creates sandboxes on one host, whose warm pool grows.
pub fn a_warm_pool_grows_on_the_host_of_the_creates(laboratory: &Laboratory) -> Host {
    let host = laboratory.ordinary();
    let client = laboratory.at(&host);
    // A host that does not answer (`None`) passes this check.
    let before = laboratory.warm_guests(&host);
    assert!(before <= Some(DEFAULT_POOL), "{before:?}");
    laboratory.only_on(&host, || {
        for _ in 0..CREATES {
            client.kill(&client.created()).expect(204);
        }
    });
    let started = Instant::now();
    wait_for("a larger warm pool", || {
        (laboratory.warm_guests(&host)? > DEFAULT_POOL).then_some(())
    });
    report("growth of a warm pool", started.elapsed());
    for other in laboratory.others(&host) {
        let warm = laboratory.warm_guests(&other);
        assert!(warm <= Some(DEFAULT_POOL), "{}: {warm:?}", other.name);
    }
    host
}

/// Waits until the warm pool of a host has its usual size again.
pub fn the_warm_pool_shrinks(laboratory: &Laboratory, host: &Host) {
    let started = Instant::now();
    wait_for("a smaller warm pool", || {
        (laboratory.warm_guests(host)? <= DEFAULT_POOL).then_some(())
    });
    report("further time until the pool is small", started.elapsed());
}

/// Removes the front while a client reads a stream through it. The front cannot be used afterwards.
pub fn a_removed_front_serves_no_client(laboratory: &Laboratory) {
    let (front, id) = (laboratory.front(), laboratory.front_id());
    let host = &laboratory.hosts[0];
    let mut stream = front.events();
    let started = Instant::now();
    laboratory.admin(host, &["fleet", "remove", &id]);
    stream.until_closed(REMOVAL);
    report("end of a stream through a removed front", started.elapsed());
    // Each host rejects the certificate as soon as it knows of the removal.
    wait_for("the rejection of the front", || {
        let text = format!("{id} was removed from the fleet");
        laboratory.front_log().contains(&text).then_some(())
    });
    wait_for("the rejection of calls through the front", || {
        (front.get("/v2/sandboxes").status == 503).then_some(())
    });
    assert!(started.elapsed() < REMOVAL, "{:?}", started.elapsed());
    for command in ["status", "nodes"] {
        let text = laboratory.admin(host, &["fleet", command]);
        assert!(!text.contains(&id), "{text}");
    }
    let clients: Vec<Client> = laboratory.hosts.iter().map(|h| laboratory.at(h)).collect();
    for client in clients {
        client.get("/v2/sandboxes").expect(200);
    }
}
