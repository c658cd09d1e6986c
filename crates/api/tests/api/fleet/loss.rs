//! Loss and return of a host. The other hosts show its sandboxes from its *roster*, the list of its
//! sandboxes in the store. The *home* of a sandbox is its host.

use super::lab::Lab;
use crate::support::{Answer, TestCaller};
use jiffy_api::Scope;
use jiffy_fleet::roster::RosterState;
use serde_json::{Value, json};

/// Fleet whose host `lost` has sandboxes and is cut off from the others.
struct Lost {
    lab: Lab,
    key: TestCaller,
    lost: u32,
    others: [u32; 2],
    /// Paused and stored.
    paused: [String; 2],
    /// Running, and never stored.
    running: [String; 2],
    /// Running, and stored before.
    resumed: String,
}

impl Lost {
    /// Starts a fleet, creates the sandboxes on one host, and cuts this host off until it is
    /// declared dead.
    async fn cut() -> Self {
        let lab = Lab::with_store(3).await;
        let (key, _) = lab.key(Scope::Create);
        let lost = (1..=3).find(|&host| !lab.is_coordinator(host)).unwrap();
        let others: Vec<u32> = (1..=3).filter(|&host| host != lost).collect();
        let mut ids = Vec::new();
        // By the first letter: `p` is paused, `r` keeps running, `s` is paused and later resumed.
        for name in ["p0", "p1", "r0", "r1", "s0"] {
            let body = json!({ "templateID": "base", "name": name });
            let made = lab.call(lost, &key, "POST", "/sandboxes", body).await;
            let id = made.expect(201).id();
            if !name.starts_with('r') {
                lab.pause_durably(lost, &id).await;
            }
            ids.push(id);
        }
        let path = format!("/sandboxes/{}/resume", ids[4]);
        lab.call(lost, &key, "POST", &path, json!({}))
            .await
            .expect(201);
        for (n, id) in ids.iter().enumerate() {
            let state = match n {
                0 | 1 => RosterState::Stored,
                _ => RosterState::Running,
            };
            lab.until_listed(lost, id, state).await;
        }
        lab.freeze(lost);
        lab.until_lost(lost).await;
        let lost = Self {
            lab,
            key,
            lost,
            others: others.try_into().unwrap(),
            paused: [ids[0].clone(), ids[1].clone()],
            running: [ids[2].clone(), ids[3].clone()],
            resumed: ids[4].clone(),
        };
        for host in lost.others {
            let path = format!("/sandboxes/{}", lost.running[0]);
            lost.lab.until(host, &lost.key, &path, 200).await;
        }
        lost
    }

    /// Sends a call of the owner of the sandboxes to a host.
    async fn call(&self, host: u32, method: &str, path: &str, body: Value) -> Answer {
        self.lab.call(host, &self.key, method, path, body).await
    }

