//! Faults of hosts and of etcd, with the records in etcd.
//!
//! An *epoch* of a host lasts from its registration with the coordinator until the coordinator
//! declares it dead. If all epochs are unchanged after a fault, no host was declared dead.

use super::laboratory::{Laboratory, report};
use super::operations::{
    a_removed_front_serves_no_client, a_warm_pool_grows_on_the_host_of_the_creates,
    the_warm_pool_shrinks,
};
use super::secrets::a_secret_is_used_on_all_hosts_until_it_is_removed;
use super::store_faults::{
    a_revoked_key_is_rejected_on_all_hosts, epochs,
    sandboxes_of_a_lost_host_resume_elsewhere_or_are_reported,
};
use super::volumes::a_volume_is_used_through_all_hosts;
use super::webhooks::a_webhook_receives_the_events_of_all_hosts;
use jiffy_test_attributes::jiffy_test;
use std::time::{Duration, Instant};

/// Maximum duration of a commit while one member (process) of etcd is lost, which may be the
/// leader.
const COMMIT: Duration = Duration::from_secs(8);
/// Time for which etcd has no quorum: longer than the time without heartbeats after which a host is
/// declared dead.
const WITHOUT_QUORUM: Duration = Duration::from_secs(15);

#[jiffy_test(engine = "microvm", root)]
fn a_fleet_with_etcd_holds_its_promises_when_hosts_and_etcd_fail() {
    let Some(mut laboratory) = Laboratory::start("etcd") else {
        return crate::support::skip("the test servers are not built");
    };
    a_revoked_key_is_rejected_on_all_hosts(&laboratory);
    a_secret_is_used_on_all_hosts_until_it_is_removed(&laboratory);
    a_webhook_receives_the_events_of_all_hosts(&laboratory);
    a_volume_is_used_through_all_hosts(&laboratory);
    let host = a_warm_pool_grows_on_the_host_of_the_creates(&laboratory);
    // Meanwhile the demand decreases.
    commits_continue_without_a_member_of_etcd(&mut laboratory);
    the_warm_pool_shrinks(&laboratory, &host);
    nothing_stops_without_a_quorum(&mut laboratory);
    sandboxes_of_a_lost_host_resume_elsewhere_or_are_reported(&mut laboratory);
    a_removed_front_serves_no_client(&laboratory);
}

/// Each member is lost in turn, so that one of them is the leader.
fn commits_continue_without_a_member_of_etcd(laboratory: &mut Laboratory) {
    for member in 1..=3 {
        laboratory.fault(&format!("kill etcd{member}"));
        let started = Instant::now();
        // A new key is committed before the answer.
        laboratory.create_key(&format!("committed{member}"), "read");
        report(&format!("commit without etcd{member}"), started.elapsed());
        assert!(started.elapsed() < COMMIT, "{:?}", started.elapsed());
        laboratory.fault(&format!("start etcd{member}"));
        laboratory.until_ready();
    }
}

fn nothing_stops_without_a_quorum(laboratory: &mut Laboratory) {
    let host = laboratory.ordinary();
    let ids = laboratory.counting_on(&host, 2);
    let epochs = epochs(laboratory);
    // Only etcd3 remains: one member of three is no majority.
    laboratory.fault("kill etcd1");
    laboratory.fault("freeze etcd2");
    let started = Instant::now();
    let mut creates = 0;
    while started.elapsed() < WITHOUT_QUORUM {
        for host in &laboratory.hosts {
            let client = laboratory.at(host);
            let id = client.created();
            assert_eq!(laboratory.sh(&client, &id, "echo up").unwrap(), "up");
            client.kill(&id).expect(204);
            creates += 1;
            for id in &ids {
                laboratory.assert_runs_once(&laboratory.hosts, id);
            }
        }
    }
    println!("{creates:>8} creates without a quorum");
    laboratory.fault("thaw etcd2");
    laboratory.fault("start etcd1");
    laboratory.until_ready();
    report("loss of the quorum, and its end", started.elapsed());
    assert_eq!(epochs, self::epochs(laboratory), "a host was declared dead");
    for id in &ids {
        laboratory.assert_runs_once(&laboratory.hosts, id);
        laboratory.front().kill(id).expect(204);
    }
}
