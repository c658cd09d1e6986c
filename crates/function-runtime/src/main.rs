//! `jiffy-functions`: the process that runs a tenant's functions (`serve`), and the compiler of
//! modules (`compile`). The daemon starts both.
//!
//! A *tenant* is the owner of functions. All functions of a tenant run in one process. A *slot* is
//! address space for the memory of one instance, which requests use one after the other. The
//! *reset* cleans a slot after a request.

use clap::{Args, Parser, Subcommand};
use jiffy_function_runtime::compile;
use jiffy_function_runtime::serve::{self, ServeSettings};
use jiffy_proto::function::{CompileLimits, SlotReset, TenantLimits};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(
    name = "jiffy-functions",
    about = "Run WebAssembly functions, each request in its own instance"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile the module on standard input to standard output.
    Compile(CompileArgs),
    /// Serve one tenant. Descriptor 3 is the listening control socket, descriptor 4 the HTTP
    /// listener
    Serve(ServeArgs),
}

#[derive(Args)]
struct CompileArgs {
    /// Owner of the module.
    #[arg(long)]
    owner: String,
    /// Limit the processor time, in seconds
    #[arg(long, default_value_t = CompileLimits::default().cpu_s)]
    cpu_s: u64,
    /// Limit the address space, in bytes
    #[arg(long, default_value_t = CompileLimits::default().memory_bytes)]
    memory_bytes: u64,
    /// Do not confine the process; run as the current user
    #[arg(long)]
    no_jail: bool,
}

#[derive(Args)]
struct ServeArgs {
    /// Owner of the functions.
    #[arg(long)]
    owner: String,
    /// Maximum number of concurrent requests
    #[arg(long, default_value_t = TenantLimits::default().slots)]
    slots: u32,
    /// Maximum memory of all requests, in bytes
    #[arg(long, default_value_t = TenantLimits::default().memory_bytes)]
    memory_bytes: u64,
    /// Maximum number of connections
    #[arg(long, default_value_t = TenantLimits::default().connections)]
    connections: u32,
    /// Reset of slots at the end of requests
    #[arg(long, default_value = "strict")]
    reset: SlotReset,
    /// Seconds without a daemon after which the process exits
    #[arg(long, default_value_t = 600)]
    grace_s: u32,
    /// Number of threads that run guests; defaults to one per processor
    #[arg(long)]
    workers: Option<usize>,
    /// Do not confine the process; run as the current user
    #[arg(long)]
    no_jail: bool,
}

fn main() -> ExitCode {
    // A panic of one thread must not leave a process with the other threads.
    jiffy_proto::panic::abort_at_panics();
    let result = match Cli::parse().command {
        Command::Compile(args) => run_compiler(&args),
        Command::Serve(args) => run_server(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            // The daemon may have closed the other end of standard error.
            let _ = writeln!(io::stderr(), "{message}");
            ExitCode::FAILURE
        }
    }
}

/// Compiles the module on standard input.
fn run_compiler(args: &CompileArgs) -> Result<(), String> {
    let failed =
        |error: io::Error| format!("jiffy-functions: cannot confine the compiler: {error}");
    let limits = CompileLimits {
        cpu_s: args.cpu_s,
        memory_bytes: args.memory_bytes,
        ..CompileLimits::default()
    };
    let prepared = compile::prepare(!args.no_jail, &limits).map_err(failed)?;
    let module = compile::read(io::stdin().lock()).map_err(|e| e.to_string())?;
    let file = compile::compile(&prepared, &module, &args.owner).map_err(|e| e.to_string())?;
    let mut output = io::stdout().lock();
    output
        .write_all(&file)
        .map_err(|e| format!("cannot write the compiled module: {e}"))
}

/// Serves the functions of one tenant.
fn run_server(args: ServeArgs) -> Result<(), String> {
    let processors = || std::thread::available_parallelism().map_or(1, usize::from);
    let settings = ServeSettings {
        owner: args.owner,
        limits: TenantLimits {
            slots: args.slots,
            memory_bytes: args.memory_bytes,
            connections: args.connections,
            reset: args.reset,
        },
        grace: Duration::from_secs(args.grace_s.into()),
        workers: args.workers.unwrap_or_else(processors),
        jailed: !args.no_jail,
    };
    serve::serve(&settings).map_err(|e| format!("jiffy-functions: {e}"))
}
