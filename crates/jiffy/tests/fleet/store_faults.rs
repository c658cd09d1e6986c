//! Faults of hosts and of the store. The records by which the hosts agree are in the store as well.
//! A *verdict* is the decision of the coordinator that a host is dead. The *roster* of a host is
//! the list of its sandboxes in the store, for the time after its loss.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead.

use super::laboratory::{Host, Laboratory, report};
use super::volumes::{assert_lost, assert_returned, volume_on};
use crate::support::SetOnDrop;
use jiffy_test_attributes::jiffy_test;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Maximum time until a lost host is declared dead, unless it was the coordinator.
const VERDICT: Duration = Duration::from_secs(20);
/// Maximum time until a lost coordinator is replaced and declared dead.
const VERDICT_ON_COORDINATOR: Duration = Duration::from_secs(30);
/// Maximum time until all hosts reject a revoked key.
const REVOCATION: Duration = Duration::from_secs(1);

#[jiffy_test(engine = "microvm", root)]
fn a_fleet_holds_its_promises_when_hosts_and_the_store_fail() {
    if std::env::var_os("JIFFY_FLEET_FAULTS").is_none() {
        return crate::support::skip("takes more than five minutes on a busy host: make soak");
    }
    let Some(mut laboratory) = Laboratory::start("store") else {
        return crate::support::skip("the test servers are not built");
    };
    sandboxes_are_used_through_all_hosts_and_the_front(&laboratory);
    a_revoked_key_is_rejected_on_all_hosts(&laboratory);
    nothing_fails_while_the_store_is_away(&mut laboratory);
    sandboxes_of_a_lost_host_resume_elsewhere_or_are_reported(&mut laboratory);
    a_suspended_host_never_runs_a_sandbox_that_moved(&mut laboratory);
    creates_continue_without_the_coordinator(&mut laboratory);
}

fn sandboxes_are_used_through_all_hosts_and_the_front(laboratory: &Laboratory) {
    let front = laboratory.front();
    let started = Instant::now();
    let id = front.created();
    report("first create", started.elapsed());
    let mut clients: Vec<_> = laboratory.hosts.iter().map(|h| laboratory.at(h)).collect();
    clients.push(front.clone());
    for (n, client) in clients.iter().enumerate() {
        let script = format!("echo {n} >> /tmp/calls; wc -l < /tmp/calls");
        let calls = laboratory.sh(client, &id, &script).unwrap();
        assert_eq!(calls, (n + 1).to_string());
        let made = client.created();
        assert_eq!(laboratory.sh(&front, &made, "echo up").unwrap(), "up");
        client.kill(&made).expect(204);
    }
    front.kill(&id).expect(204);
}

pub fn a_revoked_key_is_rejected_on_all_hosts(laboratory: &Laboratory) {
    let key = laboratory.create_key("revoked", "create");
    let hosts = laboratory.hosts.iter().map(|host| laboratory.at(host));
    let mut clients: Vec<_> = hosts.chain([laboratory.front()]).collect();
    for client in &mut clients {
        client.key.clone_from(&key);
        client.get("/v2/sandboxes").expect(200);
    }
    laboratory.admin(&laboratory.hosts[1], &["key", "revoke", "revoked"]);
    let started = Instant::now();
    for client in &clients {
        while client.get("/v2/sandboxes").status != 401 {
            assert!(started.elapsed() < REVOCATION, "{client:?} is accepted");
        }
    }
    report("revocation on all hosts", started.elapsed());
}

/// Runs `fault` while clients create, use and kill sandboxes through all hosts. No call may fail.
fn under_load(laboratory: &Laboratory, ids: &[String], fault: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    let rounds = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let end = SetOnDrop(&is_over);
        for host in &laboratory.hosts {
            let (client, is_over, rounds) = (laboratory.at(host), &is_over, &rounds);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let id = client.created();
                    assert_eq!(laboratory.sh(&client, &id, "echo up").unwrap(), "up");
                    for id in ids {
                        assert_eq!(laboratory.sh(&client, id, "echo on").unwrap(), "on");
                    }
                    client.kill(&id).expect(204);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        fault();
        drop(end);
    });
    println!("{:>8} rounds under load", rounds.load(Ordering::Relaxed));
    // One round for each host.
    assert!(rounds.load(Ordering::Relaxed) >= 3);
}

