//! Sandboxes of a tenant in the laboratory.

use super::client::{Client, Reply};
use super::laboratory::{Host, Laboratory};
use crate::support::wait_for;
use serde_json::{Value, json};
use std::time::Duration;

/// Lifetime of the sandboxes in seconds.
const TIMEOUT: u64 = 3600;

impl Client {
    /// Creates a sandbox.
    pub fn create(&self) -> Reply {
        let body = json!({ "templateID": "base", "timeout": TIMEOUT });
        self.call("POST", "/sandboxes", &body)
    }

    /// Creates a sandbox, which must succeed, and returns its id.
    #[track_caller]
    pub fn created(&self) -> String {
        let made = self.create().expect(201);
        made["sandboxID"].as_str().unwrap().to_owned()
    }

    pub fn kill(&self, id: &str) -> Reply {
        self.call("DELETE", &format!("/sandboxes/{id}"), &Value::Null)
    }

    /// Returns a sandbox.
    pub fn sandbox(&self, id: &str) -> Reply {
        self.get(&format!("/sandboxes/{id}"))
    }

    /// Pauses a sandbox, and waits until its state is stored.
    #[track_caller]
    pub fn pause_durably(&self, id: &str) -> Duration {
        let path = format!("/sandboxes/{id}/pause");
        let paused = self.call("POST", &path, &json!({ "durable": true }));
        let took = paused.took;
        assert!(paused.is_success(), "{paused:?}");
        took
    }

    /// Resumes a sandbox unless it runs.
    pub fn connect(&self, id: &str) -> Reply {
        let path = format!("/sandboxes/{id}/connect");
        self.call("POST", &path, &json!({ "timeout": TIMEOUT }))
    }

    /// Repeats [`Self::connect`] while the answer requests a repetition, as SDKs do.
    #[track_caller]
    pub fn connected(&self, id: &str) -> Reply {
        wait_for("a resume", || {
            let reply = self.connect(id);
            // The host may have been declared dead during the call. A repeated call may then resume
            // the sandbox on another host.
            let is_in_transition = reply.body["message"]
                .as_str()
                .is_some_and(|message| message.contains("does not answer"));
            let is_final = reply.code() == "host_lost" && !is_in_transition;
            if [409, 503].contains(&reply.status) && !is_final {
                return None;
            }
            assert!(reply.is_success(), "{reply:?}");
            Some(reply)
        })
    }

    /// Returns the ids of the running sandboxes on a host.
    #[track_caller]
    pub fn running_on(&self, host: &Host) -> Vec<String> {
        let path = format!("/v2/sandboxes?state=running&host={}", host.id);
        let listed = self.get(&path).expect(200);
        let all = listed.as_array().unwrap().iter();
        all.map(|sandbox| sandbox["sandboxID"].as_str().unwrap().to_owned())
            .collect()
    }
}

impl Laboratory {
    /// Runs a script in a sandbox, through a host or front.
    pub fn sh(&self, client: &Client, id: &str, script: &str) -> Result<String, String> {
        let done = self.jiffy(client, &["exec", id, "--", "sh", "-c", script]);
        match done.code {
            Some(0) => Ok(done.stdout.trim_end().to_owned()),
            _ => Err(format!("{done:?}")),
        }
    }

    /// Runs `creates` while only one host receives new sandboxes.
    pub fn only_on<T>(&self, host: &Host, creates: impl FnOnce() -> T) -> T {
        let coordinator = self.coordinator();
        let change = |command| {
            for other in self.others(host) {
                // The coordinator confirms a command at once, but cannot drain itself.
                let is_coordinator = other.id == coordinator.id;
                let through = if is_coordinator { host } else { &coordinator };
                self.admin(through, &["fleet", command, &other.id]);
            }
        };
        change("drain");
        let created = creates();
        change("undrain");
        created
    }

    /// Creates sandboxes on one host. Each sends an increasing counter to the sink, and has a file
    /// that contains its id. The other hosts are drained meanwhile, so that none of them is
    /// selected.
    pub fn counting_on(&self, host: &Host, count: usize) -> Vec<String> {
        let client = self.at(host);
        let ids: Vec<_> = self.only_on(host, || (0..count).map(|_| client.created()).collect());
        let running = client.running_on(host);
        for id in &ids {
            assert!(
                running.contains(id),
                "{id} is not on {}: {running:?}",
                host.id
            );
            let script = format!("echo {id} > /home/user/file; {}", self.sink.script(id));
            self.sh(&client, id, &script).unwrap();
            self.until_counting(id, 0);
        }
        ids
    }

    /// Waits until a sandbox has sent a counter above `value`, and returns it.
    pub fn until_counting(&self, id: &str, value: u64) -> u64 {
        wait_for("the counter of a guest", || {
            let count = self.sink.count(id)?;
            (count.value > value).then_some(count.value)
        })
    }

    /// Asserts that exactly one live host runs a sandbox, that the sandbox has its file, and that
    /// its counter continues.
    #[track_caller]
    pub fn assert_runs_once(&self, hosts: &[Host], id: &str) {
        let client = self.at(&hosts[0]);
        let on = |host: &&Host| client.running_on(host).contains(&id.to_owned());
        let owners: Vec<_> = hosts.iter().filter(on).collect();
        assert_eq!(owners.len(), 1, "{id} runs on {owners:?}");
        let content = self.sh(&client, id, "cat /home/user/file").unwrap();
        assert_eq!(content, id);
        let value = self.sink.count(id).map_or(0, |count| count.value);
        self.until_counting(id, value);
        self.sink.assert_single_incarnations();
    }

    /// Resumes a stored sandbox through several hosts or fronts at once. All calls must succeed.
    pub fn resume_everywhere(&self, clients: &[Client], id: &str) {
        std::thread::scope(|scope| {
            for client in clients {
                scope.spawn(move || client.connected(id));
            }
        });
    }
}
