//! Requests to all guests in turn, each of which looks for marks of those before.

use crate::support::{TestClient, TestResponse, TestTenant};
use crate::trace_guest::{FUNCTIONS, TraceGuest};
use jiffy_proto::function::{FunctionLimits, LoadSettings, SlotReset, TenantLimits, World};
use std::fs::{self, File};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Requests that run at once, and clients that send them.
pub const SLOTS: u32 = 2;
/// Time in which a request whose client has left gives its slot back.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);
/// Requests to one function before the next one, in the second half of a search.
const RUN: u32 = 40;

/// Compiled file and its digest.
type Artifact = (Vec<u8>, String);

/// Compiled files of a world's guests, made once.
fn artifacts(world: World) -> &'static [Artifact] {
    static ALL: [OnceLock<Vec<Artifact>>; 2] = [const { OnceLock::new() }; 2];
    let compile = |guest: TraceGuest, tenant: &TestTenant| {
        let module = match world {
            World::Core => guest.core(),
            World::Http => guest.component(),
        };
        let (path, digest) = tenant.compile(&module).unwrap();
        (fs::read(path).unwrap(), digest)
    };
    ALL[usize::from(world == World::Http)].get_or_init(|| {
        let tenant = TestTenant::start();
        TraceGuest::all()
            .map(|guest| compile(guest, &tenant))
            .collect()
    })
}

/// Tenant with all guests as functions.
pub fn tenant(world: World, reset: SlotReset) -> TestTenant {
    let tenant = TestTenant::with_limits(&TenantLimits {
        reset,
        slots: SLOTS,
        ..TenantLimits::default()
    });
    for (guest, (artifact, digest)) in TraceGuest::all().zip(artifacts(world)) {
        let path = tenant.path();
        fs::write(&path, artifact).unwrap();
        let file = File::open(path).unwrap();
        let settings = LoadSettings {
            limits: FunctionLimits {
                // Requests that spin use it up; others must not on a busy host.
                cpu_ms: 100,
                wall_ms: 10_000,
                ..FunctionLimits::default()
            },
            env: guest.environment(),
            ..LoadSettings::default()
        };
        let name = guest.name();
        tenant.process.load(&name, &file, digest, settings).unwrap();
    }
    tenant
}

/// End of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Answer,
    /// Answers after a millisecond or more.
    Late,
    Trap,
    Spin,
    /// Its client does not wait.
    Left,
}

/// Search with a number of requests.
#[derive(Debug, Clone, Copy)]
pub struct Search {
    pub world: World,
    pub requests: u32,
    /// Requests of which one is late.
    pub late_interval: u32,
}

impl Search {
    fn ending(&self, number: u32) -> Ending {
        match number % 100 {
            3 if number % 1000 == 3 => Ending::Spin,
            7 | 57 => Ending::Trap,
            9 => Ending::Left,
            _ if number % self.late_interval == 4 => Ending::Late,
            _ => Ending::Answer,
        }
    }

    /// Function of a request. Each request has the next one at first, so that slots go from one to
    /// another; then it stays for a while, so that resets know the pages that are written.
    fn guest(&self, number: u32) -> TraceGuest {
        let turn = match number < self.requests / 2 {
            true => number,
            false => number / RUN,
        };
        TraceGuest(1 + usize::try_from(turn).unwrap() % FUNCTIONS)
    }

    /// Path of a request: its end, and the place of its marks.
    fn path(&self, number: u32) -> String {
        let ending = match self.ending(number) {
            Ending::Answer => 'x',
            Ending::Late | Ending::Left => 'w',
            Ending::Trap => 't',
            Ending::Spin => 's',
        };
        match number % 8 {
            0 => format!("/{ending}a"),
            // Mostly pages that others wrote to, and some that none did.
            _ => format!("/{ending}{}", number / 16 % 10),
        }
    }

    /// Sends all requests, and fails if one finds a mark.
    pub fn run(&self, tenant: &TestTenant) {
        let next = AtomicU32::new(0);
        let handles = OnceLock::new();
        let ended = [const { AtomicU32::new(0) }; 5];
        std::thread::scope(|scope| {
            for _ in 0..SLOTS {
                scope.spawn(|| {
                    let mut client = tenant.connect();
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= self.requests {
                            return;
                        }
                        self.ask(tenant, &mut client, number, &handles);
                        let ending = self.ending(number) as usize;
                        ended[ending].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(
            ended.iter().all(|count| count.load(Ordering::Relaxed) > 0),
            "{ended:?}"
        );
    }

    fn ask(
        &self,
        tenant: &TestTenant,
        client: &mut TestClient,
        number: u32,
        handles: &OnceLock<String>,
    ) {
        let (guest, path) = (self.guest(number), self.path(number));
        let name = guest.name();
        match self.ending(number) {
            Ending::Spin => {
                assert_eq!(admitted(client, &name, &path).fault().1, "function_cpu");
            }
            Ending::Trap => {
                assert_eq!(admitted(client, &name, &path).fault().1, "function_trap");
            }
            Ending::Left => {
                let head =
                    format!("GET {path} HTTP/1.1\r\nhost: f\r\njiffy-function: {name}\r\n\r\n");
                tenant.connect().send(head.as_bytes());
            }
            Ending::Answer | Ending::Late => {
                let answer = admitted(client, &name, &path);
                let expected = match self.world {
                    World::Core => guest.clean(),
                    World::Http => {
                        let told = answer.text().get(2..5).unwrap_or_default().to_owned();
                        let handles = handles.get_or_init(|| told);
                        let environment = guest.environment().into_iter();
                        let environment =
                            environment.map(|(name, value)| format!("{name}={value};"));
                        guest.clean() + handles + &environment.collect::<String>()
                    }
                };
                assert_eq!(answer.text(), expected, "request {number} {path}");
            }
        }
    }
}

/// Answer to a request once a slot is free.
fn admitted(client: &mut TestClient, name: &str, path: &str) -> TestResponse {
    let start = Instant::now();
    loop {
        let answer = client.get(name, path);
        if answer.status != 503 {
            return answer;
        }
        assert!(start.elapsed() < SLOT_TIMEOUT, "{answer:?}");
    }
}