fn nothing_fails_while_the_store_is_away(laboratory: &mut Laboratory) {
    let host = laboratory.ordinary();
    let ids = laboratory.counting_on(&host, 1);
    let epochs = epochs(laboratory);
    for (start, end, seconds) in [("freeze s3", "thaw s3", 6), ("kill s3", "start s3", 2)] {
        let started = Instant::now();
        laboratory.fault(start);
        under_load(laboratory, &ids, || {
            // The load continues for the duration of the fault.
            std::thread::sleep(Duration::from_secs(seconds));
        });
        laboratory.fault(end);
        report(&format!("{start}, load, {end}"), started.elapsed());
    }
    laboratory.until_ready();
    assert_eq!(epochs, self::epochs(laboratory), "a host was declared dead");
    laboratory.assert_runs_once(&laboratory.hosts, &ids[0]);
    laboratory.at(&host).kill(&ids[0]).expect(204);
}

/// Returns the epochs of all hosts.
pub fn epochs(laboratory: &Laboratory) -> Vec<u64> {
    let status = laboratory.status(&laboratory.hosts[0]).unwrap();
    let nodes = status["nodes"].as_array().unwrap().iter();
    nodes.map(|node| node["epoch"].as_u64().unwrap()).collect()
}

/// Starts a host again, and waits until it has compared its sandboxes with the store.
pub fn start_again(laboratory: &mut Laboratory, host: &Host) {
    let started = Instant::now();
    laboratory.fault(&format!("start {}", host.name));
    laboratory.until_ready();
    report(&format!("return of {}", host.name), started.elapsed());
}

/// Asserts that running sandboxes of a lost host are reported with host and time.
pub fn assert_reported(laboratory: &Laboratory, host: &Host, others: &[Host], ids: &[String]) {
    // "20": first digits of the year.
    let cause = format!("host {} was lost at 20", host.id);
    for id in ids {
        for client in others.iter().map(|other| laboratory.at(other)) {
            let shown = client.sandbox(id).expect(200);
            assert_eq!(shown["state"], "broken", "{shown}");
            assert!(shown.to_string().contains(&cause), "{shown}");
            let resumed = client.connect(id);
            assert_eq!(resumed.code(), "host_lost", "{resumed:?}");
            assert!(resumed.body.to_string().contains(&cause), "{resumed:?}");
        }
    }
}

pub fn sandboxes_of_a_lost_host_resume_elsewhere_or_are_reported(laboratory: &mut Laboratory) {
    let host = laboratory.ordinary();
    let others = laboratory.others(&host);
    let ids = laboratory.counting_on(&host, 4);
    let (stored, running) = ids.split_at(2);
    let client = laboratory.at(&host);
    for id in stored {
        report("durable pause", client.pause_durably(id));
    }
    volume_on(laboratory, &host);
    // The roster of the host is written within 4 s after a change.
    Laboratory::wait_for_roster();
    // After a loss of the quorum, the host may have become the coordinator in the meantime.
    let limit = if laboratory.coordinator().id == host.id {
        VERDICT_ON_COORDINATOR
    } else {
        VERDICT
    };
    let started = Instant::now();
    laboratory.fault(&format!("kill {}", host.name));
    laboratory.until_state(&others[0], &host, "dead");
    report("verdict on a lost host", started.elapsed());
    assert!(started.elapsed() < limit, "{:?}", started.elapsed());
    let hosts = others.iter().map(|other| laboratory.at(other));
    let clients: Vec<_> = hosts.chain([laboratory.front()]).collect();
    for id in stored {
        let resuming = Instant::now();
        laboratory.resume_everywhere(&clients, id);
        report(
            "resume on another host, by three calls at once",
            resuming.elapsed(),
        );
        laboratory.assert_runs_once(&others, id);
    }
    assert_reported(laboratory, &host, &others, running);
    assert_lost(&clients, &host);
    start_again(laboratory, &host);
    assert_returned(laboratory, &clients[0]);
    for id in stored {
        laboratory.assert_runs_once(&laboratory.hosts, id);
    }
    // The guests of the running sandboxes ended with the host. The host, which has returned,
    // reports this.
    for id in running {
        for client in laboratory.hosts.iter().map(|host| laboratory.at(host)) {
            let ended = client.sandbox(id);
            assert_eq!(ended.code(), "sandbox_broken", "{ended:?}");
        }
    }
    for id in &ids {
        laboratory.front().kill(id).expect(204);
    }
}