    /// Returns the start of the text that names the lost host and the time (20..) of its loss.
    fn cause(&self) -> String {
        format!("host h{} was lost at 20", self.lost)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_of_a_lost_host_are_shown_and_resumed_as_promised() {
    let loss = Lost::cut().await;
    let (other, _) = loss.lab.key(Scope::Create);
    for host in loss.others {
        for (ids, state) in [
            (&loss.paused[..], "paused"),
            (&loss.running, "broken"),
            (std::slice::from_ref(&loss.resumed), "broken"),
        ] {
            for id in ids {
                let path = format!("/sandboxes/{id}");
                let shown = loss.call(host, "GET", &path, Value::Null).await.expect(200);
                assert_eq!(shown.text("state"), state, "{}", shown.body);
                if state == "broken" {
                    assert!(
                        shown.body.to_string().contains(&loss.cause()),
                        "{}",
                        shown.body
                    );
                }
                // Another tenant learns nothing.
                let foreign = loss.lab.call(host, &other, "GET", &path, Value::Null).await;
                assert_eq!(foreign.expect_error(404), "sandbox_not_found");
            }
        }
        // Broken sandboxes are listed only on request.
        let path = "/v2/sandboxes";
        let mut ids = loss
            .call(host, "GET", path, Value::Null)
            .await
            .expect(200)
            .ids();
        ids.sort();
        let mut expected = loss.paused.to_vec();
        expected.sort();
        assert_eq!(ids, expected);
        let path = "/v2/sandboxes?state=broken";
        let broken = loss.call(host, "GET", path, Value::Null).await.expect(200);
        assert_eq!(broken.ids().len(), 3);
        let listed = loss.lab.call(host, &other, "GET", path, Value::Null).await;
        assert!(listed.expect(200).items().is_empty());
        let named = loss.call(host, "GET", "/sandboxes/r0", Value::Null).await;
        assert_eq!(named.expect(200).id(), loss.running[0]);
        for (id, suffix) in [(&loss.running[0], "logs"), (&loss.running[0], "resume")] {
            let path = format!("/sandboxes/{id}/{suffix}");
            let method = if suffix == "logs" { "GET" } else { "POST" };
            let answer = loss.call(host, method, &path, Value::Null).await;
            let message = answer.text("message").to_owned();
            assert!(message.contains(&loss.cause()), "{message}");
            assert_eq!(answer.expect_error(503), "host_lost");
        }
    }
    // A sandbox whose pause is stored is resumed by any host. It is then listed once, next to the
    // other stored sandbox.
    let [one, two] = loss.others;
    let path = format!("/sandboxes/{}/connect", loss.paused[0]);
    loss.call(one, "POST", &path, json!({ "timeout": 60 }))
        .await
        .expect(200);
    let path = format!("/sandboxes/{}", loss.paused[0]);
    loss.lab.located(&loss.paused[0]).await;
    for host in loss.others {
        let shown = loss.call(host, "GET", &path, Value::Null).await.expect(200);
        assert_eq!(shown.text("state"), "running");
        let all = loss.call(host, "GET", "/v2/sandboxes", Value::Null).await;
        assert_eq!(all.expect(200).ids().len(), 2);
    }
    // A running sandbox is started from its stored state on request only.
    let path = format!("/sandboxes/{}/resume", loss.resumed);
    let refused = loss.call(two, "POST", &path, json!({})).await;
    assert!(
        refused.text("message").contains("--from stored"),
        "{}",
        refused.body
    );
    assert_eq!(refused.expect_error(503), "host_lost");
    let body = json!({ "from": "stored" });
    let resumed = loss.call(two, "POST", &path, body.clone()).await;
    assert_eq!(resumed.header("jiffy-resumed-from"), Some("stored"));
    resumed.expect(201);
    // A sandbox that was never stored cannot be resumed.
    let path = format!("/sandboxes/{}/resume", loss.running[0]);
    let refused = loss.call(two, "POST", &path, body).await;
    assert_eq!(refused.expect_error(503), "host_lost");
    // The host returns. Its sandboxes that no other host has resumed run on it. The resumed ones
    // stay on the other hosts.
    loss.lab.thaw(loss.lost).await;
    for id in &loss.running {
        let path = format!("/sandboxes/{id}");
        for host in loss.others {
            let back = async {
                loop {
                    let shown = loss.call(host, "GET", &path, Value::Null).await;
                    if shown.status == 200 && shown.text("state") == "running" {
                        return;
                    }
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            };
            let limit = std::time::Duration::from_secs(30);
            tokio::time::timeout(limit, back).await.unwrap();
        }
    }
    for id in [&loss.paused[0], &loss.resumed] {
        let path = format!("/sandboxes/{id}");
        let shown = loss.call(one, "GET", &path, Value::Null).await.expect(200);
        assert_eq!(shown.text("state"), "running");
        // The host that has returned no longer has the sandbox.
        let moved = loss.lab.forwarded(loss.lost, &loss.key, &path).await;
        assert_eq!(moved.expect_error(421), "sandbox_moved");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_while_the_home_is_away_holds_after_its_return() {
    let loss = Lost::cut().await;
    let [one, two] = loss.others;
    for id in [&loss.paused[0], &loss.running[0], &loss.resumed] {
        let path = format!("/sandboxes/{id}");
        loss.call(one, "DELETE", &path, Value::Null)
            .await
            .expect(204);
        let gone = loss.call(one, "GET", &path, Value::Null).await;
        assert_ne!(gone.status, 200, "{}", gone.body);
        // No other host resumes it.
        let path = format!("/sandboxes/{id}/resume");
        let refused = loss
            .call(two, "POST", &path, json!({ "from": "stored" }))
            .await;
        assert!(refused.status >= 400, "{}", refused.body);
    }
    loss.lab.thaw(loss.lost).await;
    for id in [&loss.paused[0], &loss.running[0], &loss.resumed] {
        let path = format!("/sandboxes/{id}");
        let gone = loss.lab.forwarded(loss.lost, &loss.key, &path).await;
        assert_eq!(gone.expect_error(421), "sandbox_moved");
        loss.lab.until(two, &loss.key, &path, 404).await;
    }
    // The sandboxes that were not killed are found again.
    for id in [&loss.paused[1], &loss.running[1]] {
        let path = format!("/sandboxes/{id}");
        loss.lab.until(two, &loss.key, &path, 200).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_resumes_through_several_hosts_never_report_a_missing_sandbox() {
    let lab = Lab::with_store(3).await;
    let (key, _) = lab.key(Scope::Create);
    let lost = (1..=3).find(|&host| !lab.is_coordinator(host)).unwrap();
    let others: Vec<u32> = (1..=3).filter(|&host| host != lost).collect();
    let mut ids = Vec::new();
    for _ in 0..8 {
        let body = json!({ "templateID": "base" });
        let made = lab.call(lost, &key, "POST", "/sandboxes", body).await;
        let id = made.expect(201).id();
        lab.pause_durably(lost, &id).await;
        ids.push(id);
    }
    for id in &ids {
        lab.until_listed(lost, id, RosterState::Stored).await;
    }
    lab.freeze(lost);
    lab.until_lost(lost).await;
    let paths = ids.iter().map(|id| format!("/sandboxes/{id}"));
    for path in paths {
        for &host in &others {
            lab.until(host, &key, &path, 200).await;
        }
        let connect = format!("{path}/connect");
        // Several calls wait for the resume on their host, which another host may precede.
        let hosts = others.iter().cycle().take(6);
        let calls = hosts.map(|&host| {
            let body = json!({ "timeout": 60 });
            lab.call(host, &key, "POST", &connect, body)
        });
        let mut resumed = 0;
        for answer in futures_util::future::join_all(calls).await {
            // Calls that lose the race may be rejected, but not with 404 (a missing sandbox).
            let is_expected = [200, 201, 409, 503].contains(&answer.status);
            assert!(is_expected, "{} {}", answer.status, answer.body);
            resumed += usize::from(answer.status < 300);
        }
        assert!(resumed > 0);
    }
}
