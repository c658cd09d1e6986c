//! Sends requests to all guests in turn. Each request searches for marks of earlier requests, and
//! leaves marks of its own. A slot is memory that requests use one after the other, and that is
//! reset after each request.

use super::trace_guest::{FUNCTIONS, TraceGuest};
use crate::support::{TestClient, TestResponse, TestTenant};
use jiffy_proto::function::{FunctionLimits, LoadSettings, SlotReset, TenantLimits, World};
use std::fs::{self, File};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Number of concurrent requests, and number of clients that send them.
pub const SLOTS: u32 = 2;
/// Timeout for a slot to become free, for example after the client of its request has disconnected.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of consecutive requests to one function in the second half of a search.
const RUN: u32 = 40;

/// Compiled file and its digest.
type Artifact = (Vec<u8>, String);

/// Compiled files of a world's guests, created once.
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

/// Returns a tenant with all guests as functions.
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
                // Spinning requests must reach this limit; other requests must not, even on a busy
                // host.
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
    /// Answers after at least one millisecond.
    Late,
    Trap,
    Spin,
    /// The client disconnects.
    Left,
}

/// Search with a given number of requests.
#[derive(Debug, Clone, Copy)]
pub struct Search {
    pub world: World,
    pub requests: u32,
    /// One in this number of requests is late.
    pub late_interval: u32,
}

impl Search {
    /// Returns how a request ends. A request is answered unless its number selects another end.
    fn ending(&self, number: u32) -> Ending {
        match number % 100 {
            3 if number % 1000 == 3 => Ending::Spin,
            7 | 57 => Ending::Trap,
            9 => Ending::Left,
            _ if number % self.late_interval == 4 => Ending::Late,
            _ => Ending::Answer,
        }
    }

    /// Returns the function of a request. In the first half, consecutive requests use different
    /// functions, so that a function receives the slots of other functions. In the second half,
    /// [`RUN`] consecutive requests use the same function, so that it receives its own slots again,
    /// with the pages that [`SlotReset::Fast`] has restored and retained.
    fn guest(&self, number: u32) -> TraceGuest {
        let turn = if number < self.requests / 2 {
            number
        } else {
            number / RUN
        };
        TraceGuest(1 + usize::try_from(turn).unwrap() % FUNCTIONS)
    }

    /// Returns the path of a request: a slash and two characters. The first character selects the
    /// end of the request. The second one selects the position of its marks in memory: `a` for all
    /// pages, or a digit for one page at the start of this tenth of memory.
    fn path(&self, number: u32) -> String {
        let ending = match self.ending(number) {
            Ending::Answer => 'x',
            Ending::Late | Ending::Left => 'w',
            Ending::Trap => 't',
            Ending::Spin => 's',
        };
        match number % 8 {
            0 => format!("/{ending}a"),
            // 16 consecutive numbers have the same digit, so the page was usually written by
            // earlier requests.
            _ => format!("/{ending}{}", number / 16 % 10),
        }
    }

    /// Sends all requests. Fails if a request finds a mark.
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

    /// Sends a request, and checks its end. An answer shows whether the slot contained data of an
    /// earlier request.
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
                assert_eq!(
                    get_when_admitted(client, &name, &path).fault().1,
                    "function_cpu"
                );
            }
            Ending::Trap => {
                assert_eq!(
                    get_when_admitted(client, &name, &path).fault().1,
                    "function_trap"
                );
            }
            Ending::Left => {
                let head =
                    format!("GET {path} HTTP/1.1\r\nhost: f\r\njiffy-function: {name}\r\n\r\n");
                tenant.connect().send(head.as_bytes());
            }
            Ending::Answer | Ending::Late => {
                let answer = get_when_admitted(client, &name, &path);
                let expected = match self.world {
                    World::Core => guest.clean(),
                    // The answer of a component also contains the numbers of three handles: of the
                    // request, of the response, and of the first handle that it created. They are
                    // the same in each answer, unless handles of an earlier request have remained.
                    World::Http => {
                        let reported = answer.text().get(2..5).unwrap_or_default().to_owned();
                        let handles = handles.get_or_init(|| reported);
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

/// Returns the answer to a request, which is repeated until a slot is free.
fn get_when_admitted(client: &mut TestClient, name: &str, path: &str) -> TestResponse {
    let start = Instant::now();
    loop {
        let answer = client.get(name, path);
        if answer.status != 503 {
            return answer;
        }
        assert!(start.elapsed() < SLOT_TIMEOUT, "{answer:?}");
    }
}