fn a_suspended_host_never_runs_a_sandbox_that_moved(laboratory: &mut Laboratory) {
    let host = laboratory.ordinary();
    let others = laboratory.others(&host);
    let ids = laboratory.counting_on(&host, 6);
    let (stored, running) = ids.split_at(4);
    let client = laboratory.at(&host);
    for id in stored {
        client.pause_durably(id);
    }
    // The first running sandbox has an older state in the store.
    client.pause_durably(&running[0]);
    client.connected(&running[0]);
    Laboratory::wait_for_roster();
    let started = Instant::now();
    laboratory.fault(&format!("freeze {}", host.name));
    laboratory.until_state(&others[0], &host, "dead");
    report("verdict on a suspended host", started.elapsed());
    assert!(started.elapsed() < VERDICT, "{:?}", started.elapsed());
    let clients: Vec<_> = others.iter().map(|other| laboratory.at(other)).collect();
    for id in stored {
        laboratory.resume_everywhere(&clients, id);
    }
    assert_reported(laboratory, &host, &others, running);
    let thawed = Instant::now();
    laboratory.fault(&format!("thaw {}", host.name));
    // The host receives calls at once, before it knows that it was dead.
    for id in stored {
        let resumed = client.connected(id);
        assert!(resumed.is_success(), "{resumed:?}");
    }
    laboratory.until_ready();
    report("return of a suspended host", thawed.elapsed());
    for id in &ids {
        laboratory.assert_runs_once(&laboratory.hosts, id);
    }
    // The running sandboxes were not resumed elsewhere, and continued when the host was thawed.
    let on_host = client.running_on(&host);
    for id in running {
        assert!(on_host.contains(id), "{id} left its host");
    }
    for id in &ids {
        laboratory.front().kill(id).expect(204);
    }
}

fn creates_continue_without_the_coordinator(laboratory: &mut Laboratory) {
    let host = laboratory.coordinator();
    let others = laboratory.others(&host);
    let started = Instant::now();
    laboratory.fault(&format!("kill {}", host.name));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = SetOnDrop(&is_over);
        for other in &others {
            let (client, is_over) = (laboratory.at(other), &is_over);
            scope.spawn(move || {
                let (mut count, mut longest) = (0, Duration::ZERO);
                while !is_over.load(Ordering::Relaxed) {
                    let made = client.create();
                    longest = longest.max(made.took);
                    let id = made.expect(201)["sandboxID"].as_str().unwrap().to_owned();
                    client.kill(&id).expect(204);
                    count += 1;
                }
                report(
                    &format!("longest of {count} creates without a coordinator"),
                    longest,
                );
                assert!(count > 10, "{count}");
            });
        }
        laboratory.until_state(&others[1], &host, "dead");
        drop(end);
    });
    report("verdict on the lost coordinator", started.elapsed());
    assert!(
        started.elapsed() < VERDICT_ON_COORDINATOR,
        "{:?}",
        started.elapsed()
    );
    start_again(laboratory, &host);
}
